//! Developer commands of rto-agent: `cargo xtask VERB`. It depends on no other crate of the workspace.
#![expect(clippy::print_stdout, reason = "progress and results go to stdout")]

use std::path::PathBuf;

use clap::Parser;

mod ansible;
mod arch;
mod bench;
mod chart;
mod coverage;
mod deny;
mod dist;
mod docs;
mod ebpf;
mod fuzz;
mod host;
mod miri;
mod node;
mod process;
mod setup;
mod soak;
mod test;
mod tools;
mod vm;

#[derive(Parser)]
#[command(about, bin_name = "cargo xtask")]
enum Verb {
    /// Test the Ansible role on a copy of this machine's file system
    Ansible,
    /// Measure what the agent costs
    #[command(disable_help_flag = true)]
    Bench(bench::Args),
    /// Render the Helm chart, and validate what comes out
    Chart,
    /// Print the lines of each file that the tests run, integration tests and the programs they start included
    Coverage(coverage::Args),
    /// Run an end-to-end demo in temporary namespaces: connect() through outages without and with the agent
    Demo,
    /// Check licences, sources and known vulnerabilities of the dependencies
    Deny,
    /// Build what is released: packages, archives and an image, in target/dist
    Dist(dist::Args),
    /// Check the links of the documents, and build the book of docs/
    Docs,
    /// Build the eBPF object kept in the tree, or verify that the sources give it
    Ebpf(ebpf::Args),
    /// Fuzz the parsers of untrusted input
    Fuzz(fuzz::Args),
    /// Test the systemd unit, or the packages, in a virtual machine with systemd
    Host(host::Args),
    /// Run the tests of agent-common under Miri, which detects undefined behaviour
    Miri,
    /// Test the container as the Helm chart runs it, in a virtual machine
    Node(node::Args),
    /// Install missing system packages for tests and demo
    Setup,
    /// Disturb an agent for hours, in two virtual machines with connections between them, and look for leaks
    Soak(soak::Args),
    /// Run all tests: unit, property, documentation and, as root, integration
    Test(test::Args),
    /// Run the integration tests on other kernels, in small virtual machines
    Vm(vm::Args),
}

fn main() -> anyhow::Result<()> {
    match Verb::parse() {
        Verb::Ansible => ansible::run(),
        Verb::Bench(args) => bench::run(&args),
        Verb::Chart => chart::run(),
        Verb::Coverage(args) => coverage::run(&args),
        Verb::Demo => bench::demo(),
        Verb::Deny => deny::run(),
        Verb::Dist(args) => dist::run(&args),
        Verb::Docs => docs::run(),
        Verb::Ebpf(args) => ebpf::run(&args),
        Verb::Fuzz(args) => fuzz::run(&args),
        Verb::Host(args) => host::run(&args),
        Verb::Miri => miri::run(),
        Verb::Node(args) => node::run(&args),
        Verb::Setup => setup::run(),
        Verb::Soak(args) => soak::run(&args),
        Verb::Test(args) => test::run(&args),
        Verb::Vm(args) => vm::run(&args),
    }
}

fn root() -> PathBuf {
    let xtask = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().map_or(xtask.clone(), PathBuf::from)
}
