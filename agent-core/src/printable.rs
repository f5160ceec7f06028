//! Text for terminals and JSON: counts with their nouns, and names of files and processes without
//! control characters.

use std::{
    borrow::Cow,
    fmt::{self, Write as _},
    io,
    path::Path,
};

use serde::{Serialize as _, Serializer};

/// A count with its noun: "1 entry", "2 entries".
pub fn counted<N>(count: N, one: &str, many: &str) -> String
where
    N: fmt::Display + PartialEq + From<u8>,
{
    let noun = if count == N::from(1) { one } else { many };
    format!("{count} {noun}")
}

/// A direction as people read it; "active" and "passive" are its names in JSON and metrics.
pub fn direction_text(name: &str) -> &str {
    match name {
        "active" => "outgoing",
        "passive" => "incoming",
        other => other,
    }
}

/// A path as text. Bytes that are not UTF-8 are shown as U+FFFD, so that a name cannot make an
/// answer fail.
pub fn path(path: &Path) -> String {
    text(&path.to_string_lossy()).into_owned()
}

/// Escapes characters that a terminal acts on as Rust does (`\u{1b}`). Escaping twice changes
/// nothing more.
pub fn text(text: &str) -> Cow<'_, str> {
    escaped(text, acts)
}

/// The same for a text of several lines: line feeds stay.
pub fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c != '\n' && acts(c))
}

fn escaped(text: &str, acts: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&acts) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if acts(c) {
            // Not `escape_default()`, which writes a line feed as \n and leaves the other
            // characters unescaped.
            let _ = write!(shown, "{}", c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// C0, DEL and C1 (ECMA-48), and characters that change the direction of text (UAX 9).
pub fn acts(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A writer for serde_json, which escapes C0 but neither DEL, C1 nor bidirectional controls.
pub struct JsonWriter<W>(pub W);

impl<W: io::Write> io::Write for JsonWriter<W> {
    /// serde_json writes whole characters, and control characters only within strings.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let acts = |c: char| c != '\n' && acts(c);
        match str::from_utf8(bytes) {
            Ok(text) if text.contains(acts) => {
                for c in text.chars() {
                    match acts(c) {
                        true => write!(self.0, "\\u{:04x}", u32::from(c))?,
                        false => write!(self.0, "{c}")?,
                    }
                }
            }
            _ => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// For `serialize_with`: serde refuses a path that is not UTF-8, and the whole answer would fail.
pub fn serialize_path<S: Serializer>(value: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path(value))
}

/// The same for an optional path.
pub(crate) fn serialize_optional<S: Serializer, P: AsRef<Path>>(
    value: &Option<P>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let shown = value.as_ref().map(|value| path(value.as_ref()));
    shown.serialize(serializer)
}

/// The same for several paths.
pub fn serialize_paths<S: Serializer, P: AsRef<Path>>(
    values: &[P],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(values.iter().map(|value| path(value.as_ref())))
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

    use super::*;

    #[test]
    fn count_of_one_is_singular() {
        assert_eq!(counted(0_usize, "entry", "entries"), "0 entries");
        assert_eq!(counted(1_u64, "entry", "entries"), "1 entry");
        assert_eq!(counted(2_u32, "entry", "entries"), "2 entries");
    }

    #[test]
    fn control_characters_are_escaped() {
        let name = Path::new(OsStr::from_bytes(
            b"/etc/\xff\x1b[2J\x7f\xc2\x9b\n\xc3\xa4.toml",
        ));
        let shown = "/etc/\u{fffd}\\u{1b}[2J\\u{7f}\\u{9b}\\u{a}\u{e4}.toml";
        assert_eq!(path(name), shown);
        assert_eq!(text(shown), shown);
        assert_eq!(lines("a\nb\r\u{202e}"), "a\nb\\u{d}\\u{202e}");
    }

    #[test]
    fn json_escapes_controls_and_stays_equal() {
        let value = serde_json::json!({"a\u{9b}": "\u{1b}[2J\u{7f}\u{202e}\u{e4}\n"});
        let mut out = Vec::new();
        serde_json::to_writer_pretty(JsonWriter(&mut out), &value).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(lines(&text), text);
        assert!(
            text.contains("\\u009b") && text.contains("\\u202e\u{e4}"),
            "{text}"
        );
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&text).unwrap(),
            value
        );
    }
}
