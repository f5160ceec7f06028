//! `rto-agent run`.

use std::process::ExitCode;

use crate::{cli::Run, daemon, kernel::preflight, telemetry};

pub(super) fn run(args: &Run) -> anyhow::Result<ExitCode> {
    preflight::ignore_signals()?;
    preflight::check_threads()?;
    telemetry::init(args.log_format)?;
    daemon::run(&args.config.config, args.cgroup.as_deref())?;
    Ok(ExitCode::SUCCESS)
}
