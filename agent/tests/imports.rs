//! Imports go one way: a module uses those before it in [`CRATES`], and never one after it; and no
//! file uses one that uses it. (Cargo refuses cycles of crates.)

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
    process::Command,
};

/// The top-level modules of each crate, from those that every other may use to those that use every
/// other; modules of one line do not use each other.
const CRATES: &[(&str, &[&[&str]])] = &[
    (
        "agent-core",
        &[
            &["figures", "path_security", "printable", "progress"],
            &["policy"],
            &["advice", "config", "wire"],
        ],
    ),
    ("agent-kernel", &[&["kernel"], &["datapath"]]),
    (
        "agent-daemon",
        &[
            &["build_info", "lock", "problem"],
            &["tuning"],
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
const TESTS: &[&str] = &["tests", "schema", "testing", "fake"];

/// The names that lead to a module or an item from the crate's root.
type Names = Vec<String>;

/// The code of each module without its tests, by the names that lead to it.
type Sources = BTreeMap<Names, String>;

fn sources(dir: &Path, module: &[String], all: &mut Sources) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        if TESTS.contains(&&*stem) {
            continue;
        }
        let mut names = module.to_vec();
        if !["lib", "main", "mod"].contains(&&*stem) {
            names.push(stem.clone().into_owned());
        }
        if path.is_dir() {
            sources(&path, &names, all)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            all.entry(names).or_default().push_str(&code(&path)?);
        }
    }
    Ok(())
}

/// A file without comments, and without what follows `#[cfg(test)]` at its end.
fn code(path: &Path) -> io::Result<String> {
    let text = fs::read_to_string(path)?;
    let tests = text.match_indices("#[cfg(test)]\n").find(|(at, test)| {
        let item = text[at + test.len()..].lines().next().unwrap_or_default();
        item.contains("mod tests")
    });
    let code = text[..tests.map_or(text.len(), |(at, _)| at)].lines();
    let code = code.filter(|line| !line.trim_start().starts_with("//"));
    Ok(code.flat_map(|line| [line, "\n"]).collect())
}

/// A path in a source.
struct Used {
    names: Names,
    /// It is imported, not used in place.
    is_import: bool,
    /// It is exported again.
    is_export: bool,
}

/// The paths in a module's code that lead to its own crate, from the root; of a list in braces each.
fn used(module: &[String], code: &str) -> Vec<Used> {
    let mut all = Vec::new();
    let children: Vec<_> = code
        .lines()
        .filter_map(|line| Some(line.strip_suffix(';')?.rsplit_once("mod ")?.1))
        .collect();
    let mut end = 0;
    for (at, _) in code.match_indices("::") {
        let before = code[..at].trim_end_matches(is_of_name);
        let first = &code[before.len()..at];
        let is_own = ["crate", "self", "super"].contains(&first) || children.contains(&first);
        let is_part = at < end || before.ends_with("::") || before.ends_with("(in ");
        if !is_own || is_part {
            continue;
        }
        let line = before.rsplit('\n').next().unwrap_or_default().trim_start();
        let mut paths = Vec::new();
        end = code.len() - expand(&code[before.len()..], Vec::new(), &mut paths).len();
        all.extend(paths.into_iter().map(|path| Used {
            names: from_root(module, &path),
            is_import: line.ends_with("use "),
            is_export: line.starts_with("pub") && line.ends_with("use "),
        }));
    }
    all
}

fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Adds the paths at the beginning of a text, and returns what follows.
fn expand<'a>(mut text: &'a str, mut path: Names, all: &mut Vec<Names>) -> &'a str {
    loop {
        text = text.trim_start();
        if let Some(list) = text.strip_prefix('{') {
            text = list.trim_start();
            while !text.is_empty() && !text.starts_with('}') {
                text = expand(text, path.clone(), all);
                // Also skips "as" and another name.
                let end = text.find([',', '}']).unwrap_or(text.len());
                text = text[end..].trim_start_matches(',').trim_start();
            }
            return text.strip_prefix('}').unwrap_or(text);
        }
        let rest = text.trim_start_matches(is_of_name);
        path.extend(Some(text[..text.len() - rest.len()].to_owned()).filter(|n| !n.is_empty()));
        match rest.strip_prefix("::") {
            Some(more) => text = more,
            None => {
                all.push(path);
                return rest;
            }
        }
    }
}

fn from_root(module: &[String], path: &[String]) -> Names {
    let mut all = module.to_vec();
    for name in path {
        match name.as_str() {
            "crate" => all.clear(),
            "super" => drop(all.pop()),
            "self" => {}
            _ => all.push(name.clone()),
        }
    }
    all
}

