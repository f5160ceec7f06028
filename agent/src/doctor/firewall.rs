//! Finds rules of this host that limit SYNs: nftables rules, including iptables-nft rules,
//! and rules of legacy iptables. Such rules count retransmitted SYNs like new connections. Limits
//! on concurrent connections (`ct count`, connlimit) are not reported, because a retransmitted SYN
//! belongs to the connection of the first SYN.

use std::{fs, path::Path, process::Command};

use rto_agent_core::printable;
use serde_json::Value;

use super::{Check, Finding, list};

/// Where distributions install these programs; only root may write there.
const DIRS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

const CHECK: Check<'_> = Check(
    "syn-limits",
    "a rate limit counts every SYN, also retransmitted ones: with a short initial_rto a moment of \
     loss exhausts it, and a ban that each SYN renews does not end while clients retry",
);

/// Useful only if a policy shortens the SYN timer.
pub(super) fn syn_limits() -> Finding {
    let (mut rules, mut unread) = (Vec::new(), Vec::new());
    let mut add = |listing: Result<Vec<String>, String>| match listing {
        Ok(found) => rules.extend(found),
        Err(why) => unread.push(why),
    };
    let ruleset = ["-j", "-t", "list", "ruleset"];
    add(output(&["nft"], &ruleset).and_then(|text| of_nft(&text)));
    for family in ["ip", "ip6"] {
        // The legacy tables that this network namespace has. If it has none, listing them would
        // load the module.
        let names = fs::read_to_string(format!("/proc/net/{family}_tables_names"));
        if names.is_ok_and(|names| !names.trim().is_empty()) {
            let programs = ["-legacy-save", "-save"].map(|end| format!("{family}tables{end}"));
            let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
            add(output(&programs, &[]).map(|text| of_iptables(family, &text)));
        }
    }
    finding(rules, &unread)
}

fn finding(rules: Vec<String>, unread: &[String]) -> Finding {
    let unread = match unread {
        [] => String::new(),
        some => format!("; some rules could not be read: {}", some.join(", ")),
    };
    if rules.is_empty() {
        return CHECK.ok(format!("no rule was found{unread}"));
    }
    CHECK.warning(
        format!("{}{unread}", list(rules)),
        "limit concurrent connections instead (ct count, connlimit), or allow ten SYNs for each connection; otherwise \
         give the peers behind the limit no entry",
    )
}

/// The output of the first of these programs that is installed.
#[expect(
    clippy::disallowed_methods,
    reason = "an absolute path below DIRS, whatever PATH is; rules have no file to be read from"
)]
fn output(programs: &[&str], args: &[&str]) -> Result<String, String> {
    let name = programs.first().copied().unwrap_or_default();
    let paths = programs
        .iter()
        .flat_map(|name| DIRS.map(|dir| Path::new(dir).join(name)));
    let Some(path) = paths.into_iter().find(|path| path.is_file()) else {
        return Err(format!("{name} is not installed"));
    };
    let output = Command::new(path).args(args).output();
    let output = output.map_err(|e| format!("{name}: {e}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!(
            "{name} failed ({}); it needs CAP_NET_ADMIN",
            output.status
        )),
    }
}

