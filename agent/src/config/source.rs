//! A configuration file's text, and errors that point into it.

use std::{
    fmt::{self, Write as _},
    fs,
    io::{self, Read as _},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use serde::Serialize;

use super::MAX_FILE;
use crate::progress::Stepwise;

/// A very long line says no more than its beginning: so many characters.
const SHOWN_WIDTH: usize = 160;

/// Reads a file. Only the main one may be something else than a file (`check --config /dev/stdin`): to open a
/// pipe in `policies.d` would wait for a writer.
pub(super) fn read(path: &Path, main: bool) -> io::Result<String> {
    if !main && !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("this is no file"));
    }
    let file = fs::File::open(path)?;
    // At once: a text that grows is copied, and takes twice the memory.
    let size = file.metadata()?.len().min(MAX_FILE) + 1;
    let mut text = String::new();
    text.try_reserve_exact(usize::try_from(size).map_err(io::Error::other)?)?;
    let pieces = Stepwise(file);
    pieces.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        return Err(io::Error::other(format!(
            "more than a configuration file may have ({MAX_FILE} bytes); split it into policies.d"
        )));
    }
    Ok(text)
}

/// A file's text with a table of its lines.
pub(super) struct Source {
    pub(super) path: Arc<Path>,
    pub(super) text: String,
    /// Byte offset at which each line begins, once that was asked.
    lines: OnceLock<Vec<usize>>,
}

/// One thing wrong with a file: `path:line:column: message`, the line, and a mark below it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConfigError {
    /// The file.
    pub path: PathBuf,
    /// The line, from 1; absent if it concerns the file as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// The column, in characters from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<usize>,
    /// What is wrong, and how to fix it.
    pub message: String,
    /// The line's text, and where in it to put how long a mark.
    #[serde(skip)]
    excerpt: Option<Excerpt>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Excerpt {
    line: String,
    start: usize,
    width: usize,
}

/// Everything that is wrong with a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl Source {
    pub(super) fn new(path: &Path, text: String) -> Self {
        Self {
            path: path.into(),
            text,
            lines: OnceLock::new(),
        }
    }

    fn lines(&self) -> &[usize] {
        self.lines.get_or_init(|| {
            let begins = self.text.match_indices('\n').map(|(at, _)| at + 1);
            std::iter::once(0).chain(begins).collect()
        })
    }

    /// The line an offset lies on, from 1.
    pub(super) fn line(&self, offset: usize) -> usize {
        self.lines().partition_point(|begin| *begin <= offset)
    }

    /// A quoted text, by where it begins.
    pub(super) fn quoted(&self, start: u32) -> Range<usize> {
        let start = start as usize;
        let mut rest = self.text.get(start..).unwrap_or_default().char_indices();
        let quote = rest.next().map(|(_, quote)| quote);
        let end = rest.find(|(_, c)| Some(*c) == quote);
        start..end.map_or(start, |(at, _)| start + at + 1)
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
            message: message.into(),
            excerpt: Some(Excerpt {
                // Of many errors of one long line each would else have it whole.
                line: text
                    .chars()
                    .take(SHOWN_WIDTH)
                    .collect::<String>()
                    .replace('\t', " "),
                start: before,
                width: marked.chars().count().max(1),
            }),
        }
    }
}

impl ConfigError {
    pub(super) fn whole(path: &Path, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: None,
            column: None,
            message: message.into(),
            excerpt: None,
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
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
