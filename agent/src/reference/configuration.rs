//! The tables of `docs/operate/configuration.md`. Tests compare them with the parser (keys,
//! defaults, values at each bound), the help of `rto-agent add`, the list of kernel features, and
//! the page. `UPDATE=1 cargo test -p rto-agent --lib reference::configuration` rewrites the page.

use std::{collections::BTreeSet, fmt::Write as _, fs};

use rto_agent_core::{
    config::{AGENT_KEYS, AgentConfig, Config, Files},
    policy::{Key, SETTINGS},
    testing::HOST,
};
use rto_agent_kernel::kernel::{
    btf::BtfError,
    features::{self, ProbeError, ProbeResults},
};

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/operate/configuration.md"
);

const CIDRS: Key = Key {
    name: "cidrs",
    help: "The prefixes of the policy's peers. Other files may add prefixes",
    values: "list of CIDRs",
    default: "`[]`",
    meaning: None,
    features: &[],
    samples: [
        &["['10.0.0.0/8', 'fd00::/16', '10.1.2.3']"],
        &["'10.0.0.0/8'", "['10.1.2.3/8']", "['10.0.0.0/33']"],
    ],
};

const CIDRS_FILE: Key = Key {
    name: "cidrs_file",
    help: "A file with more prefixes, one a line, relative to this file",
    values: "path",
    default: "",
    meaning: None,
    features: &[],
    samples: [
        &["'aws.txt'"],
        &["['aws.txt']", "'other.toml'", "'missing.txt'"],
    ],
};

/// The keys of `[policy.NAME]`.
fn policy_keys() -> impl Iterator<Item = &'static Key> {
    [&CIDRS, &CIDRS_FILE]
        .into_iter()
        .chain(SETTINGS.iter().map(|setting| &setting.key))
}

/// The meaning of a key, with keys instead of flags.
fn meaning(key: &Key) -> String {
    let help = || key.paragraphs().join(". ");
    let text = key.meaning.map_or_else(help, ToOwned::to_owned);
    SETTINGS.iter().fold(text, |text, setting| {
        text.replace(setting.flag().0, &format!("`{}`", setting.key.name))
    })
}

/// The default, if it is a value of TOML.
fn default_value(key: &'static Key) -> Option<(&'static str, &'static str)> {
    let value = key.default.strip_prefix('`')?.strip_suffix('`')?;
    Some((key.name, value))
}

fn read(text: String) -> Result<Config, String> {
    let list = "192.0.2.0/24\n".to_owned();
    let texts = [("config.toml", text), ("aws.txt", list)];
    let files = Files::of_texts(texts.map(|(path, text)| (path.into(), text)).into());
    Config::of(&files, &HOST).map_err(|e| e.to_string())
}

/// A policy with this key, and the settings that the key requires.
fn policy(key: &str, value: &str) -> String {
    let mut text = "[policy.p]\n".to_owned();
    let needed = [
        ("initial_rto", "\"100ms\""),
        ("rto_min", "\"100ms\""),
        ("thin_linear", "true"),
    ];
    let needed = needed.iter().filter(|(name, _)| *name != key);
    for (name, value) in needed.chain([&(key, value)]) {
        let _ = writeln!(text, "{name} = {value}");
    }
    text
}

/// The keys that the parser lists in its error about an unknown one.
fn known(section: &str) -> BTreeSet<String> {
    let refused = read(format!("[{section}]\nno-such-key-at-all = 1\n")).unwrap_err();
    let (_, keys) = refused.split_once("; known keys: ").unwrap();
    let keys = keys.lines().next().unwrap_or_default().split(", ");
    keys.map(ToOwned::to_owned).collect()
}

#[test]
fn documented_keys_are_those_of_parser() {
    let policy: Vec<_> = policy_keys().collect();
    for (section, keys) in [("agent", AGENT_KEYS.iter().collect()), ("policy.p", policy)] {
        let mut known = known(section);
        for Key { name, .. } in keys {
            assert!(known.remove(*name), "{section} takes no {name}");
        }
        // It sets no timer: the page explains it beside `[defaults]`.
        known.remove("description");
        assert_eq!(known, BTreeSet::new(), "{section}");
    }
}