/// The rules of `nft -j list ruleset` that limit SYNs (libnftables-json(5)).
fn of_nft(text: &str) -> Result<Vec<String>, String> {
    let listing: Value =
        serde_json::from_str(text).map_err(|e| format!("the output of nft is not JSON: {e}"))?;
    let items = listing["nftables"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let rules = items.iter().filter_map(|item| item.get("rule"));
    let limits = rules.filter_map(|rule| {
        let statements = rule["expr"].as_array()?;
        if statements.iter().any(excludes_new_tcp) {
            return None;
        }
        let decides = statements.iter().any(decides);
        let what = statements.iter().find_map(|one| limit(one, decides))?;
        let text = |name: &str| rule[name].as_str().unwrap_or_default();
        let (family, table, chain) = (text("family"), text("table"), text("chain"));
        let place = format!(
            "{family} {table} {chain} (handle {}): {what}",
            rule["handle"]
        );
        Some(printable::text(&place).into_owned())
    });
    Ok(limits.collect())
}

/// What a statement limits. A statement that only logs less often, or only counts, does no harm.
fn limit(statement: &Value, decides: bool) -> Option<String> {
    let (kind, value) = statement.as_object()?.iter().next()?;
    let text = |name: &str| value[name].as_str().unwrap_or_default();
    match kind.as_str() {
        "limit" if decides => Some(match value.as_str() {
            Some(name) => format!("limit {name}"),
            None => {
                let over = if value["inv"] == true { "over " } else { "" };
                format!("limit {over}{}/{}", value["rate"], text("per"))
            }
        }),
        "meter" if decides => Some(format!("meter {}", text("name"))),
        "set" if ["add", "update"].contains(&text("op")) => {
            Some(format!("{} {}", text("op"), text("set")))
        }
        "xt" if decides && ["recent", "limit", "hashlimit"].contains(&text("name")) => {
            Some(format!("-m {}", text("name")))
        }
        _ => None,
    }
}

fn decides(statement: &Value) -> bool {
    const VERDICTS: [&str; 6] = ["accept", "drop", "reject", "jump", "goto", "return"];
    let target = &statement["xt"];
    let is_target =
        target["type"] == "target" && target["name"] != "LOG" && target["name"] != "NFLOG";
    VERDICTS
        .iter()
        .any(|verdict| statement.get(verdict).is_some())
        || is_target
}

/// Whether a match excludes the first SYN of a connection. Unknown matches are assumed not to.
fn excludes_new_tcp(statement: &Value) -> bool {
    let Some(compared) = statement.get("match").filter(|one| one["op"] != "!=") else {
        return false;
    };
    let left = match &compared["left"]["&"] {
        Value::Array(masked) => masked.first().unwrap_or(&Value::Null),
        _ => &compared["left"],
    };
    let mut right = Vec::new();
    words(&compared["right"], &mut right);
    let lacks = |word: &str| !right.iter().any(|one| one == word);
    let (payload, field) = (&left["payload"]["protocol"], &left["payload"]["field"]);
    if left["ct"]["key"] == "state" {
        return lacks("new");
    }
    if left["meta"]["key"] == "l4proto" || field == "protocol" || field == "nexthdr" {
        return lacks("tcp") && lacks("6");
    }
    if payload == "tcp" && field == "flags" {
        return lacks("syn") || (compared["op"] == "==" && !lacks("ack"));
    }
    // A field of another transport protocol's header.
    ["udp", "udplite", "icmp", "icmpv6", "sctp", "dccp"]
        .contains(&payload.as_str().unwrap_or_default())
}

/// Strings and numbers within a value.
fn words(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::String(word) => into.push(word.clone()),
        Value::Number(number) => into.push(number.to_string()),
        Value::Array(all) => all.iter().for_each(|one| words(one, into)),
        Value::Object(all) => all.values().for_each(|one| words(one, into)),
        Value::Null | Value::Bool(_) => {}
    }
}

/// The rules of iptables-save(8) that limit SYNs.
fn of_iptables(family: &str, text: &str) -> Vec<String> {
    let mut table = "";
    let mut limits = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        }
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let ["-A", chain, rule @ ..] = &words[..] else {
            continue;
        };
        let after = |option: &str, n: usize| {
            let at = rule.iter().position(|word| *word == option)?;
            let negated = at.checked_sub(1).is_some_and(|before| rule[before] == "!");
            (!negated).then(|| rule.get(at + n).copied()).flatten()
        };
        let states = after("--ctstate", 1).or_else(|| after("--state", 1));
        let excluded = states.is_some_and(|states| !states.split(',').any(|one| one == "NEW"))
            || after("-p", 1).is_some_and(|protocol| !["tcp", "all"].contains(&protocol))
            || after("--tcp-flags", 2)
                .is_some_and(|flags| !flags.split(',').any(|one| one == "SYN"));
        let target = after("-j", 1).or_else(|| after("-g", 1));
        let decides = target.is_some_and(|target| !["LOG", "NFLOG"].contains(&target));
        let matches = rule.windows(2).filter(|pair| pair[0] == "-m");
        let mut limit = matches.map(|pair| pair[1]);
        let limit = limit.find(|name| ["recent", "limit", "hashlimit"].contains(name));
        if let (Some(name), false, true) = (limit, excluded, decides) {
            let place = format!("{family} {table} {chain}: -m {name}");
            limits.push(printable::text(&place).into_owned());
        }
    }
    limits
}

#[cfg(test)]
mod tests;
