//! `rto-agent run`.

use std::process::ExitCode;

use rto_agent_daemon::{daemon, telemetry};
use rto_agent_kernel::kernel::preflight;

use crate::cli::Run;

pub(super) fn run(args: &Run) -> anyhow::Result<ExitCode> {
    preflight::ignore_signals()?;
    preflight::check_threads()?;
    telemetry::init(args.log_format)?;
    daemon::run(&args.config.config, args.cgroup.as_deref())?;
    Ok(ExitCode::SUCCESS)
}
