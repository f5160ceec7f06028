//! Lists of CIDRs, read without the TOML parser.
//!
//! A value of the TOML tree takes about 200 bytes, and parsing a million of them half a second. So
//! plain lists (quoted CIDRs, commas, comments) are taken out of a file's text first, and the TOML
//! parser gets the rest, with empty lists in their place. A list with anything else in it is left
//! to the parser, which can report its errors.

use std::{borrow::Cow, ops::Range};

use crate::policy::Cidr;

/// A CIDR in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListedCidr {
    pub(super) cidr: Cidr,
    /// Line, from 1.
    pub(super) line: u32,
}

/// A text without its plain lists.
pub(super) struct Lists<'t> {
    /// The text without the lists.
    pub(super) rest: Cow<'t, str>,
    taken: Vec<Taken>,
}

struct Taken {
    /// Offset of the list's `[` in the rest.
    at: usize,
    /// Bytes before the list's `]` that are not in the rest, including earlier lists.
    gone: usize,
    cidrs: Vec<ListedCidr>,
}

const KEY: &str = "cidrs";

impl<'t> Lists<'t> {
    /// Takes plain lists out of a text.
    pub(super) fn extract(text: &'t str) -> Self {
        let untouched = Self {
            rest: text.into(),
            taken: Vec::new(),
        };
        if u32::try_from(text.len()).is_err() {
            return untouched;
        }
        let mut rest = String::new();
        let mut taken = Vec::new();
        let (mut copied, mut line, mut number) = (0, 0, 1);
        while line < text.len() {
            let mut from = line;
            if let Some(begin) = begin(text, line)
                && let Some((cidrs, end, ends)) = list(text, begin, number)
            {
                number += ends;
                rest.push_str(&text[copied..begin]);
                taken.push(Taken {
                    at: rest.len() - 1,
                    gone: end - rest.len(),
                    cidrs,
                });
                (copied, from) = (end, end);
            }
            line = text[from..]
                .find('\n')
                .map_or(text.len(), |at| from + at + 1);
            number += 1;
        }
        rest.push_str(&text[copied..]);
        // Inside a multi-line string, an apparent list is not one.
        if taken.is_empty() || rest.contains("\"\"\"") || rest.contains("'''") {
            return untouched;
        }
        Self {
            rest: rest.into(),
            taken,
        }
    }

    /// The list whose `[` is at this offset of the rest, if it was taken out.
    pub(super) fn take(&mut self, at: usize) -> Option<Vec<ListedCidr>> {
        let index = self
            .taken
            .binary_search_by_key(&at, |taken| taken.at)
            .ok()?;
        Some(std::mem::take(&mut self.taken[index].cidrs))
    }

    /// Converts a span in the rest to a span in the text.
    pub(super) fn in_text(&self, span: Range<usize>) -> Range<usize> {
        let in_text = |offset: usize| -> usize {
            let before = self.taken.partition_point(|taken| taken.at < offset);
            let last = before.checked_sub(1).map(|i| &self.taken[i]);
            offset + last.map_or(0, |taken| taken.gone)
        };
        in_text(span.start)..in_text(span.end)
    }
}

/// The offset after the `[` of a list of CIDRs, if one begins on the line at `line`.
fn begin(text: &str, line: usize) -> Option<usize> {
    const BLANKS: [char; 2] = [' ', '\t'];
    let rest = text[line..].trim_start_matches(BLANKS);
    let rest = rest.strip_prefix(KEY)?.trim_start_matches(BLANKS);
    let rest = rest.strip_prefix('=')?.trim_start_matches(BLANKS);
    Some(text.len() - rest.strip_prefix('[')?.len())
}

/// Reads the list whose `[` is before `begin`, on the line `number`. Returns its CIDRs, the offset
/// of its `]` and the number of line ends in it; `None` if there is anything but alternating CIDRs
/// and commas.
fn list(text: &str, begin: usize, number: u32) -> Option<(Vec<ListedCidr>, usize, u32)> {
    let mut scanner = Scanner {
        text,
        at: begin,
        line: number,
    };
    let mut cidrs = Vec::new();
    let mut is_after_item = false;
    loop {
        scanner.skip()?;
        match scanner.peek()? {
            b']' => break,
            b',' if is_after_item => scanner.at += 1,
            _ if is_after_item => return None,
            _ => cidrs.push(scanner.item()?),
        }
        is_after_item = !is_after_item;
    }
    cidrs.shrink_to_fit();
    Some((cidrs, scanner.at, scanner.line - number))
}

