//! The tables of `docs/operate/configuration.md`. Tests compare them with the parser (keys,
//! defaults, values at each bound), the help of `rto-agent add`, the list of kernel features, and
//! the page. `UPDATE=1 cargo test -p rto-agent --lib reference::configuration` rewrites the page.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
};

use clap::CommandFactory as _;
use rto_agent_core::{
    config::{AgentConfig, Config},
    testing::HOST,
};
use rto_agent_kernel::kernel::{
    btf::BtfError,
    features::{self, ProbeError, ProbeResults},
};

use crate::cli::Cli;

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/operate/configuration.md"
);

/// A key of the configuration.
struct Key {
    name: &'static str,
    /// The accepted values, in words.
    values: &'static str,
    /// The default as TOML; empty: the kernel's own value.
    default: &'static str,
    /// The meaning; empty: as in `rto-agent add --help`.
    meaning: &'static str,
    /// Values at each bound, as TOML.
    accepted: &'static [&'static str],
    refused: &'static [&'static str],
}

const AGENT: &[Key] = &[
    Key {
        name: "cgroup",
        values: "`\"auto\"` or an absolute path",
        default: "\"auto\"",
        meaning: "The cgroup2 directory to attach to. `\"auto\"` is the root of the hierarchy, \
                  wherever it is mounted: every socket of the host. The daemon does not start in a \
                  container with a private cgroup namespace",
        accepted: &["\"/sys/fs/cgroup/a\""],
        refused: &["\"a\"", "1"],
    },
    Key {
        name: "pin_dir",
        values: "absolute path on a BPF file system, without dots",
        default: "\"/sys/fs/bpf/rto-agent\"",
        meaning: "Directory for the pins of the link and the maps; created if it is missing. The \
                  pins keep policies active when the daemon is killed, or stops with `on_exit = \
                  \"keep\"`. The next start with the same `pin_dir` adopts them, so run `rto-agent \
                  detach` before you change it",
        accepted: &["\"/sys/fs/bpf/other\""],
        refused: &["\"pins\"", "\"/sys/fs/bpf/a.b\""],
    },
    Key {
        name: "socket",
        values: "absolute path, at most 107 bytes",
        default: "\"/run/rto-agent/control.sock\"",
        meaning: "The control socket",
        accepted: &["\"/run/other.sock\""],
        refused: &[
            "\"control.sock\"",
            "\"/run/rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-abc\"",
        ],
    },
    Key {
        name: "state_dir",
        values: "absolute path",
        default: "\"/run/rto-agent\"",
        meaning: "Directory of the runtime entries and the instance lock",
        accepted: &["\"/run/other\""],
        refused: &["\"state\""],
    },
    Key {
        name: "persistent_dir",
        values: "absolute path",
        default: "\"/var/lib/rto-agent\"",
        meaning: "Directory of data that survives a reboot: [learnt \
                  values](#values-that-are-learnt), [experiments](experiments.md) and the [last \
                  good configuration](runbook.md#rtoagentreloadfailed)",
        accepted: &["\"/var/lib/other\""],
        refused: &["\"lib\""],
    },
    Key {
        name: "group",
        values: "name of a group, or its number as a string",
        default: "\"root\"",
        meaning: "The group that may use the socket in addition to root",
        accepted: &["\"netops\"", "\"998\""],
        refused: &["0"],
    },
    Key {
        name: "on_exit",
        values: "`\"detach\"` or `\"keep\"`",
        default: "\"detach\"",
        meaning: "Whether a daemon that stops removes the policies from the kernel (`\"detach\"`) \
                  or leaves them active (`\"keep\"`)",
        accepted: &["\"keep\""],
        refused: &["\"stop\"", "true"],
    },
    Key {
        name: "metrics",
        values: "`\"off\"`, `\"ADDRESS:PORT\"` or `\"unix:PATH\"`",
        default: "\"off\"",
        meaning: "The address that serves the [metrics](../reference/metrics.md)",
        accepted: &[
            "\"127.0.0.1:9464\"",
            "\"[::1]:9464\"",
            "\"unix:/run/m.sock\"",
        ],
        refused: &["\"127.0.0.1:0\"", "\"localhost:9464\"", "\"unix:m.sock\""],
    },
    Key {
        name: "max_entries",
        values: "1 to 4194304",
        default: "",
        meaning: "Initial [capacity](../reference/scale.md#room) for entries. The maps grow on \
                  demand",
        accepted: &["1", "4194304"],
        refused: &["0", "4194305", "\"1\""],
    },
    Key {
        name: "attach",
        values: "boolean",
        default: "true",
        meaning: "`false` detaches every host that has this configuration, like `rto-agent detach` \
                  on each of them; `true` attaches these hosts again, except hosts that were \
                  detached by `rto-agent detach`",
        accepted: &["false"],
        refused: &["\"false\""],
    },
    Key {
        name: "apply_to_open",
        values: "boolean",
        default: "false",
        meaning: "Whether a new or changed policy also sets its options on sockets that are \
                  already open ([scope](../reference/kernel.md#sockets-that-are-open-already))",
        accepted: &["true"],
        refused: &["\"true\""],
    },
    Key {
        name: "statistics",
        values: "boolean",
        default: "true",
        meaning: "Whether connections and retransmissions are \
                  [counted](../reference/statistics.md) by policy",
        accepted: &["false"],
        refused: &["1"],
    },
    Key {
        name: "count_unmatched",
        values: "boolean",
        default: "false",
        meaning: "Whether connections that no entry covers are counted as well",
        accepted: &["true"],
        refused: &["1"],
    },
    Key {
        name: "sampling",
        values: "1 to 65536",
        default: "256",
        meaning: "Samples 1 in N loss-free connections \
                  [until they close](../reference/statistics.md#sampling); 1: all",
        accepted: &["1", "65536"],
        refused: &["0", "65537", "\"1\""],
    },
    Key {
        name: "rtt_sampling",
        values: "`\"end\"`, `\"off\"` or a duration, 1ms to 24h",
        default: "\"end\"",
        meaning: "When the smoothed RTT of a sampled connection is recorded: when it ends, also at \
                  this interval, or never",
        accepted: &["\"off\"", "\"1ms\"", "\"24h\""],
        refused: &["\"999us\"", "\"25h\"", "1"],
    },
];

