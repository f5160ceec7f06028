//! The text of a configuration file.
//!
//! Parsing is deterministic. Errors point into the file and are not longer than a person can read. A valid file is the
//! same after `add --save` wrote it, and keeps its entries when others are added and removed.

use std::path::Path;

use rto_agent_core::{
    config::{Config, save},
    policy::{Cidr, HostFacts, MAX_ENTRIES_LIMIT, PolicyName, PolicySet, Settings},
    testing::HOST,
};

use crate::HZ;

/// The file's name in errors.
const PATH: &str = "fuzzed.toml";
/// More errors than this are useless, and a file with one error per byte must not produce them all.
const LONGEST_MESSAGE: usize = 1 << 20;

/// Checks a text.
pub fn check(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    let path = Path::new(PATH);
    let read = Config::from_text(path, text.to_owned(), &HOST);
    let again = Config::from_text(path, text.to_owned(), &HOST);
    assert_eq!(format!("{read:?}"), format!("{again:?}"));
    match read {
        Ok(config) => good(text, &config),
        Err(errors) => {
            assert!(!errors.0.is_empty());
            let lines = text.split('\n').count();
            for error in &errors.0 {
                assert!(error.line.is_none_or(|line| (1..=lines).contains(&line)));
                assert!(error.column.is_none_or(|column| column >= 1));
            }
            assert!(errors.to_string().len() < LONGEST_MESSAGE + text.len());
        }
    }
}

fn good(text: &str, config: &Config) {
    let set = &config.set;
    assert!(set.check_size().is_ok());
    for (_, entry) in set.entries.iter() {
        assert!(set.policies.contains_key(entry.policy));
    }
    for hz in HZ {
        let host = HostFacts { hz, ..HOST };
        let _either = Config::from_text(Path::new(PATH), text.to_owned(), &host);
    }
    let saved = saved(set);
    let read = Config::from_text(Path::new(PATH), saved, &HOST).expect("what was saved is good");
    assert_eq!(plain(set), plain(&read.set));
    edited(text, config);
}

/// All entries of a set, as `add --save` writes them.
fn saved(set: &PolicySet) -> String {
    let mut text = String::new();
    for (name, policy) in &set.policies {
        let cidrs: Vec<Cidr> = set
            .entries
            .iter()
            .filter(|(_, entry)| entry.policy == name)
            .map(|(cidr, _)| cidr)
            .collect();
        text = save::added(&text, &cidrs, name, Some(&policy.settings)).expect("it is ours");
    }
    text
}

/// A set without the positions that its parts come from.
type Plain<'a> = (
    Vec<(&'a PolicyName, &'a Settings)>,
    Vec<(Cidr, &'a PolicyName)>,
);

fn plain(set: &PolicySet) -> Plain<'_> {
    let policies = set.policies.iter().map(|(n, p)| (n, &p.settings));
    let entries = set.entries.iter().map(|(c, e)| (c, e.policy));
    (policies.collect(), entries.collect())
}

/// Adds an entry to the text and takes it out again.
fn edited(text: &str, config: &Config) {
    let one: Cidr = "192.0.2.77/32".parse().expect("a CIDR");
    let Some(name) = config.set.policies.keys().next() else {
        return;
    };
    if config.set.entries.contains_key(&one)
        || config.set.entries.len() >= MAX_ENTRIES_LIMIT as usize
    {
        return;
    }
    let with = save::added(text, &[one], name, None).expect("it could be read");
    let read = |text: String| {
        Config::from_text(Path::new(PATH), text, &HOST).expect("an edit leaves it good")
    };
    let added = read(with.clone());
    assert_eq!(added.set.entries.len(), config.set.entries.len() + 1);
    let entry = added.set.entries.get(&one).expect("it was added");
    assert_eq!(entry.policy, name);
    let without = read(save::removed(&with, &[one]).expect("it is there"));
    assert_eq!(plain(&without.set).1, plain(&config.set).1);
}
