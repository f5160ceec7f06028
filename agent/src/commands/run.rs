//! `rto-agent run`.

use std::process::ExitCode;

use crate::{cli::Run, daemon, telemetry};

pub(super) fn run(args: &Run) -> anyhow::Result<ExitCode> {
    telemetry::init(args.log_format)?;
    daemon::run(&args.config.config, args.cgroup.as_deref())?;
    Ok(ExitCode::SUCCESS)
}
