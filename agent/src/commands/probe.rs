//! The child process of a probe: see `kernel::interference`.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use crate::{cli::Probe, kernel::interference};

pub(super) fn run(args: &Probe) -> anyhow::Result<ExitCode> {
    let rto_us = interference::child(&args.cgroup, args.address)?;
    writeln!(io::stdout(), "{rto_us}")?;
    Ok(ExitCode::SUCCESS)
}