const POLICY: &[Key] = &[
    Key {
        name: "cidrs",
        values: "list of CIDRs",
        default: "[]",
        meaning: "The prefixes of the policy's peers. Other files may add prefixes",
        accepted: &["[\"10.0.0.0/8\", \"fd00::/16\", \"10.1.2.3\"]"],
        refused: &["\"10.0.0.0/8\"", "[\"10.1.2.3/8\"]", "[\"10.0.0.0/33\"]"],
    },
    Key {
        name: "initial_rto",
        values: "duration, above 0 and below 120s; `\"auto\"` or [a table](#values-that-are-learnt)",
        default: "",
        meaning: "Timeout of the first SYN. `\"auto\"`: learnt from the policy's connections",
        accepted: &[
            "\"1us\"",
            "\"119.999s\"",
            "\"auto\"",
            "{ auto = true, min = \"1us\", max = \"1us\" }",
            "{ auto = true, min = \"1s\", max = \"1s\" }",
            "{ auto = true, spurious = \"0.01%\", memory = \"1h\" }",
            "{ auto = true, spurious = \"5%\", memory = \"30days\" }",
        ],
        refused: &[
            "\"0s\"",
            "\"120s\"",
            "100",
            "\"100\"",
            "true",
            "{}",
            "{ auto = false }",
            "{ auto = true, mni = \"20ms\" }",
            "{ auto = true, min = \"0s\" }",
            "{ auto = true, max = \"1001ms\" }",
            "{ auto = true, min = \"21ms\", max = \"20ms\" }",
            "{ auto = true, spurious = \"0.009%\" }",
            "{ auto = true, spurious = \"5.1%\" }",
            "{ auto = true, memory = \"59m\" }",
            "{ auto = true, memory = \"31days\" }",
        ],
    },
    Key {
        name: "syn_ack_rto",
        values: "`\"auto\"`, `\"keep\"` or a duration, above 0 and below 120s",
        default: "\"auto\"",
        meaning: "",
        accepted: &["\"keep\"", "\"1us\"", "\"119.999s\""],
        refused: &["\"0s\"", "\"120s\"", "\"off\""],
    },
    Key {
        name: "rto_min",
        values: "duration, 2 jiffies to 200ms; `\"auto\"` or [a table](#values-that-are-learnt)",
        default: "",
        meaning: "Lower bound of the RTO of an established connection. `\"auto\"`: learnt from the policy's control arm",
        accepted: &[
            "\"4.001ms\"",
            "\"200ms\"",
            "\"auto\"",
            "{ auto = true, peer_delack = \"192ms\" }",
        ],
        refused: &[
            "\"4ms\"",
            "\"201ms\"",
            "{ auto = true, peer_delack = \"0s\" }",
            "{ auto = true, peer_delack = \"193ms\" }",
            "{ auto = true, min = \"5ms\" }",
        ],
    },
    Key {
        name: "rto_restart",
        values: "boolean; `true` needs an `rto_min` that is a duration",
        default: "false",
        meaning: "",
        accepted: &["true"],
        refused: &["\"on\""],
    },
    Key {
        name: "delack_max",
        values: "duration, 2 jiffies to 200ms, below `rto_min`",
        default: "",
        meaning: "",
        accepted: &["\"4.001ms\"", "\"96ms\""],
        refused: &["\"4ms\"", "\"100ms\"", "\"201ms\""],
    },
    Key {
        name: "thin_linear",
        values: "boolean",
        default: "",
        meaning: "",
        accepted: &["true", "false"],
        refused: &["1"],
    },
    Key {
        name: "linear_retries",
        values: "1 to 6; needs `thin_linear = true`",
        default: "",
        meaning: "",
        accepted: &["1", "6"],
        refused: &["0", "7"],
    },
    Key {
        name: "rto_max",
        values: "duration, 1s to 120s, not below `initial_rto`, `syn_ack_rto` or `rto_min`",
        default: "",
        meaning: "",
        accepted: &["\"1s\"", "\"120s\""],
        refused: &["\"999ms\"", "\"121s\"", "\"1000.5ms\""],
    },
    Key {
        name: "user_timeout",
        values: "duration, 1ms to 24 days",
        default: "",
        meaning: "",
        accepted: &["\"1ms\"", "\"576h\""],
        refused: &["\"0s\"", "\"1.5ms\"", "\"600h\""],
    },
    Key {
        name: "syn_retries",
        values: "`\"auto\"`, `\"keep\"` or 1 to 127",
        default: "\"auto\"",
        meaning: "",
        accepted: &["\"keep\"", "1", "127"],
        refused: &["0", "128", "\"off\""],
    },
    Key {
        name: "mptcp",
        values: "`\"keep\"` or `\"apply\"`",
        default: "\"keep\"",
        meaning: "",
        accepted: &["\"apply\""],
        refused: &["true"],
    },
    Key {
        name: "holdout",
        values: "share, above 0% and up to 50%; at least 2% with `rto_min = \"auto\"`",
        default: "",
        meaning: "",
        accepted: &["\"0.5%\"", "\"50%\""],
        refused: &["\"0%\"", "\"50.1%\"", "5", "0.05", "\"5\""],
    },
    Key {
        name: "guard",
        values: "`\"warn\"`, `\"on\"` or `\"off\"`",
        default: "\"warn\"",
        meaning: "Reaction to spurious retransmissions of SYNs and SYN-ACKs. `\"warn\"` reports \
                  them; `\"on\"` also lets [brakes](#values-that-are-learnt) give new connections \
                  the kernel's own timer; `\"off\"` does nothing (before Linux 6.15 it also \
                  disables the [fuse for \
                  outages](../reference/kernel.md#connect-through-an-outage)). `\"on\"` is the \
                  default if a value is learnt",
        accepted: &["\"on\"", "\"off\""],
        refused: &["true", "\"auto\"", "{}"],
    },
    Key {
        name: "mode",
        values: "`\"apply\"`; also `\"advise\"` if a value is learnt",
        default: "\"apply\"",
        meaning: "Whether learnt values are applied, or only computed and shown",
        accepted: &["\"apply\""],
        refused: &["\"advise\"", "true"],
    },
    Key {
        name: "force",
        values: "boolean",
        default: "false",
        meaning: "",
        accepted: &["true"],
        refused: &["\"true\""],
    },
];

