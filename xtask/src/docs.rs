//! `cargo xtask docs`: checks the links of the documents, and builds the book of docs/.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::ensure;
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::{
    process::{command, output, run as run_command},
    root, tools,
};

const MDBOOK: &str = "0.5.4";
/// The sources of the book, and its table of contents.
const BOOK: &str = "docs";
const SUMMARY: &str = "docs/SUMMARY.md";
const OUTPUT: &str = "target/book";

pub(crate) fn run() -> anyhow::Result<()> {
    let documents = Documents::read(&root())?;
    let broken = documents.broken();
    ensure!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
    let links = documents.all.values().map(|document| document.links.len());
    println!("{} links checked", links.sum::<usize>());
    let features = ["--no-default-features", "--features=search"];
    let path = tools::ensure("mdbook", MDBOOK, &features, "the book of docs/")?;
    let dest = root().join(OUTPUT);
    run_command(
        command("mdbook build docs --dest-dir")
            .arg(dest)
            .env("PATH", path),
    )?;
    println!("built: {OUTPUT}/index.html");
    Ok(())
}

/// The Markdown files of the repository's root and below docs/.
struct Documents {
    root: PathBuf,
    /// By their paths in the repository.
    all: BTreeMap<PathBuf, Document>,
}

impl Documents {
    fn read(root: &Path) -> anyhow::Result<Self> {
        let root = root.canonicalize()?;
        let list = "ls *.md; find docs -name '*.md'";
        let list = output(Command::new("sh").args(["-c", list]).current_dir(&root))?;
        let mut all = BTreeMap::new();
        for path in list.lines() {
            let text = fs::read_to_string(root.join(path))?;
            all.insert(path.into(), Document::of(&text));
        }
        Ok(Self { root, all })
    }

    /// The errors, one per line: links that lead nowhere, and pages that the book lacks.
    fn broken(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let mut in_book = BTreeSet::from([PathBuf::from(SUMMARY)]);
        for (path, document) in &self.all {
            for (line, target) in &document.links {
                match self.resolve(path, target) {
                    Ok(page) if path == Path::new(SUMMARY) => in_book.extend(page),
                    Ok(_) => {}
                    Err(why) => broken.push(format!("{}:{line}: {target}: {why}", path.display())),
                }
            }
        }
        let pages = self.all.keys().filter(|path| path.starts_with(BOOK));
        let missing = pages.filter(|path| !in_book.contains(*path));
        broken.extend(missing.map(|page| format!("{SUMMARY}: does not list {}", page.display())));
        broken
    }

    /// The file that a link of a document refers to; `None` for a link to another host.
    fn resolve(&self, from: &Path, target: &str) -> Result<Option<PathBuf>, String> {
        if target.contains("://") || target.starts_with("mailto:") {
            return Ok(None);
        }
        let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
        let mut to = self.root.join(from);
        if !path.is_empty() {
            to.set_file_name(path);
        }
        let to = to
            .canonicalize()
            .map_err(|_| format!("there is no {path}"))?;
        let to = to
            .strip_prefix(&self.root)
            .map_err(|_| "outside of the repository")?;
        if from.starts_with(BOOK) && !to.starts_with(BOOK) {
            return Err(format!("outside of {BOOK}/, which is the book"));
        }
        let document = self.all.get(to);
        if !anchor.is_empty() && document.is_some_and(|d| !d.anchors.contains(anchor)) {
            return Err(format!("{} has no such heading", to.display()));
        }
        Ok(Some(to.to_owned()))
    }
}

/// The link targets of a document, and its own links.
#[derive(Debug, Default)]
struct Document {
    anchors: BTreeSet<String>,
    /// Lines and targets.
    links: Vec<(usize, String)>,
}

impl Document {
    fn of(text: &str) -> Self {
        let mut document = Self::default();
        let mut heading: Option<String> = None;
        let events = Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter();
        for (event, range) in events {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    document.add_anchor(&slug(&heading.take().unwrap_or_default()));
                }
                Event::Text(words) | Event::Code(words) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&words);
                    }
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    let line = text[..range.start].matches('\n').count() + 1;
                    document.links.push((line, dest_url.into_string()));
                }
                // `<a id="threads"></a>`
                Event::Html(html) | Event::InlineHtml(html) => {
                    let mut parts = html.split(" id=\"").skip(1);
                    let id = parts.next().and_then(|rest| rest.split('"').next());
                    document.anchors.extend(id.map(str::to_owned));
                }
                _ => {}
            }
        }
        document
    }

    /// If several headings have the same name, the second is `name-1`.
    fn add_anchor(&mut self, slug: &str) {
        let numbered = (1..).map(|n| format!("{slug}-{n}"));
        let mut names = std::iter::once(slug.to_owned()).chain(numbered);
        let free = names.find(|name| !self.anchors.contains(name));
        self.anchors.extend(free);
    }
}

/// The anchor of a heading, as GitHub and mdBook create it.
fn slug(heading: &str) -> String {
    heading
        .trim()
        .chars()
        .filter_map(|c| match c {
            '-' | '_' => Some(c),
            c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
            c if c.is_whitespace() => Some('-'),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_and_links_are_parsed() {
        let document = Document::of(
            "# The `add` verb, 5.10\n\n## Same\n\n## Same\n\n<a id=\"here\"></a>text\n[a](b.md#c) `[no](link)`\n\n    [nor](this)\n",
        );
        let anchors: Vec<&str> = document.anchors.iter().map(String::as_str).collect();
        assert_eq!(anchors, ["here", "same", "same-1", "the-add-verb-510"]);
        assert_eq!(document.links, [(8, "b.md#c".to_owned())]);
    }

    #[test]
    fn broken_links_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(BOOK)).unwrap();
        for (path, text) in [
            ("README.md", ""),
            (SUMMARY, "[a](a.md)"),
            ("docs/a.md", "# Here\n[](#here) [](#there) [](../..)"),
            (
                "docs/b.md",
                "[](a.md#here) [](a.md#there) [](c.md) [](../README.md) [](https://x/#y)",
            ),
        ] {
            fs::write(dir.path().join(path), text).unwrap();
        }
        let documents = Documents::read(dir.path()).unwrap();
        assert_eq!(
            documents.broken(),
            [
                "docs/a.md:2: #there: docs/a.md has no such heading",
                "docs/a.md:2: ../..: outside of the repository",
                "docs/b.md:1: a.md#there: docs/a.md has no such heading",
                "docs/b.md:1: c.md: there is no c.md",
                "docs/b.md:1: ../README.md: outside of docs/, which is the book",
                "docs/SUMMARY.md: does not list docs/b.md",
            ]
        );
    }
}
