//! The table of `docs/operate/troubleshooting.md`: numbers come from the constants, and the tests it names
//! exist.
//! `UPDATE=1 cargo test -p rto-agent --lib reference::limits` rewrites the page.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use rto_agent_common::{MAX_POLICIES, POLICY_NAME_LEN};
use rto_agent_core::{
    config::{self, MAX_SOCKET_PATH, STALL_LIMIT},
    policy::{MAX_ENTRIES_LIMIT, units::format_duration},
    wire::{bounded::MAX_CIDRS, ttl::MAX_TTL},
};
use rto_agent_daemon::{
    api::{MAX_BODY, server},
    lock,
    telemetry::http,
};
use rto_agent_kernel::kernel::descriptors;

use super::configuration::assert_tables;
use crate::client;

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/operate/troubleshooting.md"
);

struct Limit {
    what: &'static str,
    value: String,
    /// What happens at the limit.
    then: &'static str,
    /// The test that shows it: by its path in its crate, else `integration::group::name`.
    test: &'static str,
}

fn limit(what: &'static str, value: String, then: &'static str, test: &'static str) -> Limit {
    Limit {
        what,
        value,
        then,
        test,
    }
}

/// 4194304 as 4,194,304.
fn number(number: impl TryInto<u64>) -> String {
    let digits = number.try_into().unwrap_or(u64::MAX).to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn bytes(count: u64) -> String {
    match count {
        many if many.is_multiple_of(1 << 20) => format!("{} MiB", many >> 20),
        some if some.is_multiple_of(1 << 10) => format!("{} KiB", some >> 10),
        few => format!("{} bytes", number(few)),
    }
}

fn time(duration: Duration) -> String {
    const DAY: u64 = 24 * 3600;
    match duration.as_secs() {
        seconds if seconds > 0 && seconds.is_multiple_of(DAY) => format!("{} days", seconds / DAY),
        _ => format_duration(duration),
    }
}

fn configuration() -> Vec<Limit> {
    const STAYS: &str = "rejected; the last good configuration stays active";
    vec![
        limit(
            "size of a file",
            bytes(config::MAX_FILE),
            STAYS,
            "config::regular_file::tests::file_is_read_up_to_its_limit",
        ),
        limit(
            "kind of a file",
            "regular files only".to_owned(),
            "FIFOs, devices and sockets are refused without being opened; the last good \
             configuration stays active",
            "integration::adversary::non_file_configuration_is_refused",
        ),
        limit(
            "time that the daemon waits for an answer of the file system",
            time(STALL_LIMIT),
            "the change is rejected; the last good configuration stays active; the files are read \
             again once the file system answers",
            "engine::actor::tests::reload_of_hanging_files_fails_and_keeps_last_good",
        ),
        limit(
            "entries",
            number(MAX_ENTRIES_LIMIT),
            STAYS,
            "reference::limits::entries_beyond_limit_are_refused",
        ),
        limit(
            "policies",
            number(MAX_POLICIES),
            STAYS,
            "reference::limits::entries_beyond_limit_are_refused",
        ),
        limit(
            "length of a policy name",
            bytes(POLICY_NAME_LEN as u64 - 1),
            STAYS,
            "reference::limits::policy_name_length_is_limited",
        ),
        limit(
            "path of a Unix socket",
            bytes(MAX_SOCKET_PATH as u64),
            STAYS,
            "config::tests::invalid_paths_are_refused",
        ),
        limit(
            "`--ttl`",
            time(MAX_TTL),
            "refused",
            "wire::ttl::tests::ttl_is_more_than_zero_and_at_most_a_year",
        ),
    ]
}

fn requests() -> Vec<Limit> {
    let (limits, strangers) = (server::LIMITS, http::LIMITS);
    vec![
        limit(
            "body of a request",
            bytes(MAX_BODY as u64),
            "status 413; not read if its declared length is too large",
            "api::server::tests::every_route_limits_its_body",
        ),
        limit(
            "CIDRs of a request",
            number(MAX_CIDRS),
            "422",
            "wire::bounded::tests::list_beyond_limit_is_refused",
        ),
        limit(
            "concurrent bodies larger than 64 KiB, separately for root and all others",
            number(server::LARGE_AT_ONCE),
            "further ones wait",
            "integration::faults::a_request_of_100_mb",
        ),
        limit(
            "headers of a request",
            "100 lines, about 400 KiB".to_owned(),
            "status 431, and the connection is closed (limits of hyper)",
            "integration::adversary::headers_have_a_limit",
        ),
        limit(
            "connections to the control socket",
            number(limits.connections),
            "further ones wait",
            "integration::faults::a_thousand_clients_at_once",
        ),
        limit(
            "of these, from users other than root",
            number(limits.connections - limits.for_root),
            "status 503, and a log line; root is still served",
            "integration::adversary::a_member_of_the_group_does_not_keep_root_out",
        ),
        limit(
            "time to send the head of a request",
            time(limits.head_timeout),
            "disconnected",
            "integration::faults::silent_clients_delay_no_other_client",
        ),
        limit(
            "duration of a connection",
            time(limits.lifetime),
            "disconnected; `watch` has no such limit",
            "api::connection::tests::connection_ends_after_its_lifetime_unless_lasting",
        ),
        limit(
            "concurrent `watch` requests, separately for root and all others",
            number(server::WATCHES_AT_ONCE),
            "422",
            "integration::faults::silent_clients_delay_no_other_client",
        ),
        limit(
            "concurrent `list` requests, separately for root and all others",
            number(server::LISTS_AT_ONCE),
            "further ones wait",
            "integration::scale::fifty_lists_at_once",
        ),
        limit(
            "time for a client to read a `list`",
            time(server::LIST_TIME),
            "disconnected, and a log line",
            "integration::scale::unread_list_is_given_up",
        ),
        limit(
            "time that the command line waits for an answer",
            time(client::TIMEOUT),
            "exit status 1; the change may still be applied",
            "",
        ),
        limit(
            "connections to the metrics endpoint",
            format!(
                "{}, {} of one address",
                strangers.connections, strangers.per_address
            ),
            "the oldest is closed",
            "integration::adversary::locks_and_ports_of_a_user_prevent_nothing",
        ),
        limit(
            "duration of such a connection",
            time(strangers.lifetime),
            "disconnected",
            "api::connection::tests::connection_ends_after_its_lifetime_unless_lasting",
        ),
        limit(
            "body of such a request",
            bytes(http::MAX_BODY as u64),
            "413",
            "",
        ),
        limit(
            "time that `/readyz` waits for the kernel's maps to be compared",
            time(http::VERIFY),
            "503",
            "",
        ),
    ]
}

/// A value of the unit.
fn of_unit(key: &str) -> String {
    let unit = include_str!("../../../systemd/rto-agent.service");
    let value = unit
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    value.expect("a line of the unit").to_owned()
}

fn host() -> Vec<Limit> {
    vec![
        limit(
            "open files of the daemon (RLIMIT_NOFILE)",
            number(descriptors::DAEMON),
            "with a lower limit the daemon does not start",
            "integration::adversary::too_few_descriptors_are_an_error",
        ),
        limit(
            "open files of another verb",
            number(descriptors::CLIENT),
            "with a lower limit the command fails",
            "integration::adversary::too_few_descriptors_are_an_error",
        ),
        limit(
            "memory (MemoryMax of the unit)",
            of_unit("MemoryMax"),
            "a start, reload or request that needs more is refused",
            "integration::faults::a_start_that_does_not_fit_is_refused",
        ),
        limit(
            "time that a start waits for the locks of another daemon",
            time(lock::TIMEOUT),
            "the daemon does not start, and names the process that holds the lock",
            "lock::tests::start_waits_for_lock_until_timeout",
        ),
    ]
}

fn sections() -> [(&'static str, Vec<Limit>); 3] {
    [
        ("configuration", configuration()),
        ("requests", requests()),
        ("host", host()),
    ]
}

fn table(limits: &[Limit]) -> String {
    let mut text = "| limit | value | at it | test |\n|---|---|---|---|\n".to_owned();
    for Limit {
        what,
        value,
        then,
        test,
    } in limits
    {
        let test = match test.strip_prefix("integration::") {
            Some(test) => format!("`{test}`"),
            None if test.is_empty() => String::new(),
            None => format!("`{test}` (unit)"),
        };
        let _ = writeln!(text, "| {what} | {value} | {then} | {test} |");
    }
    text
}

#[test]
fn limits_page_is_current() {
    let tables = sections().map(|(name, limits)| (name, table(&limits)));
    assert_tables(PAGE, "limits", "reference::limits", tables);
    // Numbers that the texts spell out.
    assert_eq!(server::LARGE, 64 << 10);
}

#[test]
fn tests_named_on_limits_page_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (_, limits) in sections() {
        for Limit { test, .. } in limits.iter().filter(|limit| !limit.test.is_empty()) {
            let (module, name) = test.rsplit_once("::").unwrap();
            let files: Vec<_> = match module.strip_prefix("integration::") {
                Some(group) => {
                    let dir = root.join("../tests/tests/integration");
                    let parts = fs::read_dir(dir.join(group)).into_iter().flatten();
                    let parts = parts.map(|entry| entry.unwrap().path());
                    parts.chain([dir.join(format!("{group}.rs"))]).collect()
                }
                None => {
                    let path = module.strip_suffix("::tests").unwrap_or(module);
                    let path = path.replace("::", "/");
                    let crates = ["agent", "agent-core", "agent-daemon"];
                    let of_crate = |krate| {
                        let path = root.join("..").join(krate).join("src").join(&path);
                        ["", "/mod", "/tests"]
                            .map(|end| PathBuf::from(format!("{}{end}.rs", path.display())))
                    };
                    crates.into_iter().flat_map(of_crate).collect()
                }
            };
            let is_there = files.iter().any(|file| {
                let text = fs::read_to_string(file).unwrap_or_default();
                text.contains(&format!("fn {name}("))
                    || text.contains(&format!("test!({name}"))
                    || text.contains(&format!("test!(\n    {name}"))
            });
            assert!(is_there, "{test} is in none of {files:?}");
        }
    }
}

#[test]
fn large_numbers_have_separators() {
    assert_eq!(number(7u32), "7");
    assert_eq!(number(MAX_ENTRIES_LIMIT), "4,194,304");
    assert_eq!(
        [bytes(107), bytes(4 << 10), bytes(32 << 20)],
        ["107 bytes", "4 KiB", "32 MiB"]
    );
}

#[test]
fn entries_beyond_limit_are_refused() {
    use rto_agent_core::policy::{PolicySet, entries::Builder};

    let mut set = PolicySet::default();
    let policy: rto_agent_core::policy::PolicyName = "p".parse().unwrap();
    let mut builder = Builder::default();
    let slot = builder.policy(&policy);
    for bits in 0..=MAX_ENTRIES_LIMIT {
        let address = std::net::Ipv4Addr::from_bits(bits << 1).into();
        let cidr = rto_agent_core::policy::Cidr::containing(address, 31).unwrap();
        builder.push(cidr, slot, None);
    }
    set.entries = builder.build().0;
    let error = set.check_size().unwrap_err();
    assert_eq!(error, "4194305 entries: at most 4194304 are possible");

    let mut set = PolicySet::default();
    for i in 0..=MAX_POLICIES {
        let policy =
            rto_agent_core::policy::Policy::from(rto_agent_core::policy::Settings::default());
        set.policies
            .insert(format!("p{i}").parse().unwrap(), policy);
    }
    let error = set.check_size().unwrap_err();
    assert_eq!(error, "1025 policies: at most 1024 are possible");
}

#[test]
fn policy_name_length_is_limited() {
    let name = |length: usize| {
        "p".repeat(length)
            .parse::<rto_agent_core::policy::PolicyName>()
    };
    assert!(name(POLICY_NAME_LEN - 1).is_ok());
    let error = name(POLICY_NAME_LEN).unwrap_err().to_string();
    assert!(error.contains("63 characters at most"), "{error}");
}
