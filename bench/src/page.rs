//! Measured parts of the documents: the text between `<!-- bench: NAME -->` and `<!-- end: NAME -->`. The text around
//! it is written by hand.

use std::{fs, path::PathBuf};

use anyhow::Context as _;

use crate::process::root;

/// The document that has this part.
pub(crate) fn of(part: &str) -> PathBuf {
    let page = match part {
        "scale" => "scale",
        _ => "benchmarks",
    };
    root().join(format!("docs/reference/{page}.md"))
}

/// Replaces a part of its document.
pub(crate) fn rewrite(name: &str, part: &str) -> anyhow::Result<()> {
    let path = of(name);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    fs::write(&path, replaced(&text, name, part)?)?;
    println!("written: {name} in {}", path.display());
    Ok(())
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
            let text = fs::read_to_string(of(&name)).unwrap();
            let (_, rest) = text.split_once(&begin(&name)).unwrap();
            let (part, _) = rest.split_once(&end(&name)).unwrap();
            assert!(part.trim().len() > 20, "{name} was never measured");
        }
    }

    #[test]
    fn only_the_part_is_replaced() {
        let text = "a\n<!-- bench: x -->\nold\n<!-- end: x -->\nb\n";
        let new = replaced(text, "x", "new\n").unwrap();
        assert_eq!(new, text.replace("old", "new"));
        assert!(replaced(text, "y", "new\n").is_err());
    }
}
