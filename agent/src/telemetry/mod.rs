//! Logs and metrics. (stdout is data; logs go to the journal or to stderr.)

pub mod exposition;
pub mod http;
pub mod metrics;

use std::os::fd::AsFd as _;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    filter::Targets, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

use crate::cli::LogFormat;

/// Installs the log. `RTO_AGENT_LOG` sets the level (`info` by default), also by target, in the syntax of
/// [`Targets`].
pub fn init(format: LogFormat) -> anyhow::Result<()> {
    let filter = match std::env::var("RTO_AGENT_LOG") {
        Ok(text) => text
            .parse::<Targets>()
            .map_err(|e| anyhow::anyhow!("RTO_AGENT_LOG={text:?}: {e}; for instance debug"))?,
        // aya logs through `log` what is its own affair.
        Err(_) => Targets::new().with_default(LevelFilter::INFO),
    };
    let registry = tracing_subscriber::registry().with(filter);
    let stderr = || {
        tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_target(false)
    };
    match format {
        LogFormat::Auto if stderr_is_journal() => match tracing_journald::layer() {
            Ok(journal) => registry.with(journal.with_field_prefix(None)).try_init()?,
            Err(_) => registry.with(stderr().with_ansi(false)).try_init()?,
        },
        LogFormat::Auto | LogFormat::Text => {
            let color = std::io::IsTerminal::is_terminal(&std::io::stderr());
            registry.with(stderr().with_ansi(color)).try_init()?;
        }
        LogFormat::Json => registry.with(stderr().json()).try_init()?,
    }
    Ok(())
}

/// Whether stderr is the journal's stream: systemd.exec(5), `$JOURNAL_STREAM` = device:inode.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    let Ok(stat) = nix::sys::stat::fstat(std::io::stderr().as_fd()) else {
        return false;
    };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}
