//! A configuration file's text, and errors that point to its lines.

use std::{
    fmt::{self, Write as _},
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use serde::Serialize;

use super::regular_file;
use crate::{policy::Cidr, printable};

/// Largest file, bytes: about three million CIDRs.
pub const MAX_FILE: u64 = 64 << 20;
/// Most errors of a kind that are reported, as locating each takes time.
pub(super) const MOST_ERRORS: usize = 200;

/// Characters of a long line that are shown.
const SHOWN_WIDTH: usize = 160;

/// Reads a file.
pub(super) fn read(path: &Path) -> io::Result<String> {
    regular_file::read(path, MAX_FILE).map_err(|e| match e.kind() {
        io::ErrorKind::FileTooLarge => io::Error::new(
            e.kind(),
            format!(
                "more than the limit of a configuration file ({MAX_FILE} bytes); split it into \
                 several files in policies.d"
            ),
        ),
        _ => e,
    })
}

/// A file's text with a table of its lines.
pub(super) struct Source {
    pub(super) path: Arc<Path>,
    pub(super) text: Arc<String>,
    /// Byte offset of each line, computed on first use.
    lines: OnceLock<Vec<usize>>,
}

/// An error in a file: `path:line:column: message`, the line, and a mark below it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConfigError {
    /// The file.
    #[serde(serialize_with = "printable::serialize_path")]
    pub path: PathBuf,
    /// The line, from 1; absent if the error concerns the whole file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// The column, in characters from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<usize>,
    /// What is wrong, and how to fix it.
    pub message: String,
    /// The line's text, and the position and width of the mark.
    #[serde(skip)]
    excerpt: Option<Excerpt>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Excerpt {
    line: String,
    start: usize,
    width: usize,
}

/// All errors of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl Source {
    pub(super) fn new(path: &Path, text: impl Into<Arc<String>>) -> Self {
        Self {
            path: path.into(),
            text: text.into(),
            lines: OnceLock::new(),
        }
    }

    fn lines(&self) -> &[usize] {
        self.lines.get_or_init(|| {
            let begins = self.text.match_indices('\n').map(|(at, _)| at + 1);
            std::iter::once(0).chain(begins).collect()
        })
    }

    /// The line that contains an offset, from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.lines().partition_point(|begin| *begin <= offset)
    }

    /// The span of a CIDR on a line, with its quotes, if any; the line, if it is not found there.
    pub(super) fn span_of(&self, cidr: &Cidr, line: usize) -> Range<usize> {
        let begin = self.lines().get(line - 1).copied().unwrap_or(0);
        let text = self.text[begin..].lines().next().unwrap_or_default();
        let mut at = begin;
        for part in text.split(['"', '\'', ' ', '\t', '#']) {
            if part.parse() == Ok(*cidr) {
                let quotes = usize::from(self.text[begin..at].ends_with(['"', '\'']));
                return at - quotes..at + part.len() + quotes;
            }
            at += part.len() + 1;
        }
        begin..begin + text.len()
    }

    pub(super) fn error(&self, span: Range<usize>, message: impl Into<String>) -> ConfigError {
        let start = span.start.min(self.text.len());
        let line = self.line(start);
        let begin = self.lines().get(line - 1).copied().unwrap_or(0);
        let text = self.text[begin..].lines().next().unwrap_or_default();
        let before = self
            .text
            .get(begin..start)
            .unwrap_or_default()
            .chars()
            .count();
        let marked = self
            .text
            .get(start..span.end.min(begin + text.len()))
            .unwrap_or_default();
        ConfigError {
            path: self.path.to_path_buf(),
            line: Some(line),
            column: Some(before + 1),
            message: printable::lines(&Into::<String>::into(message)).into_owned(),
            excerpt: Some(Excerpt {
                // Limited, as each of many errors on one long line would contain all of it.
                line: text
                    .chars()
                    .take(SHOWN_WIDTH)
                    // Replaced one by one, so that the mark stays in its column.
                    .map(|c| match c {
                        '\t' => ' ',
                        // U+FEFF is a byte order mark, which is invisible.
                        c if printable::acts(c) || c == '\u{feff}' => char::REPLACEMENT_CHARACTER,
                        c => c,
                    })
                    .collect(),
                start: before,
                width: marked.chars().count().max(1),
            }),
        }
    }
}

impl ConfigError {
    /// The same location, without text from the file.
    pub(super) fn without_words(self, message: &str) -> Self {
        Self {
            message: message.to_owned(),
            excerpt: None,
            ..self
        }
    }

    /// An error that concerns the whole file.
    pub fn whole(path: &Path, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: None,
            column: None,
            message: printable::lines(&Into::<String>::into(message)).into_owned(),
            excerpt: None,
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable::path(&self.path))?;
        if let (Some(line), Some(column)) = (self.line, self.column) {
            write!(f, ":{line}:{column}")?;
        }
        write!(f, ": {}", self.message)?;
        if let (Some(number), Some(Excerpt { line, start, width })) = (self.line, &self.excerpt) {
            let mark = "^".repeat((*width).min(SHOWN_WIDTH.saturating_sub(*start)).max(1));
            let pad = " ".repeat((*start).min(SHOWN_WIDTH));
            write!(f, "\n  {number} | {line}")?;
            let margin = " ".repeat(number.to_string().len());
            write!(f, "\n  {margin} | {pad}{mark}")?;
        }
        Ok(())
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 50;
        for (i, error) in self.0.iter().take(SHOWN).enumerate() {
            if i > 0 {
                f.write_char('\n')?;
            }
            error.fmt(f)?;
        }
        if let Some(more @ 1..) = self.0.len().checked_sub(SHOWN) {
            write!(f, "\n... and {more} more")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