struct Scanner<'t> {
    text: &'t str,
    at: usize,
    line: u32,
}

impl Scanner<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// Skips blanks, line ends and comments.
    fn skip(&mut self) -> Option<()> {
        loop {
            match self.peek() {
                Some(b' ' | b'\t') => self.at += 1,
                Some(b'\n') => {
                    self.at += 1;
                    self.line += 1;
                }
                Some(b'\r') if self.text.as_bytes().get(self.at + 1) == Some(&b'\n') => {
                    self.at += 1;
                }
                Some(b'#') => {
                    let rest = &self.text[self.at..];
                    let comment = &rest[..rest.find('\n').unwrap_or(rest.len())];
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

    fn item(&mut self) -> Option<ListedCidr> {
        let start = self.at;
        let quote = self.peek().filter(|b| b"\"'".contains(b))?;
        let content = &self.text.as_bytes()[start + 1..];
        let plain = |b: &u8| b.is_ascii_hexdigit() || b":./".contains(b);
        let length = content.iter().position(|b| !plain(b))?;
        if content[length] != quote {
            return None;
        }
        let end = start + 1 + length;
        self.at = end + 1;
        Some(ListedCidr {
            cidr: self.text[start + 1..end].parse().ok()?,
            line: self.line,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn taken(text: &str) -> (String, Vec<Vec<String>>) {
        let mut lists = Lists::extract(text);
        let at: Vec<usize> = lists.taken.iter().map(|t| t.at).collect();
        let mut all = Vec::new();
        for at in at {
            assert_eq!(&lists.rest[at..at + 2], "[]");
            let list = lists.take(at).unwrap();
            // Only some are checked, as counting the lines before each takes long.
            let step = list.len() / 50 + 1;
            for ListedCidr { cidr, line } in list.iter().step_by(step) {
                let line = text.lines().nth(*line as usize - 1).unwrap();
                assert!(line.contains(&cidr.to_string()), "{line}: {cidr}");
            }
            all.push(list.iter().map(|place| place.cidr.to_string()).collect());
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
        let lists = Lists::extract(text);
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

    /// The cost of a list is proportional to its length, not to the rest of the file.
    #[test]
    fn many_lists_cost_what_is_in_them() {
        let small = |i: usize| format!("[policy.p{i}]\ncidrs = [\"10.0.{}.0/24\"]\n", i % 256);
        let small: String = (0..1000).map(small).collect();
        for (before, after) in [("\n", "\n]\n"), ("", "]\n"), ("\n", "\n  ]\n")] {
            let items = (0..200_000u32).map(|i| format!("{before}\"10.1.{}.0/24\",", i % 256));
            let large = format!("[policy.x]\ncidrs = [{}{after}", items.collect::<String>());
            let time = |text: &str, lists: usize| {
                let took = (0..3).map(|_| {
                    let begin = std::time::Instant::now();
                    let taken = Lists::extract(text).taken;
                    let took = begin.elapsed();
                    assert_eq!(taken.len(), lists);
                    for Taken { cidrs, .. } in &taken {
                        assert_eq!(cidrs.capacity(), cidrs.len());
                    }
                    took
                });
                took.min().unwrap()
            };
            let alone = time(&large, 1);
            let many = time(&format!("{small}{large}{small}"), 2001);
            // The small lists have a hundredth of its size; scanning the large one for each would
            // cost 1000 times as much.
            assert!(many < alone * 10, "{many:?}, alone {alone:?}");
        }
    }

    proptest! {
        /// Parsing the rest, with its lists put back, gives the same result as parsing the text.
        #[test]
        fn nothing_is_lost(text in "((\\[policy\\.[a-c]\\]|cidrs = \\[|\\]|,|\"10\\.[0-9]\\.0\\.0/16\"|'fd00::/8'|#[ a\"\\]]{0,3}|x = [0-9\"']{0,4}| |\t|\r)\n?){0,16}") {
            let mut lists = Lists::extract(&text);
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
