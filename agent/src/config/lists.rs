//! Lists of CIDRs, read without the TOML parser.
//!
//! A value of the TOML tree takes some 200 bytes, and a million of them half a second. So lists that are
//! plain (quoted CIDRs, commas, comments) are taken out of a file's text first, and the parser is given
//! the rest, with empty lists in their places. A list with anything else in it is left to the parser, which
//! knows what is wrong with it.

use std::{borrow::Cow, ops::Range};

use crate::policy::Cidr;

/// A CIDR and the offset of its opening quote.
pub(super) type Place = (Cidr, u32);

/// A text without its plain lists.
pub(super) struct Lists<'t> {
    /// What is left.
    pub(super) rest: Cow<'t, str>,
    taken: Vec<Taken>,
}

struct Taken {
    /// Offset of its `[` in the rest.
    at: usize,
    /// Bytes that are not in the rest.
    length: usize,
    cidrs: Vec<Place>,
}

const KEY: &str = "cidrs";

impl<'t> Lists<'t> {
    /// Takes them out.
    pub(super) fn take_out(text: &'t str) -> Self {
        let untouched = Self {
            rest: text.into(),
            taken: Vec::new(),
        };
        if u32::try_from(text.len()).is_err() {
            return untouched;
        }
        let mut rest = String::new();
        let mut taken = Vec::new();
        let (mut copied, mut line) = (0, 0);
        while line < text.len() {
            let mut from = line;
            if let Some(begin) = begin(text, line)
                && let Some((cidrs, end)) = Scanner::new(text, begin).list()
            {
                rest.push_str(&text[copied..begin]);
                taken.push(Taken {
                    at: rest.len() - 1,
                    length: end - begin,
                    cidrs,
                });
                (copied, from) = (end, end);
            }
            line = text[from..]
                .find('\n')
                .map_or(text.len(), |at| from + at + 1);
        }
        rest.push_str(&text[copied..]);
        // In a string of several lines, what looks like a list is none.
        if taken.is_empty() || rest.contains("\"\"\"") || rest.contains("'''") {
            return untouched;
        }
        Self {
            rest: rest.into(),
            taken,
        }
    }

    /// The list whose `[` is at this offset of the rest, if it was taken out.
    pub(super) fn take(&mut self, at: usize) -> Option<Vec<Place>> {
        let index = self
            .taken
            .binary_search_by_key(&at, |taken| taken.at)
            .ok()?;
        Some(std::mem::take(&mut self.taken[index].cidrs))
    }

    /// Where in the text a part of the rest stands.
    pub(super) fn in_text(&self, span: Range<usize>) -> Range<usize> {
        let before = |offset: usize| -> usize {
            let before = self.taken.iter().take_while(|taken| taken.at < offset);
            offset + before.map(|taken| taken.length).sum::<usize>()
        };
        before(span.start)..before(span.end)
    }
}

/// The offset after the `[` of a list of CIDRs that begins on the line that begins at `line`.
fn begin(text: &str, line: usize) -> Option<usize> {
    const BLANKS: [char; 2] = [' ', '\t'];
    let rest = text[line..].trim_start_matches(BLANKS);
    let rest = rest.strip_prefix(KEY)?.trim_start_matches(BLANKS);
    let rest = rest.strip_prefix('=')?.trim_start_matches(BLANKS);
    Some(text.len() - rest.strip_prefix('[')?.len())
}

