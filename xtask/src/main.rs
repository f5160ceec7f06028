//! What a developer of rto-agent runs: `cargo xtask VERB`.
#![expect(clippy::print_stdout, reason = "what a verb does is said on stdout")]

use std::path::PathBuf;

use clap::{Parser, Subcommand};

mod bench;
mod demo;
mod deny;
mod ebpf;
mod fuzz;
mod host;
mod miri;
mod process;
mod setup;
mod test;
mod tools;
mod vm;

#[derive(Parser)]
#[command(about, bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Measure what the agent costs
    Bench(bench::Args),
    /// Show SYN retransmission before and after, in namespaces of its own
    Demo,
    /// Check licences and sources of what the tree depends on, and known vulnerabilities
    Deny,
    /// Build the eBPF object that is kept in the tree, or prove that it comes from the sources
    Ebpf(ebpf::Args),
    /// Feed what is read from others with what nobody would send, and watch it not break
    Fuzz(fuzz::Args),
    /// Check the service on a host of its own: a virtual machine with systemd
    Host(host::Args),
    /// Run the tests of agent-common on Miri, which sees undefined behaviour
    Miri,
    /// Install the system packages that tests and demo need, if they are missing
    Setup,
    /// Run all tests: unit, property, documentation, and (as root) integration
    Test(test::Args),
    /// Run integration tests on another kernel, in a small virtual machine
    Vm(vm::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Bench(args) => bench::run(&args),
        Verb::Demo => demo::run(),
        Verb::Deny => deny::run(),
        Verb::Ebpf(args) => ebpf::run(&args),
        Verb::Fuzz(args) => fuzz::run(&args),
        Verb::Host(args) => host::run(&args),
        Verb::Miri => miri::run(),
        Verb::Setup => setup::run(),
        Verb::Test(args) => test::run(&args),
        Verb::Vm(args) => vm::run(&args),
    }
}

/// The workspace's root.
fn root() -> PathBuf {
    let xtask = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().map_or(xtask.clone(), PathBuf::from)
}
