//! Imports go one way: a module uses those before it in [`CRATES`], and never one after it. (Cargo
//! refuses cycles of crates.)

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// The top-level modules of each crate, from those that every other may use to those that use every
/// other; modules of one line do not use each other.
const CRATES: &[(&str, &[&[&str]])] = &[
    (
        "agent-core",
        &[
            &["path_security", "printable", "progress"],
            &["parallel"],
            &["policy"],
            &["config", "wire"],
        ],
    ),
    ("agent-kernel", &[&["kernel"], &["datapath"]]),
    (
        "agent-daemon",
        &[
            &["build_info", "problem"],
            &["experiment", "tuning"],
            &["engine"],
            &["api"],
            &["telemetry"],
            &["daemon"],
        ],
    ),
    (
        "agent",
        &[&["cli", "client"], &["completion", "doctor"], &["commands"]],
    ),
];
/// Most top-level modules of a crate.
const MOST_MODULES: usize = 12;

/// Modules of tests alone, declared by `#[cfg(test)]`, which may use anything.
const TESTS: &[&str] = &["tests.rs", "schema.rs", "testing.rs"];

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
    let mut wrong = Vec::new();
    for (name_of_crate, order) in CRATES {
        let modules = order.iter().map(|line| line.len()).sum::<usize>();
        assert!(modules <= MOST_MODULES, "{name_of_crate}: {modules}");
        let level = |module: &str| order.iter().position(|line| line.contains(&module));
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let root = root.join(name_of_crate).join("src");
        let mut files = Vec::new();
        sources(&root, &mut files).unwrap();
        for path in files {
            let within = path.strip_prefix(&root).unwrap();
            let module = name(&within.to_string_lossy());
            // Tests may use anything.
            let is_test = TESTS.iter().any(|name| within.ends_with(name));
            if ["lib", "main", "reference"].contains(&module.as_str()) || is_test {
                continue;
            }
            let Some(own) = level(&module) else {
                wrong.push(format!("{module} of {name_of_crate} is not in CRATES"));
                continue;
            };
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            for other in used(code) {
                let is_above = level(&other).is_some_and(|level| level >= own);
                if other != module && is_above {
                    wrong.push(format!(
                        "{name_of_crate}: {} uses {other}",
                        within.display()
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Libraries of the command line and the lab, which must not run as root in the daemon.
const NOT_IN_DAEMON: [&str; 6] = [
    "clap",
    "clap_mangen",
    "comfy-table",
    "crossterm",
    "plotters",
    "ratatui",
];

#[test]
fn daemon_links_no_library_of_the_client() {
    #[expect(clippy::disallowed_methods, reason = "cargo, in a test")]
    let mut cargo = Command::new(env!("CARGO"));
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../agent-daemon/Cargo.toml");
    cargo.args(["tree", "--offline", "--edges=normal", "--prefix=none"]);
    let tree = cargo.args(["--manifest-path", manifest]).output().unwrap();
    let tree = String::from_utf8(tree.stdout).unwrap();
    let linked: BTreeSet<_> = tree.lines().filter_map(|l| l.split(' ').next()).collect();
    assert!(linked.contains("tokio"), "{tree}");
    let wrong: Vec<_> = NOT_IN_DAEMON
        .iter()
        .filter(|name| linked.contains(**name))
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn uses_are_found() {
    let text = "use crate::{\n    api::{peer, server},\n    config::X,\n};\nlet x = crate::policy::units::y();";
    let all: Vec<_> = used(text).into_iter().collect();
    assert_eq!(all, ["api", "config", "policy"]);
}
