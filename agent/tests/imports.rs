//! Imports go one way: a module uses those before it in [`ORDER`], and never one after it.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

/// From modules that everything may use to modules that use everything; modules of one line do not use each other.
const ORDER: &[&[&str]] = &[
    &[
        "build_info",
        "path_security",
        "printable",
        "problem",
        "progress",
    ],
    &["parallel"],
    &["policy"],
    &["kernel", "config"],
    &["datapath"],
    &["wire"],
    &["cli", "experiment", "tuning"],
    &["engine"],
    &["api"],
    &["telemetry"],
    &["daemon"],
    &["completion", "doctor"],
    &["commands"],
];

/// Modules of tests alone, declared by `#[cfg(test)]`, which may use anything.
const TESTS: &[&str] = &["tests.rs", "schema.rs", "reference.rs"];

fn level(module: &str) -> Option<usize> {
    ORDER.iter().position(|line| line.contains(&module))
}

fn sources(dir: &Path, all: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, all)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            all.push(path);
        }
    }
    Ok(())
}

/// The first name after each `crate::`; for a list in braces the names of all its items.
fn used(text: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        let Some(list) = rest.strip_prefix('{') else {
            all.insert(name(rest));
            continue;
        };
        let mut depth = 0;
        let mut begins = true;
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                c if depth == 0 && begins && c.is_alphabetic() => {
                    all.insert(name(&list[at..]));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    all
}

fn name(text: &str) -> String {
    let part = |c: &char| c.is_alphanumeric() || *c == '_';
    text.chars().take_while(part).collect()
}

#[test]
fn imports_go_one_way() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files).unwrap();
    let mut wrong = Vec::new();
    for path in files {
        let within = path.strip_prefix(&root).unwrap();
        let module = name(&within.to_string_lossy());
        if ["lib", "main"].contains(&module.as_str()) {
            continue;
        }
        let Some(own) = level(&module) else {
            wrong.push(format!("{module} is not in ORDER"));
            continue;
        };
        let text = fs::read_to_string(&path).unwrap();
        // Tests may use anything.
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        if TESTS.iter().any(|name| within.ends_with(name)) {
            continue;
        }
        for other in used(code) {
            let goes_down = level(&other).is_some_and(|level| level < own);
            if other != module && !goes_down && level(&other).is_some() {
                wrong.push(format!("{} uses {other}", within.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn uses_are_found() {
    let text = "use crate::{\n    api::{peer, server},\n    config::X,\n};\nlet x = crate::policy::units::y();";
    let all: Vec<_> = used(text).into_iter().collect();
    assert_eq!(all, ["api", "config", "policy"]);
}
