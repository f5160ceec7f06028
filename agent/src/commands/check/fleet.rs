//! `rto-agent check --fleet DIR`: validates the configurations of many hosts before they are rolled
//! out.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, ensure};
use rto_agent_core::{
    config::Config,
    policy::HostFacts,
    printable::{self, counted},
};
use serde::Serialize;

use super::{Answer, good, refused, summary};
use crate::{
    cli::{Check, WideArg},
    commands::{exit, print_coloured},
};

/// The main file in a host's directory.
const MAIN: &str = "config.toml";

/// What `--json` prints.
#[derive(Serialize)]
struct FleetAnswer {
    /// Whether all configurations are valid.
    ok: bool,
    /// The answers, by the name of the directory or file.
    hosts: BTreeMap<String, Answer>,
}

pub(super) fn run(dir: &Path, host: &HostFacts, args: &Check) -> anyhow::Result<ExitCode> {
    let answer = checked(dir, host);
    let answer = answer.with_context(|| format!("--fleet {}", printable::path(dir)))?;
    let wide = WideArg { wide: false };
    print_coloured(args.output.json, &answer, args.color, wide, |_| {
        text(&answer)
    })?;
    Ok(exit(answer.ok))
}

/// Checks every configuration in the directory, with values computed for this host.
fn checked(dir: &Path, host: &HostFacts) -> anyhow::Result<FleetAnswer> {
    let hosts = files(dir)?.into_iter();
    let hosts = hosts.map(|(name, path)| (name, answer(&path, host)));
    let hosts: BTreeMap<_, _> = hosts.collect();
    Ok(FleetAnswer {
        ok: hosts.values().all(|host| host.ok),
        hosts,
    })
}

/// The configuration file of each host, by name. Names that begin with a dot (`.git`, an editor's
/// files) are skipped.
fn files(dir: &Path) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        let name = |part: Option<&OsStr>| printable::path(Path::new(part.unwrap_or_default()));
        let (name, file) = if path.is_dir() {
            (name(path.file_name()), path.join(MAIN))
        } else if path.extension() == Some(OsStr::new("toml")) {
            (name(path.file_stem()), path)
        } else {
            continue;
        };
        let other = files.insert(name.clone(), file);
        ensure!(
            other.is_none(),
            "{name} has both a directory and a file; remove one of them"
        );
    }
    ensure!(
        !files.is_empty(),
        "no configuration found: neither HOST/{MAIN} nor HOST.toml"
    );
    Ok(files)
}

fn answer(path: &Path, host: &HostFacts) -> Answer {
    match Config::load(path, host) {
        Ok(config) => good(config, *host),
        Err(errors) => refused(errors.0, *host),
    }
}

fn text(answer: &FleetAnswer) -> String {
    let mut text = String::new();
    for (name, host) in &answer.hosts {
        for error in &host.errors {
            text.push_str(&format!("{name}: {error}\n"));
        }
        for warning in &host.warnings {
            text.push_str(&format!("{name}: warning: {warning}\n"));
        }
        if host.ok {
            text.push_str(&format!("{name}: {}", summary(host)));
        }
    }
    let refused = answer.hosts.values().filter(|host| !host.ok).count();
    text.push_str(&match refused {
        0 => format!("good: {}\n", counted(answer.hosts.len(), "host", "hosts")),
        _ => format!(
            "REFUSED: {refused} of {}\n",
            counted(answer.hosts.len(), "host", "hosts")
        ),
    });
    text
}

#[cfg(test)]
mod tests {
    use rto_agent_core::testing::HOST;

    use super::*;

    const GOOD: &str = "[agent]\ncgroup = \"/host/cgroup\"\npin_dir = \"/host/bpf/rto-agent\"\n\
                        [policy.near]\ncidrs = [\"192.0.2.0/24\"]\ninitial_rto = \"300ms\"\n";

    fn checked(files: &[(&str, &str)]) -> anyhow::Result<FleetAnswer> {
        let dir = tempfile::tempdir()?;
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().context("a directory")?)?;
            fs::write(path, text)?;
        }
        super::checked(dir.path(), &HOST)
    }

    #[test]
    fn fleet_reads_file_or_directory_of_each_host() {
        let more = "[policy.far]\ncidrs = [\"198.51.100.0/24\"]\ninitial_rto = \"300ms\"\n";
        let fleet = checked(&[
            ("a/config.toml", GOOD),
            ("a/policies.d/10-far.toml", more),
            ("b.toml", GOOD),
            ("README", "not a configuration"),
        ])
        .unwrap();
        assert!(fleet.ok, "{}", text(&fleet));
        assert_eq!(
            text(&fleet),
            "a: good: 2 entries, 2 policies, 2 files\nb: good: 1 entry, 1 policy, 1 file\ngood: 2 hosts\n"
        );
    }

    #[test]
    fn bad_file_is_named_and_others_are_checked() {
        let fleet = checked(&[
            ("a/config.toml", GOOD),
            ("b/config.toml", &GOOD.replace("300ms", "300")),
            ("c/policies.d/10-far.toml", ""),
        ])
        .unwrap();
        assert!(!fleet.ok);
        let text = text(&fleet);
        assert!(text.contains("a: good: 1 entry"), "{text}");
        assert!(
            text.contains("b/config.toml:6:15: invalid duration"),
            "{text}"
        );
        assert!(
            text.contains("c: ") && text.contains("c/config.toml"),
            "{text}"
        );
        assert!(text.ends_with("REFUSED: 2 of 3 hosts\n"), "{text}");
    }

    #[test]
    fn hidden_files_are_skipped() {
        let fleet = checked(&[
            ("a/config.toml", GOOD),
            (".git/config", "[core]"),
            (".old/config.toml", "not a configuration"),
            (".b.toml", "an editor's file"),
        ])
        .unwrap();
        assert!(fleet.ok, "{}", text(&fleet));
        let hosts: Vec<_> = fleet.hosts.keys().collect();
        assert_eq!(hosts, ["a"]);
    }

    #[test]
    fn fleet_directory_without_files_is_refused() {
        for files in [
            &[][..],
            &[("README", "")],
            &[("a/config.toml", GOOD), ("a.toml", GOOD)],
        ] {
            assert!(checked(files).is_err(), "{files:?}");
        }
    }
}
