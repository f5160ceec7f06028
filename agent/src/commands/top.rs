//! `rto-agent top`.

use std::process::ExitCode;

use crate::cli::Top;

pub(super) fn run(_args: &Top) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not yet")
}