/// The module that defines what a path leads to, through modules that import it.
fn definer(uses: &BTreeMap<Names, Vec<Used>>, path: &[String], depth: usize) -> Names {
    let lengths = (0..=path.len()).rev();
    let module = lengths.map(|n| &path[..n]).find(|m| uses.contains_key(*m));
    let module = module.unwrap_or_default();
    let imported = path.get(module.len()).and_then(|item| {
        let imports = uses.get(module)?.iter().filter(|used| used.is_import);
        imports
            .map(|used| &used.names)
            .find(|names| names.last() == Some(item) && names[..] != path[..])
    });
    match imported.filter(|_| depth > 0) {
        Some(names) => {
            let path = [names, &path[module.len() + 1..]].concat();
            definer(uses, &path, depth - 1)
        }
        None => module.to_vec(),
    }
}

/// Sets of modules that use each other, each by way of the others. A module that only exports what
/// its children define does not use them.
fn cycles(sources: &Sources) -> BTreeSet<BTreeSet<String>> {
    let uses = sources.iter().map(|(m, code)| (m.clone(), used(m, code)));
    let uses: BTreeMap<_, _> = uses.collect();
    let mut reached: BTreeMap<&Names, BTreeSet<Names>> = BTreeMap::new();
    for (module, used) in &uses {
        let is_use = |used: &&Used| !used.is_export || !used.names.starts_with(module);
        let used = used.iter().filter(is_use);
        let others = used.map(|used| definer(&uses, &used.names, 9));
        reached.insert(module, others.filter(|other| other != module).collect());
    }
    loop {
        let before = reached.clone();
        for all in reached.values_mut() {
            let further: Vec<_> = all.iter().flat_map(|other| &before[other]).collect();
            all.extend(further.into_iter().cloned());
        }
        if reached == before {
            break;
        }
    }
    let in_cycle = reached
        .iter()
        .filter(|(module, all)| all.contains(**module));
    in_cycle
        .map(|(module, all)| {
            let both = all.iter().filter(|other| reached[other].contains(*module));
            both.map(|other| other.join("::")).collect()
        })
        .collect()
}

fn sources_of(name_of_crate: &str) -> io::Result<Sources> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = Sources::new();
    sources(&root.join(name_of_crate).join("src"), &[], &mut all)?;
    Ok(all)
}

#[test]
fn imports_go_one_way() {
    let mut wrong = Vec::new();
    for (name_of_crate, order) in CRATES {
        let modules = order.iter().map(|line| line.len()).sum::<usize>();
        assert!(modules <= MOST_MODULES, "{name_of_crate}: {modules}");
        let level = |module: &str| order.iter().position(|line| line.contains(&module));
        for (module, code) in sources_of(name_of_crate).unwrap() {
            let Some(top) = module.first().filter(|top| *top != "reference") else {
                continue;
            };
            let Some(own) = level(top) else {
                wrong.push(format!("{top} of {name_of_crate} is not in CRATES"));
                continue;
            };
            for other in used(&module, &code).iter().filter_map(|u| u.names.first()) {
                let is_above = level(other).is_some_and(|level| level >= own);
                if other != top && is_above {
                    wrong.push(format!(
                        "{name_of_crate}: {} uses {other}",
                        module.join("::")
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn files_have_no_cycles() {
    for (name_of_crate, _) in CRATES {
        let cycles = cycles(&sources_of(name_of_crate).unwrap());
        assert!(cycles.is_empty(), "{name_of_crate}: {cycles:#?}");
    }
}

#[test]
fn cycle_of_files_is_found() {
    let cycles_of = |files: &[(&str, &str)]| {
        let files = files.iter().map(|(module, code)| {
            let names = module.split("::").filter(|name| !name.is_empty());
            (names.map(str::to_owned).collect(), (*code).to_owned())
        });
        let cycles = cycles(&files.collect());
        let cycles = cycles.into_iter().map(|all| Vec::from_iter(all).join(" "));
        cycles.collect::<Vec<_>>()
    };
    let parent = ("a", "mod b;\nmod c;\npub use self::{b::B, c::C};");
    let b = ("a::b", "use super::{\n    c::{self, D},\n    E,\n};");
    assert!(cycles_of(&[parent, b, ("a::c", "struct C;")]).is_empty());
    // By the name that the parent exports.
    let uses_b = ("a::c", "use super::B;");
    assert_eq!(cycles_of(&[parent, b, uses_b]), ["a::b a::c"]);
    let calls_b = ("a::c", "fn f() {\n    crate::a::b::f();\n}");
    assert_eq!(cycles_of(&[parent, b, calls_b]), ["a::b a::c"]);
    let calls_child = ("a", "mod b;\nmod c;\nfn f() { b::f() }\nstruct E;");
    assert_eq!(cycles_of(&[calls_child, b, ("a::c", "")]), ["a a::b"]);
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