#[test]
fn documented_defaults_are_those_of_parser() {
    for (name, default) in AGENT_KEYS.iter().filter_map(default_value) {
        let config = read(format!("[agent]\n{name} = {default}\n")).unwrap();
        assert_eq!(config.agent, AgentConfig::default(), "{name}");
    }
    let without = &read(policy("initial_rto", "\"100ms\""))
        .unwrap()
        .set
        .policies;
    for (name, default) in policy_keys().filter_map(default_value) {
        let set = read(policy(name, default)).unwrap().set;
        let (with, without) = (set.policies.values().next(), without.values().next());
        let (mut with, mut without) = (
            with.unwrap().settings.clone(),
            without.unwrap().settings.clone(),
        );
        // Unset and off are shown differently, but are equal in the kernel.
        (with.rto_restart, without.rto_restart) = (with.rto_restart.filter(|on| *on), None);
        assert_eq!(with.is_guarded(), without.is_guarded());
        (with.guard, without.guard) = (None, None);
        assert_eq!(with, without, "{name}");
    }
}

#[test]
fn documented_bounds_are_those_of_parser() {
    let agent = AGENT_KEYS.iter().map(|key| (key, false));
    for (key, is_policy) in agent.chain(policy_keys().map(|key| (key, true))) {
        let text = |value: &str| match is_policy {
            true => policy(key.name, value),
            false => format!("[agent]\n{} = {value}\n", key.name),
        };
        let [taken, not_taken] = key.samples;
        for value in taken {
            let accepted = read(text(value));
            assert!(accepted.is_ok(), "{} = {value}: {accepted:?}", key.name);
        }
        for value in not_taken {
            assert!(read(text(value)).is_err(), "{} = {value}", key.name);
        }
    }
    for (key, value) in [
        ("rto_restart", "true"),
        ("linear_retries", "1"),
        ("holdout", "\"5%\""),
        ("guard", "\"on\""),
        ("guard", "\"off\""),
        ("mode", "\"advise\""),
        ("force", "true"),
    ] {
        let alone = read(format!("[policy.p]\n{key} = {value}\n"));
        assert!(alone.is_err(), "{key} = {value}: {alone:?}");
    }
}

/// The kernel features that a setting needs.
fn needs(setting: &str) -> String {
    let nothing = Err(BtfError::Missing(String::new()));
    let all = features::evaluate(&ProbeResults::nothing(&ProbeError::not_asked("")), &nothing);
    let used = all
        .iter()
        .filter(|f| f.settings.iter().any(|s| s == setting));
    let used = used.map(|f| {
        let since = f.since.split([' ', ',']).next().unwrap_or_default();
        format!("{} ({since})", f.name)
    });
    used.collect::<Vec<_>>().join(", ")
}

fn table(keys: impl Iterator<Item = &'static Key>) -> String {
    let mut text = "| key | values | default | meaning | kernel features used (since) |\n|---|---|---|---|---|\n".to_owned();
    for key in keys {
        let Key {
            name,
            values,
            default,
            ..
        } = key;
        let _ = writeln!(
            text,
            "| `{name}` | {values} | {default} | {} | {} |",
            meaning(key),
            needs(name)
        );
    }
    text
}

/// Compares the tables of a page, each between `<!-- what of NAME -->` and `<!-- end of NAME -->`,
/// with these; `UPDATE` rewrites them. `tests` is the path of the calling test in cargo.
pub(crate) fn assert_tables<'a>(
    page: &str,
    what: &str,
    tests: &str,
    tables: impl IntoIterator<Item = (&'a str, String)>,
) {
    let mut wanted = fs::read_to_string(page).unwrap();
    for (name, table) in tables {
        let begin = format!("<!-- {what} of {name} -->\n");
        let end = format!("<!-- end of {name} -->\n");
        let (before, rest) = wanted.split_once(&begin).expect("a mark");
        let (_, after) = rest.split_once(&end).expect("its end");
        wanted = format!("{before}{begin}\n{table}\n{end}{after}");
    }
    if std::env::var_os("UPDATE").is_some() {
        fs::write(page, &wanted).unwrap();
    }
    assert_eq!(
        fs::read_to_string(page).unwrap(),
        wanted,
        "UPDATE=1 cargo test -p rto-agent --lib {tests}"
    );
}

#[test]
fn configuration_page_is_current() {
    let tables = [
        ("agent", table(AGENT_KEYS.iter())),
        ("policy", table(policy_keys())),
    ];
    assert_tables(PAGE, "keys", "reference::configuration", tables);
}
