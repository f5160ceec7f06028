//! `cargo xtask docs`: checks the language of all files and the links of the documents, and builds the book of docs/.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    path::{Component, Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::{process::run as run_command, prose, root, tools};

const MDBOOK: &str = "0.5.4";
/// The sources of the book, and its table of contents.
const BOOK: &str = "docs";
const SUMMARY: &str = "docs/SUMMARY.md";
const OUTPUT: &str = "target/book";

pub(crate) fn run() -> anyhow::Result<()> {
    prose::check()?;
    let documents = Documents::read()?;
    let broken = documents.broken();
    ensure!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
    println!("{} links checked", documents.links());
    let features = ["--no-default-features", "--features=search"];
    let path = tools::ensure("mdbook", MDBOOK, &features, "the book of docs/")?;
    run_command(
        Command::new("mdbook")
            .current_dir(root())
            .args(["build", BOOK, "--dest-dir"])
            .arg(root().join(OUTPUT))
            .env("PATH", path),
    )?;
    println!("built: {OUTPUT}/index.html");
    Ok(())
}

/// The Markdown files of the repository's root and below docs/.
pub(crate) fn pages() -> anyhow::Result<Vec<PathBuf>> {
    let mut pages = Vec::new();
    collect(&root(), false, &mut pages)?;
    collect(&root().join(BOOK), true, &mut pages)?;
    pages.sort();
    Ok(pages)
}

fn collect(dir: &Path, recurse: bool, pages: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.extension() == Some(OsStr::new("md")) {
            pages.push(path);
        } else if recurse && path.is_dir() {
            collect(&path, recurse, pages)?;
        }
    }
    Ok(())
}

/// All documents, by their paths in the repository.
struct Documents(BTreeMap<PathBuf, Document>);

impl Documents {
    fn read() -> anyhow::Result<Self> {
        let mut documents = BTreeMap::new();
        for path in pages()? {
            let document = Document::of(&fs::read_to_string(&path)?);
            let path = path.strip_prefix(root()).context("a page of this tree")?;
            documents.insert(path.to_owned(), document);
        }
        Ok(Self(documents))
    }

    fn links(&self) -> usize {
        self.0.values().map(|document| document.links.len()).sum()
    }

    /// The errors, one per line: links that lead nowhere, and pages that the book lacks.
    fn broken(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let mut in_book = BTreeSet::new();
        for (path, document) in &self.0 {
            for Link { line, target } in &document.links {
                match self.resolve(path, target) {
                    Ok(Some(page)) if path == Path::new(SUMMARY) => {
                        in_book.insert(page);
                    }
                    Ok(_) => {}
                    Err(why) => broken.push(format!("{}:{line}: {target}: {why}", path.display())),
                }
            }
        }
        let pages = self.0.keys().filter(|path| path.starts_with(BOOK));
        for page in pages.filter(|path| *path != Path::new(SUMMARY)) {
            if !in_book.contains(page) {
                broken.push(format!("{SUMMARY}: does not list {}", page.display()));
            }
        }
        broken
    }

    /// The file that a link of a document refers to; `None` for a link to another host.
    fn resolve(&self, from: &Path, target: &str) -> Result<Option<PathBuf>, String> {
        if target.contains("://") || target.starts_with("mailto:") {
            return Ok(None);
        }
        let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
        let to = if path.is_empty() {
            from.to_owned()
        } else {
            normalised(&from.with_file_name("").join(path)).ok_or("outside of the repository")?
        };
        if from.starts_with(BOOK) && !to.starts_with(BOOK) {
            return Err(format!("outside of {BOOK}/, which is the book"));
        }
        if !self.0.contains_key(&to) && !root().join(&to).exists() {
            return Err(format!("there is no {}", to.display()));
        }
        let document = self.0.get(&to);
        if !anchor.is_empty() && document.is_some_and(|d| !d.anchors.contains(anchor)) {
            return Err(format!("{} has no such heading", to.display()));
        }
        Ok(Some(to))
    }
}

/// A relative path without `.` and `..`; `None` if it leaves the repository.
fn normalised(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            Component::ParentDir if clean.pop() => {}
            _ => return None,
        }
    }
    Some(clean)
}

/// The link targets of a document, and its own links.
#[derive(Debug, Default)]
struct Document {
    anchors: BTreeSet<String>,
    links: Vec<Link>,
}

#[derive(Debug, PartialEq, Eq)]
struct Link {
    line: usize,
    target: String,
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
                    document.links.push(Link {
                        line: text[..range.start].matches('\n').count() + 1,
                        target: dest_url.into_string(),
                    });
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
    fn headings_and_links() {
        let document = Document::of(
            "# The `add` verb, 5.10\n\n## Same\n\n## Same\n\n<a id=\"here\"></a>text\n[a](b.md#c) `[no](link)`\n\n    [nor](this)\n",
        );
        let anchors: Vec<&str> = document.anchors.iter().map(String::as_str).collect();
        assert_eq!(anchors, ["here", "same", "same-1", "the-add-verb-510"]);
        let target = "b.md#c".to_owned();
        assert_eq!(document.links, [Link { line: 8, target }]);
    }

    #[test]
    fn links_that_lead_nowhere() {
        let documents = Documents(
            [
                ("docs/SUMMARY.md", "[a](a.md)"),
                ("docs/a.md", "# Here\n[](#here) [](#there)"),
                (
                    "docs/b.md",
                    "[](a.md#here) [](a.md#there) [](c.md) [](../README.md) [](../../x) [](https://x/#y)",
                ),
            ]
            .map(|(path, text)| (path.into(), Document::of(text)))
            .into(),
        );
        assert_eq!(
            documents.broken(),
            [
                "docs/a.md:2: #there: docs/a.md has no such heading",
                "docs/b.md:1: a.md#there: docs/a.md has no such heading",
                "docs/b.md:1: c.md: there is no docs/c.md",
                "docs/b.md:1: ../README.md: outside of docs/, which is the book",
                "docs/b.md:1: ../../x: outside of the repository",
                "docs/SUMMARY.md: does not list docs/b.md",
            ]
        );
    }
}
