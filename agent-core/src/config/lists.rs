//! Lists of CIDRs, read without the TOML parser.
//!
//! A value of the TOML tree takes about 200 bytes, and parsing a million of them half a second. So
//! plain lists (quoted CIDRs, commas, comments) are taken out of a file's text first, and the TOML
//! parser gets the rest, with empty lists in their place. A list with anything else in it is left
//! to the parser, which can report its errors.

use std::{borrow::Cow, ops::Range};

use crate::{parallel, policy::Cidr};

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
    /// CIDRs in parts, as they were read.
    cidrs: Vec<Vec<ListedCidr>>,
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
    pub(super) fn take(&mut self, at: usize) -> Option<Vec<Vec<ListedCidr>>> {
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

/// Parts of a list below this size, bytes, are not worth a thread.
const LEAST: usize = 1 << 18;

/// Reads the list whose `[` is before `begin`, on the line `number`. Returns its CIDRs, the offset
/// of its `]` and the number of line ends in it; `None` if it contains anything else.
fn list(text: &str, begin: usize, number: u32) -> Option<(Vec<Vec<ListedCidr>>, usize, u32)> {
    let mut list = List {
        cidrs: Vec::new(),
        ends: 0,
        last: Some(Token::Comma),
    };
    // Nearly every list ends in the first part.
    let mut scanner = Scanner::new(text, begin, text.len());
    let mut end = list.add(scanner.part(begin + LEAST)?, number)?;
    if end.is_none() {
        // A long list usually ends with a `]` at the beginning of a line. Where it ends earlier, the
        // parts behind its end are read in vain, once for a long list.
        let usual = memchr::memmem::find(&text.as_bytes()[scanner.at..], b"\n]");
        let rest = scanner.at..usual.map_or(text.len(), |offset| scanner.at + offset + 2);
        for part in parallel::map(cuts(text, &rest, LEAST), |part| {
            Scanner::new(text, part.start, part.end).whole_part()
        }) {
            if end.is_none() {
                end = list.add(part?, number)?;
            }
        }
    }
    Some((list.cidrs, end?, list.ends))
}

/// Splits a range equally for several threads, into parts of at least `least` bytes. Parts end at
/// line ends, so that no token is split.
fn cuts(text: &str, range: &Range<usize>, least: usize) -> Vec<Range<usize>> {
    let threads = parallel::threads(range.len() / least);
    let mut cuts = vec![range.start];
    for i in 1..threads {
        let about = range.start + range.len() / threads * i;
        cuts.push(end_of_line(text, about).min(range.end));
    }
    cuts.push(range.end);
    cuts.dedup();
    cuts.windows(2).map(|two| two[0]..two[1]).collect()
}

/// The offset of the `\n` that ends the line at this offset, or the text's end.
fn end_of_line(text: &str, offset: usize) -> usize {
    let end = memchr::memchr(b'\n', &text.as_bytes()[offset..]);
    end.map_or(text.len(), |at| offset + at)
}

/// The parts read so far.
struct List {
    cidrs: Vec<Vec<ListedCidr>>,
    /// Line ends in all parts.
    ends: u32,
    last: Option<Token>,
}

impl List {
    /// Adds the next part, and returns the offset of the `]` if it is in the part; `None` if the
    /// parts do not fit together.
    fn add(&mut self, mut part: Part, number: u32) -> Option<Option<usize>> {
        // Items and commas alternate.
        if part.first.is_some() && part.first == self.last {
            return None;
        }
        for place in &mut part.cidrs {
            place.line += number + self.ends;
        }
        self.cidrs.push(part.cidrs);
        self.ends += part.ends;
        self.last = part.last.or(self.last);
        Some(part.end)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Token {
    Item,
    Comma,
}

/// The content of a part of a list.
#[derive(Default)]
struct Part {
    /// CIDRs, with lines counted from the beginning of the part.
    cidrs: Vec<ListedCidr>,
    first: Option<Token>,
    last: Option<Token>,
    /// Line ends in the part.
    ends: u32,
    /// The offset of the `]`, if it is in the part.
    end: Option<usize>,
}

struct Scanner<'t> {
    text: &'t str,
    at: usize,
    to: usize,
    ends: u32,
}

impl<'t> Scanner<'t> {
    fn new(text: &'t str, at: usize, to: usize) -> Self {
        let ends = 0;
        Self { text, at, to, ends }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes()[..self.to].get(self.at).copied()
    }

    /// As [`Scanner::part`], for the whole range.
    fn whole_part(&mut self) -> Option<Part> {
        self.part(self.to)
    }

    /// Reads up to the `]`, to the end, or to the first token at or after `enough`; `None` if there
    /// is anything but alternating CIDRs and commas.
    fn part(&mut self, enough: usize) -> Option<Part> {
        let mut part = Part::default();
        while self.at < enough {
            self.skip()?;
            let token = match self.peek() {
                None => break,
                Some(b']') => {
                    part.end = Some(self.at);
                    break;
                }
                Some(b',') => {
                    self.at += 1;
                    Token::Comma
                }
                Some(_) => {
                    part.cidrs.push(self.item()?);
                    Token::Item
                }
            };
            if part.last == Some(token) {
                return None;
            }
            part.first = part.first.or(Some(token));
            part.last = Some(token);
        }
        part.ends = self.ends;
        part.cidrs.shrink_to_fit();
        Some(part)
    }

    /// Skips blanks, line ends and comments.
    fn skip(&mut self) -> Option<()> {
        loop {
            match self.peek() {
                Some(b' ' | b'\t') => self.at += 1,
                Some(b'\n') => {
                    self.at += 1;
                    self.ends += 1;
                }
                Some(b'\r') if self.text.as_bytes().get(self.at + 1) == Some(&b'\n') => {
                    self.at += 1;
                }
                Some(b'#') => {
                    let rest = &self.text[self.at..self.to];
                    let comment = &rest[..rest.find('\n').unwrap_or(rest.len())];
                    // If a part ends at a comment's \r, its \n is in the next part.
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
            line: self.ends,
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
            let list = lists.take(at).unwrap().concat();
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

    /// Large enough for several threads.
    #[test]
    fn long_lists_are_read_in_parts() {
        let item = |i: u32, end: &str| format!("\"10.{}.{}.0/24\"{end}", i >> 8 & 0xff, i & 0xff);
        for (before, after) in [
            ("", ",\n"),
            ("\n, ", ""),
            ("", " # near]\n,\n"),
            ("", "\r\n,"),
        ] {
            let mut text = "#\n[policy.a]\ncidrs = [".to_owned();
            let count = 60_000;
            for i in 0..count {
                let before = if i == 0 { "" } else { before };
                text.push_str(before);
                text.push_str(&item(i, after));
            }
            text.push_str("\n]\nforce = true\n");
            let (rest, lists) = taken(&text);
            assert_eq!(rest, "#\n[policy.a]\ncidrs = []\nforce = true\n");
            let expected: Vec<String> = (0..count).map(|i| item(i, "").replace('"', "")).collect();
            assert!(lists == [expected]);
            // Errors in any part are detected.
            for cut in [text.len() / 3, text.len() / 2, text.len() - 100] {
                let at = cut + text[cut..].find('"').unwrap();
                for wrong in [",,", "x"] {
                    let mut text = text.clone();
                    text.insert_str(at, wrong);
                    assert!(Lists::extract(&text).taken.is_empty(), "{wrong} at {at}");
                }
            }
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
                    for list in taken.iter().flat_map(|taken| &taken.cidrs) {
                        assert_eq!(list.capacity(), list.len());
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
                let taken = at.into_iter().map(|at| lists.take(at).unwrap().concat().len());
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
