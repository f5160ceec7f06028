//! Refuses phrases that read as translated: `xtask/prose/phrases`, except where `xtask/prose/exceptions` has the file
//! and the phrase, as "PATH: PHRASE".

use std::{fs, path::Path};

use anyhow::ensure;

use crate::{
    process::{command, output},
    root,
};

const PHRASES: &str = include_str!("../prose/phrases");
const EXCEPTIONS: &str = include_str!("../prose/exceptions");
/// Endings of the files that are checked.
const KINDS: [&str; 8] = ["rs", "md", "toml", "yaml", "yml", "sh", "service", "1"];
/// A function's name that begins with one has no subject.
const PRONOUNS: [&str; 8] = [
    "it", "what", "who", "one", "that", "those", "which", "nobody",
];

pub(crate) fn check() -> anyhow::Result<()> {
    let files = output(&mut command("git ls-files"))?;
    let (mut found, mut checked) = (Vec::new(), 0);
    for path in files.lines().filter(|path| is_checked(Path::new(path))) {
        // A file that is deleted but not committed is still listed.
        if let Ok(text) = fs::read_to_string(root().join(path)) {
            found.extend(hits(path, &text));
            checked += 1;
        }
    }
    let is_excepted = |hit: &Hit| lines(EXCEPTIONS).any(|line| line == hit.exception);
    let is_used = |line: &&str| found.iter().any(|hit| hit.exception == **line);
    let unused = lines(EXCEPTIONS).filter(|line| !is_used(line));
    let refused = found.iter().filter(|hit| !is_excepted(hit));
    let wrong: Vec<_> = refused
        .map(|hit| format!("{} (line {})", hit.exception, hit.line))
        .chain(unused.map(|line| format!("xtask/prose/exceptions: {line}: not found")))
        .collect();
    ensure!(
        wrong.is_empty(),
        "rewrite these sentences, or add \"PATH: PHRASE\" to xtask/prose/exceptions:\n{}",
        wrong.join("\n")
    );
    println!("no phrase of xtask/prose in {checked} files");
    Ok(())
}

fn is_checked(path: &Path) -> bool {
    let kind = path.extension().and_then(|kind| kind.to_str());
    kind.is_some_and(|kind| KINDS.contains(&kind)) && !path.ends_with("xtask/src/prose.rs")
}

/// Lines that are not comments.
fn lines(list: &str) -> impl Iterator<Item = &str> {
    list.lines().filter(|line| !line.starts_with('#'))
}

struct Hit {
    line: usize,
    /// "PATH: PHRASE"
    exception: String,
}

fn hits(path: &str, text: &str) -> Vec<Hit> {
    let mut hits = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let name = line
            .split_once("fn ")
            .and_then(|(_, rest)| rest.split_once('('));
        let name = name.map(|(name, _)| name).filter(|_| path.ends_with(".rs"));
        let words = match name {
            Some(name) => words(name),
            None => words(if path.ends_with(".rs") {
                prose(line)
            } else {
                line
            }),
        };
        let phrases = lines(PHRASES).filter(|phrase| words.contains(&format!(" {phrase} ")));
        let first = |name: &&str| name.split_once('_').map(|(first, _)| first.to_owned());
        let name = name.filter(|name| first(name).is_some_and(|f| PRONOUNS.contains(&&*f)));
        let all = phrases.chain(name);
        hits.extend(all.map(|phrase| Hit {
            line: number + 1,
            exception: format!("{path}: {phrase}"),
        }));
    }
    hits
}

/// What a reader reads of a line of Rust: its comment, or else its strings.
fn prose(line: &str) -> &str {
    let comment = ["// ", "/// ", "//! "]
        .iter()
        .find_map(|begin| line.split_once(begin));
    let strings = || {
        line.split_once('"')
            .and_then(|(_, rest)| rest.rsplit_once('"'))
    };
    match comment {
        Some((_, comment)) => comment,
        None => strings().map_or("", |(strings, _)| strings),
    }
}

/// The words of a line in lower case, with a space around each.
fn words(line: &str) -> String {
    let is_apart = |c: char| !c.is_alphanumeric() && c != '\'';
    let words: Vec<_> = line
        .split(is_apart)
        .filter(|word| !word.is_empty())
        .collect();
    format!(" {} ", words.join(" ").to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_found(path: &str, text: &str, expected: &[(usize, &str)]) {
        let hits = hits(path, text);
        let found: Vec<_> = hits.iter().map(|hit| (hit.line, &*hit.exception)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn phrases_are_found_in_prose() {
        let text = "# Fine\nIt has So many\u{2014}entries.\nmany so";
        assert_found("a.md", text, &[(2, "a.md: so many")]);
        let text = "let so = many; // Of so many.\nso_many(\"nobody asks\");\nfn it_is_so() {}";
        let expected = [
            (1, "a.rs: so many"),
            (2, "a.rs: nobody"),
            (3, "a.rs: it_is_so"),
        ];
        assert_found("a.rs", text, &expected);
        assert_found("a.rs", "let nobody = so(many);", &[]);
    }
}