struct Scanner<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Scanner<'t> {
    fn new(text: &'t str, at: usize) -> Self {
        Self { text, at }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// The CIDRs up to the `]`, and its offset; `None` if there is anything else.
    fn list(&mut self) -> Option<(Vec<Place>, usize)> {
        let mut cidrs = Vec::new();
        loop {
            self.skip()?;
            if self.peek()? == b']' {
                break;
            }
            cidrs.push(self.item()?);
            self.skip()?;
            match self.peek()? {
                b',' => self.at += 1,
                b']' => break,
                _ => return None,
            }
        }
        Some((cidrs, self.at))
    }

    /// Blanks, ends of lines, comments.
    fn skip(&mut self) -> Option<()> {
        loop {
            match self.peek()? {
                b' ' | b'\t' | b'\n' => self.at += 1,
                b'\r' if self.text.as_bytes().get(self.at + 1) == Some(&b'\n') => self.at += 2,
                b'#' => {
                    let rest = &self.text[self.at..];
                    let comment = &rest[..rest.find('\n')?];
                    let text = comment.strip_suffix('\r').unwrap_or(comment);
                    if text.bytes().any(|b| b != b'\t' && b.is_ascii_control()) {
                        return None;
                    }
                    self.at += comment.len();
                }
                _ => return Some(()),
            }
        }
    }

    fn item(&mut self) -> Option<Place> {
        let start = self.at;
        let quote = self.peek().filter(|b| [b'"', b'\''].contains(b))?;
        let content = &self.text.as_bytes()[start + 1..];
        let plain = |b: &u8| b.is_ascii_hexdigit() || [b':', b'.', b'/'].contains(b);
        let length = content.iter().position(|b| !plain(b))?;
        if content[length] != quote {
            return None;
        }
        let end = start + 1 + length;
        self.at = end + 1;
        let cidr = self.text[start + 1..end].parse().ok()?;
        Some((cidr, u32::try_from(start).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn taken(text: &str) -> (String, Vec<Vec<String>>) {
        let mut lists = Lists::take_out(text);
        let at: Vec<usize> = lists.taken.iter().map(|t| t.at).collect();
        let mut all = Vec::new();
        for at in at {
            assert_eq!(&lists.rest[at..at + 2], "[]");
            let list = lists.take(at).unwrap();
            for (cidr, start) in &list {
                let start = *start as usize + 1;
                let said = text[start..].split(['"', '\'']).next().unwrap();
                assert_eq!(said.parse::<Cidr>().unwrap(), *cidr);
            }
            all.push(list.iter().map(|(cidr, _)| cidr.to_string()).collect());
        }
        (lists.rest.into_owned(), all)
    }

    #[test]
    fn plain_lists_are_taken_out() {
        let text = "[policy.a]\n  cidrs = [ # far\n  \"10.0.0.0/8\", # x \"y\"\r\n 'fd00::/8',\n]\nforce = true\n\
                    [policy.b]\ncidrs=[]\n";
        let (rest, lists) = taken(text);
        assert_eq!(
            rest,
            "[policy.a]\n  cidrs = []\nforce = true\n[policy.b]\ncidrs=[]\n"
        );
        assert_eq!(lists, [vec!["10.0.0.0/8", "fd00::/8"], vec![]]);
        let lists = Lists::take_out(text);
        let force = lists.rest.find("force").unwrap();
        let there = lists.in_text(force..force + 5);
        assert_eq!(&text[there], "force");
    }

    #[test]
    fn others_are_left() {
        for text in [
            "cidrs = [\"10.0.0.0/8\"",
            "cidrs = [\"10.0.0.0/8\" \"10.0.0.0/8\"]",
            "cidrs = [,]",
            "cidrs = [\"10.0.0.1/8\"]",
            "cidrs = [\"\\u0031\"]",
            "cidrs = [1]",
            "cidrs = [ # \u{1}\n]",
            "cidrs = [\"10.0.0.0/8']",
            "cidrs = \"10.0.0.0/8\"",
            "x = \"\"\"\ncidrs = []\n\"\"\"",
            "x = '''\ncidrs = []\n'''",
        ] {
            assert_eq!(taken(text), (text.to_owned(), vec![]), "{text}");
        }
    }

    proptest! {
        /// The parser finds the same in the rest, with the lists in their places, as in the whole.
        #[test]
        fn nothing_is_lost(text in "((\\[policy\\.[a-c]\\]|cidrs = \\[|\\]|,|\"10\\.[0-9]\\.0\\.0/16\"|'fd00::/8'|#[ a\"\\]]{0,3}|x = [0-9\"']{0,4}| |\t|\r)\n?){0,16}") {
            let mut lists = Lists::take_out(&text);
            let whole = text.parse::<toml::Table>();
            let rest = lists.rest.parse::<toml::Table>();
            prop_assert_eq!(whole.is_ok(), rest.is_ok(), "{}", &lists.rest);
            if let Ok(whole) = whole {
                let count = whole.values().flat_map(arrays).sum::<usize>();
                let left = rest.unwrap().values().flat_map(arrays).sum::<usize>();
                let at: Vec<usize> = lists.taken.iter().map(|t| t.at).collect();
                let taken = at.into_iter().map(|at| lists.take(at).unwrap().len());
                prop_assert_eq!(count, left + taken.sum::<usize>());
            }
        }
    }

    fn arrays(value: &toml::Value) -> Vec<usize> {
        match value {
            toml::Value::Array(array) => vec![array.len()],
            toml::Value::Table(table) => table.values().flat_map(arrays).collect(),
            _ => Vec::new(),
        }
    }
}