fn read(text: String) -> Result<Config, String> {
    Config::from_text(Path::new("config.toml"), text, &HOST).map_err(|e| e.to_string())
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
        let _written = writeln!(text, "{name} = {value}");
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
fn the_tables_have_the_keys_of_the_parser() {
    for (section, keys) in [("agent", AGENT), ("policy.p", POLICY)] {
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
fn defaults_are_those_of_the_parser() {
    for Key { name, default, .. } in AGENT.iter().filter(|key| !key.default.is_empty()) {
        let config = read(format!("[agent]\n{name} = {default}\n")).unwrap();
        assert_eq!(config.agent, AgentConfig::default(), "{name}");
    }
    let without = &read(policy("initial_rto", "\"100ms\""))
        .unwrap()
        .set
        .policies;
    for Key { name, default, .. } in POLICY.iter().filter(|key| !key.default.is_empty()) {
        let set = read(policy(name, default)).unwrap().set;
        let (with, without) = (set.policies.values().next(), without.values().next());
        let (mut with, mut without) = (
            with.unwrap().settings.clone(),
            without.unwrap().settings.clone(),
        );
        // Unset and off are shown differently, but are equal in the kernel.
        (with.rto_restart, without.rto_restart) = (with.rto_restart.filter(|on| *on), None);
        (with.guard, without.guard) = (Some(with.guard()), Some(without.guard()));
        assert_eq!(with, without, "{name}");
    }
}

#[test]
fn values_are_taken_up_to_their_bounds() {
    let agent = AGENT.iter().map(|key| (key, false));
    for (key, is_policy) in agent.chain(POLICY.iter().map(|key| (key, true))) {
        let text = |value: &str| match is_policy {
            true => policy(key.name, value),
            false => format!("[agent]\n{} = {value}\n", key.name),
        };
        for value in key.accepted {
            let accepted = read(text(value));
            assert!(accepted.is_ok(), "{} = {value}: {accepted:?}", key.name);
        }
        for value in key.refused {
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

/// The help of `rto-agent add`, by setting.
fn help() -> BTreeMap<String, String> {
    let cli = Cli::command();
    let add = cli.find_subcommand("add").unwrap();
    let help = add.get_arguments().map(|arg| {
        let help = arg.get_long_help().or(arg.get_help());
        let mut text = help.map(ToString::to_string).unwrap_or_default();
        text = text.replace("\n\n", ". ");
        for Key { name, .. } in POLICY {
            text = text.replace(
                &format!("--{}", name.replace('_', "-")),
                &format!("`{name}`"),
            );
        }
        (arg.get_id().to_string(), text.replace('\n', " "))
    });
    help.collect()
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

fn table(keys: &[Key]) -> String {
    let help = help();
    let mut text = "| key | values | default | meaning | kernel features used (since) |\n|---|---|---|---|---|\n".to_owned();
    for key in keys {
        let default = match (key.name, key.default) {
            ("holdout", "") => "none; `\"5%\"` with `rto_min = \"auto\"`".to_owned(),
            ("max_entries", "") => "4194304; 16384 before Linux 5.11".to_owned(),
            (_, "") => "the kernel's own".to_owned(),
            (_, default) => format!("`{default}`"),
        };
        let meaning = match key.meaning {
            "" => &help[key.name],
            meaning => meaning,
        };
        let _written = writeln!(
            text,
            "| `{}` | {} | {default} | {meaning} | {} |",
            key.name,
            key.values,
            needs(key.name)
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
fn the_page_has_the_tables() {
    let tables = [("agent", AGENT), ("policy", POLICY)];
    let tables = tables.map(|(name, keys)| (name, table(keys)));
    assert_tables(PAGE, "keys", "reference::configuration", tables);
}
