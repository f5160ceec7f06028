//! Measured parts of the documents: the text between `<!-- bench: NAME -->` and `<!-- end: NAME -->`. Each part is in
//! one document, README.md or a page below docs/; the text around it is written by hand.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};

use crate::process::root;

/// The document that has this part.
pub(crate) fn find(name: &str) -> anyhow::Result<PathBuf> {
    let mut pages = vec![root().join("README.md")];
    collect(&root().join("docs"), &mut pages)?;
    let mut found = Vec::new();
    for page in pages {
        if fs::read_to_string(&page)?.contains(&begin(name)) {
            found.push(page);
        }
    }
    match found.as_slice() {
        [page] => Ok(page.clone()),
        [] => bail!("no document has {}", begin(name)),
        _ => bail!("more than one document has {}: {found:?}", begin(name)),
    }
}

/// The Markdown files below a directory.
fn collect(dir: &Path, pages: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, pages)?;
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    Ok(())
}

/// Replaces a part of a document.
pub(crate) fn rewrite(path: &Path, name: &str, part: &str) -> anyhow::Result<()> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let text = replaced(&text, name, part).with_context(|| path.display().to_string())?;
    Ok(fs::write(path, text)?)
}

fn replaced(text: &str, name: &str, part: &str) -> anyhow::Result<String> {
    let (begin, end) = (begin(name), end(name));
    let (before, rest) = text
        .split_once(&begin)
        .with_context(|| format!("no {begin}"))?;
    let (_, after) = rest.split_once(&end).with_context(|| format!("no {end}"))?;
    Ok(format!("{before}{begin}\n{part}{end}{after}"))
}

fn begin(name: &str) -> String {
    format!("<!-- bench: {name} -->")
}

fn end(name: &str) -> String {
    format!("<!-- end: {name} -->")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_one_place_and_was_measured() {
        for name in crate::suite::parts() {
            let text = fs::read_to_string(find(&name).unwrap()).unwrap();
            let (_, rest) = text.split_once(&begin(&name)).unwrap();
            let (part, _) = rest.split_once(&end(&name)).unwrap();
            assert!(part.trim().len() > 20, "{name} was never measured");
        }
        assert!(find("no such part").is_err());
    }

    #[test]
    fn only_the_part_is_replaced() {
        let text = "a\n<!-- bench: x -->\nold\n<!-- end: x -->\nb\n";
        let new = replaced(text, "x", "new\n").unwrap();
        assert_eq!(new, text.replace("old", "new"));
        assert!(replaced(text, "y", "new\n").is_err());
    }
}
