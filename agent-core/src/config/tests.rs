use std::{fs, time::Duration};

use proptest::prelude::*;

use super::{
    files::POLICIES_DIR,
    source::{MOST_ERRORS, Source},
    *,
};
use crate::testing::HOST;

/// Loads files given as (name, text); errors are shown without the directory.
fn load(files: &[(&str, &str)]) -> Result<Config, String> {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(POLICIES_DIR)).unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let prefix = format!("{}/", dir.path().display());
    Config::load(&dir.path().join("config.toml"), &HOST)
        .map_err(|e| e.to_string().replace(&prefix, ""))
}

fn refusal(text: &str) -> String {
    load(&[("config.toml", text)]).unwrap_err()
}

const GOOD: &str = r#"
[agent]
pin_dir = "/sys/fs/bpf/x"
on_exit = "keep"
max_entries = 100

[policy.same-zone]
cidrs = ["10.128.0.0/20", "fd20:0:0:1::/64"]
initial_rto = "100ms"
rto_min = "50ms"
syn_retries = "auto"
"#;

#[test]
fn valid_file_is_loaded() {
    let config = load(&[("config.toml", GOOD)]).unwrap();
    assert_eq!(config.agent.on_exit, OnExit::Keep);
    assert_eq!(config.agent.max_entries, Some(100));
    let policy = &config.set.policies[&"same-zone".parse().unwrap()];
    assert_eq!(
        policy.settings.fixed_initial_rto(),
        Some(Duration::from_millis(100))
    );
    let cidr = "fd20:0:0:1::/64".parse().unwrap();
    let entry = config.set.entries.get(&cidr).unwrap();
    assert_eq!(entry.location().unwrap().line, 8);
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}

#[test]
fn defaults_apply_to_policies_without_value() {
    let main = "[defaults]\ninitial_rto = \"150ms\"\nforce = true\n\
                [policy.own]\ninitial_rto = \"400ms\"\nforce = false\ndescription = \"far away\"\n\
                cidrs = [\"10.1.0.0/16\"]\n";
    let more = "[policy.bare]\ncidrs = [\"8.0.0.0/6\"]\n";
    let both = load(&[
        ("config.toml", main),
        ("policies.d/a.toml", more),
        (
            "policies.d/b.toml",
            "[policy.bare]\ncidrs = [\"10.2.0.0/16\"]\n",
        ),
    ]);
    let set = both.unwrap().set;
    let of = |name: &str| {
        let policy = &set.policies[&name.parse().unwrap()];
        let settings = &policy.settings;
        (
            settings.fixed_initial_rto(),
            settings.force,
            policy.description.as_deref(),
        )
    };
    assert_eq!(
        of("own"),
        (Some(Duration::from_millis(400)), false, Some("far away"))
    );
    assert_eq!(of("bare"), (Some(Duration::from_millis(150)), true, None));
    assert_eq!(set.entries.len(), 3);
    // A default is checked with each policy that uses it, and `[defaults]` are in the main file
    // only.
    let refused = refusal(
        &main
            .replace("force = true\n", "force = true\nrto_max = \"1s\"\n")
            .replace("400ms", "2s"),
    );
    assert!(refused.contains("rto_max"), "{refused}");
    let elsewhere = load(&[
        ("config.toml", main),
        ("policies.d/a.toml", &format!("[defaults]\n{more}")),
    ]);
    assert!(
        elsewhere
            .unwrap_err()
            .contains("only allowed in the main configuration file")
    );
    let long = format!("description = \"{}\"", "x".repeat(201));
    assert!(
        refusal(&main.replace("description = \"far away\"", &long))
            .contains("at most 200 characters")
    );
}

#[test]
fn settings_need_statistics() {
    let text = |statistics: bool, line: &str| {
        format!("[agent]\nstatistics = {statistics}\n\n[policy.near]\n{line}\n")
    };
    for line in [
        "initial_rto = { auto = true, min = \"50ms\" }",
        "initial_rto = \"100ms\"\nguard = \"on\"",
    ] {
        assert!(load(&[("config.toml", &text(true, line))]).is_ok());
        let message = refusal(&text(false, line));
        let place = format!("config.toml:{}:", 4 + line.lines().count());
        assert!(message.starts_with(&place), "{message}");
        assert!(message.contains("set statistics = true"), "{message}");
    }
    let holdout = "initial_rto = \"100ms\"\nholdout = \"5%\"";
    let warnings = |statistics| {
        let config = load(&[("config.toml", &text(statistics, holdout))]).unwrap();
        config.warnings.join("\n")
    };
    assert_eq!(warnings(true), "");
    let warning = warnings(false);
    let expected = "config.toml:4: policy near: holdout = 5% has no use while statistics = false";
    assert!(warning.contains(expected), "{warning}");
}

