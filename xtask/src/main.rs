//! What a developer of rto-agent runs: `cargo xtask VERB`.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

mod ebpf;
mod process;

#[derive(Parser)]
#[command(about, bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Build the eBPF object that is kept in the tree, or prove that it comes from the sources
    Ebpf(ebpf::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Ebpf(args) => ebpf::run(&args),
    }
}

/// The workspace's root.
fn root() -> PathBuf {
    let xtask = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().map_or(xtask.clone(), PathBuf::from)
}
