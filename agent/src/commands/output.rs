//! What a verb prints, and its exit status.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use rto_agent_core::printable;
use serde::Serialize;

use super::terminal::{coloured, columns, wrapped_lines};
use crate::cli::{ColorArg, WideArg};

/// Exit status 0 if `good`, else 1.
pub(super) fn exit(good: bool) -> ExitCode {
    if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Prints a text with lines wrapped to the width of the terminal, or the value as JSON. Returns the exit status of a
/// verb that has nothing to add.
pub(super) fn print<T: Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce() -> String,
) -> anyhow::Result<ExitCode> {
    print_table(json, value, WideArg { wide: false }, |_| text())
}

/// The same for a text with tables, which gets the width: `None` if it is not limited.
pub(super) fn print_table<T: Serialize>(
    json: bool,
    value: &T,
    wide: WideArg,
    text: impl FnOnce(Option<usize>) -> String,
) -> anyhow::Result<ExitCode> {
    let columns = columns(wide);
    print_styled(json, value, || text(columns), columns, |text| text)
}

/// The same with coloured states, if colours are enabled.
pub(super) fn print_coloured<T: Serialize>(
    json: bool,
    value: &T,
    color: ColorArg,
    wide: WideArg,
    text: impl FnOnce(Option<usize>) -> String,
) -> anyhow::Result<ExitCode> {
    let columns = columns(wide);
    let style = |text| coloured(text, color);
    print_styled(json, value, || text(columns), columns, style)
}

/// Escapes the text before colouring it, so that the only control sequences are this program's own.
fn print_styled<T: Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce() -> String,
    columns: Option<usize>,
    style: impl FnOnce(String) -> String,
) -> anyhow::Result<ExitCode> {
    // Without a buffer, each of a million lines would be a system call.
    let mut out = io::BufWriter::new(io::stdout().lock());
    if json {
        serde_json::to_writer_pretty(printable::JsonWriter(&mut out), value)
            .map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        let text = wrapped_lines(printable::lines(&text()).into_owned(), columns);
        out.write_all(style(text).as_bytes())?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}