#[test]
fn policies_beyond_the_limit_are_refused() {
    let text = |count: u32| {
        let policies = (0..count).map(|n| format!("[policy.p{n}]\ninitial_rto = \"100ms\"\n"));
        policies.collect::<String>()
    };
    let config = load(&[("config.toml", &text(1024))]).unwrap();
    assert_eq!(config.set.policies.len(), 1024);
    let message = refusal(&text(1025));
    assert!(
        message.contains("1025 policies: at most 1024 are possible"),
        "{message}"
    );
}

#[test]
fn shipped_example_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/config.toml");
    Config::load(&path, &HOST).unwrap();
}

#[test]
fn policies_d_adds_cidrs() {
    let more = "[policy.same-zone]\ncidrs = [\"10.9.0.0/16\"]\n";
    let config = load(&[
        ("config.toml", GOOD),
        ("policies.d/50-cli.toml", more),
        ("policies.d/.hidden.toml", "nonsense"),
        ("policies.d/old.toml~", "nonsense"),
    ])
    .unwrap();
    assert_eq!(config.set.entries.len(), 3);
    assert_eq!(config.files.len(), 2);
}

#[test]
fn errors_name_line_and_fix() {
    const CASES: &str = r#"
[policy.near]; initial_rto = "100ms"; inital_rto = "5ms"
[policies.near]
[agent]; pindir = "/x"
[policy.near]; holdout = "5%"
[policy.near]; initial_rto = "100ms"; holdout = 0.05
[policy.near]; rto_min = "auto"
[policy.near]; rto_min = { auto = true, peer_delack = "5ms" }
[policy.near]; initial_rto = "100ms"; cidrs = ["10.1.2.3/24"]
[policy.near]; initial_rto = "100ms"; cidrs = ["10.1.2/24"]
[policy.near]; initial_rto = 100
[policy.near]; initial_rto = "automatic"
[policy.near]; initial_rto = { auto = true, mni = "20ms" }
[policy.near]; cidrs = ["0.0.0.0/0"]; initial_rto = "auto"
[policy.near]; rto_min = "50ms"; delack_max = "60ms"
[policy.near]; syn_retries = 0
[policy.near]; initial_rto = "100ms"; cidrs = ["0.0.0.0/0", "fc00::/7"]
[policy.near]; force = true; cidrs = ["10.0.0.0/16"]
[policy.near]; cidrs = ["10.0.0.0/16"]
[policy.near]; thin_linear = "yes"
[policy."a b"]; initial_rto = "100ms"
[agent]; metrics = "localhost"
[policy.near; cidrs = [
[policy.near]; rto_min = "50ms"; rto_min = "60ms"
[policy.near]; rto_min = "9ms"; [policy.far]; rto_min = "9ms"; [policy.near]; rto_min = "9ms"
[agent]; sampling = 1; [ agent ]; sampling = 1
[policy.a]; rto_min = "9ms"; cidrs = ["10.0.0.0/16"]; [policy.b]; rto_min = "9ms"; cidrs = ["10.0.0.0/16"]
"#;
    let cases = CASES.trim().lines();
    let all = cases.map(|text| format!("## {text}\n{}\n", refusal(&text.replace("; ", "\n"))));
    insta::assert_snapshot!(all.collect::<Vec<_>>().join("\n"));
}

/// AWS's list repeats 4,278 CIDRs.
#[test]
fn cidr_twice_in_one_policy_is_one_warning() {
    let text = |cidrs: &str| {
        format!(
            "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\n{cidrs}]\n[policy.far]\nrto_min = \"50ms\"\n"
        )
    };
    let (a, b) = ("\"10.1.0.0/16\",\n", "\"10.2.0.0/16\",\n");
    let more = "[policy.near]\ncidrs = [\"10.2.0.0/16\"]\n";
    let loaded = |main: String| {
        let files = [("config.toml", &*main), ("policies.d/a.toml", more)];
        let config = load(&files).unwrap();
        assert_eq!(config.set.entries.len(), 2);
        let warnings = config.warnings.join("\n");
        // The directory differs each time.
        warnings
            .split('/')
            .filter(|part| !part.contains("tmp"))
            .collect::<Vec<_>>()
            .join("/")
    };
    let one = loaded(text(&format!("{a}{b}")));
    assert!(
        one.contains("a.toml:2: policy near: 10.2.0.0/16 is already listed at"),
        "{one}"
    );
    assert!(one.ends_with("config.toml:5"), "{one}");
    let many = loaded(text(&format!("{a}{b}{a}{b}{a}")));
    assert_eq!(many.lines().count(), 1, "{many}");
    assert!(
        many.contains("config.toml:6: policy near: 10.1.0.0/16 is already listed at"),
        "{many}"
    );
    assert!(
        many.contains("config.toml:4, and 3 more CIDRs are listed twice"),
        "{many}"
    );
    let both = text(&format!("{a}{a}")) + "cidrs = [\"10.1.0.0/16\"]\n";
    let message = refusal(&both);
    assert!(
        message.starts_with(
            "config.toml:9:10: 10.1.0.0/16 is already listed at config.toml:4, in policy near"
        ),
        "{message}"
    );
    assert!(!message.contains("more"), "{message}");
}

#[test]
fn errors_of_all_files_are_reported_together() {
    let errors = load(&[
        (
            "config.toml",
            "[policy.near]\ninitial_rto = \"1\"\ncidrs = [\"10.1.2.3/24\"]\n",
        ),
        (
            "policies.d/a.toml",
            "[agent]\n[policy.near]\nrto_min = \"50ms\"\n",
        ),
        (
            "policies.d/b.toml",
            "[policy.far]\ncidrs = [\"10.0.0.0/16\"]\n",
        ),
    ])
    .unwrap_err();
    insta::assert_snapshot!(errors);
}

#[test]
fn secret_linked_into_policies_d_is_not_shown() {
    for secret in [
        "-----BEGIN PRIVATE KEY-----\nhunter2\n",
        "token = \"hunter2\"\n",
        "hunter2 = 1\n",
        "[agent]\ngroup = \"hunter2\"\n",
        "[hunter2]\ncidrs = []\n",
    ] {
        let message = load(&[("config.toml", GOOD), ("policies.d/a.toml", secret)]).unwrap_err();
        assert!(message.starts_with("policies.d/a.toml:1:"), "{message}");
        assert!(
            message.contains("not a configuration of rto-agent"),
            "{message}"
        );
        assert!(
            !message.contains("hunter2") && !message.contains("KEY"),
            "{message}"
        );
    }
    // Files with policies are cited, and the main file, whose path root chooses.
    let typo = "[policy.near]\ninital_rto = \"5ms\"\n";
    let marked = format!("\u{feff}{typo}");
    for files in [
        &[("config.toml", GOOD), ("policies.d/a.toml", typo)][..],
        &[("config.toml", GOOD), ("policies.d/a.toml", &*marked)],
        &[("config.toml", "[polcy.near]\ninital_rto = \"5ms\"\n")],
    ] {
        let message = load(files).unwrap_err();
        assert!(
            message.contains("did you mean") && message.contains(" | "),
            "{message}"
        );
    }
}

const LIST_POLICY: &str = "[policy.far]\ninitial_rto = \"200ms\"\ncidrs_file = \"aws.txt\"\n";

#[test]
fn list_file_gives_entries_with_their_lines() {
    let more = "[policy.far]\ncidrs = [\"10.3.0.0/16\"]\ncidrs_file = \"../more.txt\"\n";
    let config = load(&[
        ("config.toml", LIST_POLICY),
        (
            "aws.txt",
            "\u{feff}# AWS\r\n10.1.0.0/16\r\n\n  fd00::/16 # two\n10.2.3.4",
        ),
        ("policies.d/far.toml", more),
        ("more.txt", "10.4.0.0/16\n"),
    ])
    .unwrap();
    let found: Vec<String> = config
        .set
        .entries
        .iter()
        .map(|(cidr, entry)| {
            let place = entry.location().unwrap();
            let file = place.path.file_name().unwrap().display();
            format!("{cidr} {file}:{}", place.line)
        })
        .collect();
    assert_eq!(
        found,
        [
            "10.1.0.0/16 aws.txt:2",
            "10.2.3.4/32 aws.txt:5",
            "10.3.0.0/16 far.toml:2",
            "10.4.0.0/16 more.txt:1",
            "fd00::/16 aws.txt:4",
        ]
    );
    // The watcher follows lists.
    assert!(config.files.iter().any(|file| file.ends_with("aws.txt")));
}

#[test]
fn list_file_errors_name_file_and_line() {
    let errors = load(&[
        ("config.toml", LIST_POLICY),
        (
            "aws.txt",
            "# AWS\n10.1.0.0/16\n 10.1.2.3/16 # host\n10.256.0.0/16\n",
        ),
        (
            "policies.d/near.toml",
            "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\"10.1.0.0/16\"]\n",
        ),
    ])
    .unwrap_err();
    insta::assert_snapshot!(errors);
    let wide = load(&[
        ("config.toml", &LIST_POLICY.replace("200ms", "5ms")),
        ("aws.txt", "10.1.0.0/16\n 10.0.0.0/7 # wide\n"),
    ])
    .unwrap_err();
    assert!(wide.starts_with("aws.txt:2:2: "), "{wide}");
    let conflict = load(&[
        ("config.toml", LIST_POLICY),
        ("aws.txt", "10.1.0.0/16 # near\n"),
        (
            "policies.d/near.toml",
            "[policy.near]\ninitial_rto = \"100ms\"\ncidrs_file = \"../near.txt\"\n",
        ),
        ("near.txt", "# near\n\t10.1.0.0/16 # near\n"),
    ])
    .unwrap_err();
    assert!(
        conflict.contains("near.txt:2:2: 10.1.0.0/16 is already listed at"),
        "{conflict}"
    );
    assert!(
        conflict.contains("^^^^^^^^^^^\n") || conflict.ends_with("^^^^^^^^^^^"),
        "{conflict}"
    );
}

#[test]
fn list_file_of_json_is_refused_with_a_hint() {
    for list in [
        "{\n  \"syncToken\": \"1\",\n  \"prefixes\": [{\"ip_prefix\": \"10.1.0.0/16\"}]\n}\n",
        "[\"10.1.0.0/16\"]\n",
        "10.1.0.0/16\n\"syncToken\": \"1\",\n}\n",
    ] {
        let error = load(&[("config.toml", LIST_POLICY), ("aws.txt", list)]).unwrap_err();
        assert!(
            error.starts_with("aws.txt:") && error.contains("jq -r"),
            "{error}"
        );
        assert_eq!(error.matches("jq -r").count(), 1, "{error}");
    }
}

#[test]
fn list_file_without_cidr_is_refused_and_not_shown() {
    for list in [
        "",
        "# none\n",
        "root:hunter2:1:2\n",
        "{\"key\": \"hunter2\"}\n",
    ] {
        let error = load(&[("config.toml", LIST_POLICY), ("aws.txt", list)]).unwrap_err();
        assert!(error.starts_with("aws.txt: "), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[test]
fn unreadable_list_file_is_error_at_cidrs_file() {
    let missing = refusal(LIST_POLICY);
    assert!(
        missing.starts_with("config.toml:3:14: aws.txt: No such file"),
        "{missing}"
    );
    for name in ["\"other.toml\"", "\"\"", "1"] {
        let error = refusal(&LIST_POLICY.replace("\"aws.txt\"", name));
        assert!(error.starts_with("config.toml:3:14: expected"), "{error}");
    }
}

#[test]
fn list_files_are_kept_with_their_texts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    fs::write(&path, LIST_POLICY).unwrap();
    fs::write(dir.path().join("aws.txt"), "10.1.0.0/16\n").unwrap();
    let first = Files::read(&path);
    assert_eq!(first.cidrs(), [2, 2]);
    let texts = first.texts();
    let kept = Files::of_texts(texts.map(|(p, text)| (p.into(), text.into())).collect());
    assert_eq!(kept.fingerprint(), first.fingerprint());
    assert_eq!(Config::of(&kept, &HOST).unwrap().set.entries.len(), 1);
    fs::write(dir.path().join("aws.txt"), "10.2.0.0/16\n").unwrap();
    assert_ne!(fingerprint(&path), first.fingerprint());
}

#[test]
fn missing_file_names_fix() {
    let error = Config::load(Path::new("/nonexistent/config.toml"), &HOST)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("/nonexistent/config.toml") && error.contains("--config"),
        "{error}"
    );
}

fn fingerprint(path: &Path) -> u64 {
    Files::read(path).fingerprint()
}

#[test]
fn fingerprint_changes_with_each_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    let missing = fingerprint(&path);
    fs::write(&path, GOOD).unwrap();
    let first = fingerprint(&path);
    assert_ne!(missing, first);
    let policies = dir.path().join(POLICIES_DIR);
    fs::create_dir(&policies).unwrap();
    assert_eq!(first, fingerprint(&path));
    fs::write(policies.join("a.toml"), "").unwrap();
    assert_ne!(first, fingerprint(&path));
    // A directory that cannot be listed.
    fs::remove_dir_all(&policies).unwrap();
    fs::write(&policies, "").unwrap();
    assert_ne!(first, fingerprint(&path));
    assert!(Config::load(&path, &HOST).is_err());
}

#[test]
fn invalid_paths_are_refused() {
    let long = "x".repeat(MAX_SOCKET_PATH);
    let long = [format!("socket = \"/{long}\"")];
    let keys = [
        "socket = \"",
        "state_dir = \"",
        "pin_dir = \"",
        "cgroup = \"",
    ];
    let nul = keys.map(|key| format!("{key}/a\\u0000b\""));
    let long = long.into_iter().map(|line| (line, "at most 107 bytes"));
    for (line, message) in long.chain(nul.into_iter().map(|line| (line, "must not contain NUL"))) {
        let refused = refusal(&format!("[agent]\n{line}\n"));
        assert!(refused.contains(message), "{line}: {refused}");
        assert!(refused.starts_with("config.toml:2:"), "{refused}");
    }
    let longest = "x".repeat(MAX_SOCKET_PATH - 1);
    let longest = format!("[agent]\nsocket = \"/{longest}\"\n");
    load(&[("config.toml", &longest)]).unwrap();
}

#[test]
fn file_names_are_escaped_in_errors() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

    let dir = tempfile::tempdir().unwrap();
    let etc = dir.path().join(OsStr::from_bytes(b"\xff\x1b[2J"));
    fs::create_dir_all(etc.join(POLICIES_DIR)).unwrap();
    let (path, planted) = (etc.join("config.toml"), etc.join(POLICIES_DIR));
    fs::write(&path, GOOD).unwrap();
    let more = "[policy.same-zone]\ncidrs = [\"10.9.0.0/16\"]\n";
    fs::write(planted.join(OsStr::from_bytes(b"\xfe.toml")), more).unwrap();
    let config = Config::load(&path, &HOST).unwrap();
    assert_eq!(config.set.entries.len(), 3);
    // Cited text cannot act on a terminal either.
    let bad = "\"\\u001b[2J\" = 1 # \u{1b}[2J\n";
    fs::write(planted.join(OsStr::from_bytes(b"\xfe.toml")), bad).unwrap();
    let errors = Config::load(&path, &HOST).unwrap_err();
    let text = errors.to_string();
    assert!(
        text.contains("\u{fffd}\\u{1b}[2J/policies.d/\u{fffd}.toml:1:"),
        "{text}"
    );
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let json = serde_json::to_string(&errors).unwrap();
    assert!(!json.contains("\\u001b"), "{json}");
}

proptest! {
    #[test]
    fn arbitrary_toml_never_panics(text in "(\\[(agent|policy\\.[a-z]{0,3})\\]\n|[a-z_]{1,12} = (\"[^\"]{0,12}\"|[0-9]{1,9}|\\[[^\\]]{0,20}\\]|true)\n|.{0,20}\n){0,12}") {
        let source = Source::new(Path::new("x"), text);
        let (_, errors) = parse::parse(&source);
        for error in errors {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn errors_of_one_line_use_bounded_memory() {
    let cidrs = "\"10.0.0.1/8\", ".repeat(100_000);
    let text = format!("[policy.a]\nrto_min = \"20ms\"\ncidrs = [{cidrs}]\n");
    let began = std::time::Instant::now();
    let errors = Config::from_text(Path::new("x"), text, &HOST).unwrap_err();
    assert_eq!(errors.0.len(), MOST_ERRORS);
    let kept: usize = errors.0.iter().map(|e| format!("{e:?}").len()).sum();
    assert!(kept < 1 << 18, "{kept}");
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[test]
fn only_files_are_read_from_policies_d() {
    let dir = tempfile::tempdir().unwrap();
    let policies = dir.path().join(POLICIES_DIR);
    fs::create_dir(&policies).unwrap();
    fs::write(dir.path().join("config.toml"), GOOD).unwrap();
    // Opening it would wait for a writer.
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
    nix::unistd::mkfifo(&policies.join("pipe.toml"), mode).unwrap();
    let refused = Config::load(&dir.path().join("config.toml"), &HOST).unwrap_err();
    assert!(refused.to_string().contains("pipe.toml: this is a FIFO"));
    fs::remove_file(policies.join("pipe.toml")).unwrap();
    // /dev/zero has no end.
    std::os::unix::fs::symlink("/dev/zero", policies.join("zero.toml")).unwrap();
    let refused = Config::load(&dir.path().join("config.toml"), &HOST).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("zero.toml: this is a character device")
    );
}

#[test]
fn equal_agent_paths_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("a")).unwrap();
    std::os::unix::fs::symlink("a", dir.join("link")).unwrap();
    let refused = |second: &str, path: &Path| {
        let state = dir.join("a");
        refusal(&format!(
            "[agent]\nstate_dir = {state:?}\n{second} = {path:?}\n"
        ))
    };
    for spelt in ["a", "a/", "link", "link/", "b/../a", "./a", "a/."] {
        let error = refused("persistent_dir", &dir.join(spelt));
        assert!(
            error.contains("config.toml:3:18: persistent_dir is the same as state_dir"),
            "{spelt}: {error}"
        );
    }
    for (second, path, why) in [
        ("pin_dir", "a", "state_dir is the same as pin_dir"),
        ("socket", "link", "socket is the same as state_dir"),
        ("cgroup", "a", "state_dir is the same as cgroup"),
        (
            "socket",
            "a/lock",
            "socket is a file that the daemon may keep",
        ),
        (
            "socket",
            "link/manual.json",
            "socket is a file that the daemon may keep",
        ),
    ] {
        let error = refused(second, &dir.join(path));
        // A temporary directory has a dot, which a BPF file system does not allow.
        assert!(error.contains(why) || second == "pin_dir", "{error}");
    }
    let error = refusal("[agent]\npersistent_dir = \"/run/../run/rto-agent/\"\n");
    assert!(
        error.contains("config.toml:2:18: persistent_dir is the same"),
        "{error}"
    );
    for other in [
        "socket = \"/run/rto-agent/s.sock\"",
        "state_dir = \"/run/rto-agent/state\"",
    ] {
        load(&[("config.toml", &format!("[agent]\n{other}\n"))]).unwrap();
    }
}

#[test]
fn value_without_quotes_names_what_to_write() {
    for (line, expected) in [
        (
            "cidrs = [10.1.0.0/16]",
            "a CIDR is written in quotes: \"10.1.0.0/16\"",
        ),
        (
            "cidrs = [\"10.2.0.0/16\", fd00::/64]",
            "a CIDR is written in quotes: \"fd00::/64\"",
        ),
        (
            "cidrs = [10.1.0.5]",
            "a CIDR is written in quotes: \"10.1.0.5\"",
        ),
        (
            "thin_linear = yes",
            "thin_linear takes true or false, not yes",
        ),
        (
            "thin_linear = True",
            "thin_linear takes true or false, not True",
        ),
        (
            "thin_linear = \"yes\"",
            "thin_linear takes true or false, not a string",
        ),
        (
            "initial_rto = 100ms",
            "this value is written in quotes: \"100ms\"",
        ),
        ("holdout = 5%", "this value is written in quotes: \"5%\""),
    ] {
        let error = refusal(&format!("[policy.near]\n{line}\n"));
        assert!(error.contains(expected), "{line}: {error}");
    }
    let error = refusal("[agent]\nattach = no\n");
    assert!(
        error.contains("attach takes true or false, not no"),
        "{error}"
    );
    // Other errors are the parser's own.
    assert!(refusal("[policy.near\n").contains("unclosed table"));
}
