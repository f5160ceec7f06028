//! `rto-agent watch`.

use std::process::ExitCode;

use crate::cli::Watch;

pub(super) fn run(_args: &Watch) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not yet")
}
