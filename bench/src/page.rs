//! Measured parts of the documents: the text between `<!-- bench: NAME -->` and `<!-- end: NAME -->`. The text around
//! it is written by hand.

use std::{fs, path::PathBuf};

use anyhow::Context as _;

use crate::process::root;

/// The document that has this part.
pub(crate) fn of(part: &str) -> PathBuf {
    let page = match part {
        "scale" => "reference/scale",
        "alternatives" => "operate/alternatives",
        _ => "reference/benchmarks",
    };
    root().join(format!("docs/{page}.md"))
}

/// Replaces a part of its document, if the document has it; other parts are only printed.
pub(crate) fn rewrite(name: &str, part: &str) -> anyhow::Result<()> {
    let path = of(name);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    if !text.contains(&begin(name)) {
        return Ok(());
    }
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
    fn documents_have_measured_parts() {
        let parts = crate::suite::parts();
        let mut found = Vec::new();
        for page in ["goals", "scale", "alternatives"].map(of) {
            let text = fs::read_to_string(&page).unwrap();
            for rest in text.split("<!-- bench: ").skip(1) {
                let (name, rest) = rest.split_once(" -->").unwrap();
                let (part, _) = rest.split_once(&end(name)).unwrap();
                assert!(part.trim().len() > 20, "{name} was never measured");
                assert!(parts.iter().any(|known| known == name), "{name}");
                assert_eq!(of(name), page, "{name} is written to another page");
                found.push(name.to_owned());
            }
        }
        assert_eq!(found, ["machine", "goals", "scale", "alternatives"]);
    }

    #[test]
    fn only_the_part_is_replaced() {
        let text = "a\n<!-- bench: x -->\nold\n<!-- end: x -->\nb\n";
        let new = replaced(text, "x", "new\n").unwrap();
        assert_eq!(new, text.replace("old", "new"));
        assert!(replaced(text, "y", "new\n").is_err());
    }
}
