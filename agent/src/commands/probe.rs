//! The child process of a probe: see `kernel::interference`.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use rto_agent_kernel::kernel::interference;

use crate::cli::Probe;

pub(super) fn run(args: &Probe) -> anyhow::Result<ExitCode> {
    let rto_us = interference::child(&args.cgroup, args.address)?;
    writeln!(io::stdout(), "{rto_us}")?;
    Ok(ExitCode::SUCCESS)
}
