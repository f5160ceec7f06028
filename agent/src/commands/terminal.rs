//! Terminal width and colours.

use std::{
    env,
    io::{self, IsTerminal as _},
};

use clap::ColorChoice;

use crate::cli::{ColorArg, WideArg};

const GOOD: &str = "32";
const WARNING: &str = "33";
const BAD: &str = "1;31";

/// States in the output, whether they occur only at the start of a line, and their colours.
const STATES: [(&str, bool, &str); 13] = [
    ("ok     ", true, GOOD),
    ("WARNING", true, WARNING),
    ("PROBLEM", true, BAD),
    ("warning:", true, WARNING),
    ("problem:", true, BAD),
    ("good:", true, GOOD),
    ("health         good", true, GOOD),
    ("PROBLEM", false, BAD),
    ("NOT repaired", true, BAD),
    ("NO:", false, BAD),
    ("REFUSED", false, BAD),
    ("OUT OF SYNC", false, BAD),
    ("INTERFERENCE", false, BAD),
];

/// Columns of stdout; `None` if it is not a terminal, or with `--wide`.
pub(super) fn columns(WideArg { wide }: WideArg) -> Option<usize> {
    if wide || !io::stdout().is_terminal() {
        return None;
    }
    let (columns, _) = ratatui::crossterm::terminal::size().ok()?;
    Some(columns.into()).filter(|columns| *columns > 0)
}

/// Colours the states in a text, if colours are enabled.
pub(super) fn coloured(text: String, color: ColorArg) -> String {
    if is_coloured(color) {
        paint(&text)
    } else {
        text
    }
}

/// Whether colours are enabled on stdout (no-color.org).
pub(super) fn is_coloured(ColorArg { color }: ColorArg) -> bool {
    match color {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => {
            io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
        }
    }
}

/// Wraps a text at blanks to this width; all lines but the first are indented.
pub(super) fn wrapped(text: &str, indent: usize, columns: Option<usize>) -> String {
    let Some(columns) = columns else {
        return text.to_owned();
    };
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            Some(line) => {
                // Padding before the break.
                line.truncate(line.trim_end().len());
                lines.push(format!("{:indent$}{word}", ""));
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

/// Wraps each line to this width; what follows a line's first break is indented by two more than the line.
pub(super) fn wrapped_lines(text: String, columns: Option<usize>) -> String {
    if columns.is_none() {
        return text;
    }
    let line = |line: &str| {
        let indent = line.len() - line.trim_start_matches(' ').len();
        wrapped(line, indent + 2, columns) + "\n"
    };
    text.lines().map(line).collect()
}

/// Wraps a message for stderr to the width of the terminal, but not the lines of a file that it quotes.
pub(super) fn wrapped_message(text: &str) -> String {
    let size = ratatui::crossterm::terminal::size();
    let columns = size.ok().filter(|_| io::stderr().is_terminal());
    let columns = columns.map(|(columns, _)| columns.into());
    let line = |line: &str| match line.starts_with(' ') {
        true => format!("{line}\n"),
        false => wrapped(line, 2, columns.filter(|columns| *columns > 0)) + "\n",
    };
    text.lines().map(line).collect()
}

fn paint(text: &str) -> String {
    let line = |line: &str| {
        let found = STATES.iter().find_map(|(state, first, style)| {
            let at = line.find(state)?;
            (at == 0 || !first).then_some((at, state, style))
        });
        match found {
            None => line.to_owned(),
            Some((at, state, style)) => {
                let (before, rest) = line.split_at(at);
                let after = &rest[state.len()..];
                format!("{before}\x1b[{style}m{state}\x1b[0m{after}")
            }
        }
    };
    text.split_inclusive('\n').map(line).collect()
}

/// Truncates a line to this width.
pub(super) fn shortened(line: &str, columns: Option<usize>) -> String {
    match columns {
        Some(columns) if line.chars().count() > columns => {
            let kept: String = line.chars().take(columns.saturating_sub(1)).collect();
            format!("{}…", kept.trim_end())
        }
        _ => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_coloured_on_terminal() {
        let text = "ok       a: b\nWARNING  c\nattached       NO: gone\nok\n".to_owned();
        let colours = "\x1b[32mok     \x1b[0m  a: b\n\x1b[33mWARNING\x1b[0m  c\n\
                       attached       \x1b[1;31mNO:\x1b[0m gone\nok\n";
        let coloured = |color| coloured(text.clone(), ColorArg { color });
        assert_eq!(coloured(ColorChoice::Always), colours);
        assert_eq!(coloured(ColorChoice::Never), text);
    }

    #[test]
    fn lines_wrap_at_blanks() {
        let text = "accepted  rto_min is set after the first sample";
        assert_eq!(wrapped(text, 10, None), text);
        let lines = "accepted  rto_min is\n          set after the\n          first sample";
        assert_eq!(wrapped(text, 10, Some(23)), lines);
        // A word longer than a line is put on its own line.
        assert_eq!(
            wrapped("a /very/long/path", 2, Some(6)),
            "a\n  /very/long/path"
        );
        let text = "rto_min 20ms\n  of policy near\n";
        let lines = "rto_min 20ms\n  of policy\n    near\n";
        assert_eq!(wrapped_lines(text.to_owned(), Some(12)), lines);
        assert_eq!(wrapped_lines(text.to_owned(), None), text);
    }

    #[test]
    fn line_is_cut_at_terminal_width() {
        assert_eq!(shortened("abc def", Some(7)), "abc def");
        assert_eq!(shortened("abc def", Some(5)), "abc…");
        assert_eq!(shortened("abc def", None), "abc def");
    }
}
