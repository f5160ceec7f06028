//! Prints this host's rules that may count SYNs, which count retransmitted ones like new connections: rules of nftables,
//! with those of iptables-nft, and of legacy iptables. Limits on concurrent connections (`ct count`, connlimit) are not
//! printed, because a retransmitted SYN belongs to the connection of the first. There is no verdict: whether a rule sees
//! SYNs at all depends on the rules before it.

use std::{fs, path::Path, process::Command};

use rto_agent_core::printable;

use super::{Check, Finding, SHOWN};

/// Where distributions install these programs; only root may write there.
const DIRS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

const CHECK: Check<'_> = Check(
    "syn-limits",
    "a rate limit counts every SYN, also retransmitted ones: with a short initial_rto a moment of \
     loss exhausts it, and a ban that each SYN renews does not end while clients retry",
);

/// What a program printed.
#[derive(Debug)]
struct Listing {
    text: String,
    errors: String,
}

/// The rules with their text, and what could not be read.
pub(super) fn syn_limits() -> Finding {
    let (mut rules, mut unread) = (Vec::new(), Vec::new());
    match output(&["nft"], &["-t", "list", "ruleset"]) {
        Ok(listing) => {
            rules.extend(of_nft(&listing.text));
            unread.extend(undecoded(&listing.errors));
        }
        Err(why) => unread.push(why),
    }
    for family in ["ip", "ip6"] {
        // The legacy tables that this network namespace has. If it has none, listing them would
        // load the module.
        let names = fs::read_to_string(format!("/proc/net/{family}_tables_names"));
        if names.is_ok_and(|names| !names.trim().is_empty()) {
            let programs = ["-legacy-save", "-save"].map(|end| format!("{family}tables{end}"));
            let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
            match output(&programs, &[]) {
                Ok(listing) => rules.extend(of_iptables(family, &listing.text)),
                Err(why) => unread.push(why),
            }
        }
    }
    finding(&rules, &unread)
}

fn finding(rules: &[String], unread: &[String]) -> Finding {
    let mut lines = Vec::new();
    if !unread.is_empty() {
        lines.push(format!(
            "some rules could not be read: {}",
            unread.join("; ")
        ));
    }
    if !rules.is_empty() {
        lines.push("these rules may count retransmitted SYNs:".to_owned());
    }
    lines.extend(rules.iter().take(SHOWN).cloned());
    if let Some(more @ 1..) = rules.len().checked_sub(SHOWN) {
        lines.push(format!("and {more} more"));
    }
    match lines.is_empty() {
        true => CHECK.ok("no rule was found"),
        false => CHECK.remark(lines.join("\n")),
    }
}

/// The output of the first of these programs that is installed.
#[expect(
    clippy::disallowed_methods,
    reason = "an absolute path below DIRS, whatever PATH is; rules have no file to be read from"
)]
fn output(programs: &[&str], args: &[&str]) -> Result<Listing, String> {
    let name = programs.first().copied().unwrap_or_default();
    let paths = programs
        .iter()
        .flat_map(|name| DIRS.map(|dir| Path::new(dir).join(name)));
    let Some(path) = paths.into_iter().find(|path| path.is_file()) else {
        return Err(format!("{name} is not installed"));
    };
    let output = Command::new(path).args(args).output();
    let output = output.map_err(|e| format!("{name}: {e}"))?;
    if !output.status.success() {
        return Err(format!(
            "{name} failed ({}); it needs CAP_NET_ADMIN",
            output.status
        ));
    }
    Ok(Listing {
        text: String::from_utf8_lossy(&output.stdout).into_owned(),
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Matches of iptables that nft leaves out of a rule's text, because it does not find their library: "XT match recent
/// not found" (nftables 1.0.6).
fn undecoded(errors: &str) -> Option<String> {
    let lines = errors.lines().filter(|line| line.starts_with("XT "));
    let mut lines: Vec<&str> = lines.collect();
    lines.sort_unstable();
    lines.dedup();
    (!lines.is_empty()).then(|| {
        let lines = printable::text(&lines.join(", ")).into_owned();
        format!("nft: {lines} (iptables-save shows these rules)")
    })
}

/// The rules of `nft list ruleset` that may count SYNs, behind their table and chain.
fn of_nft(text: &str) -> Vec<String> {
    let (mut table, mut chain) = ("", "");
    let mut rules = Vec::new();
    for line in text.lines() {
        let name = line.trim_end_matches(" {");
        if let Some(name) = name.strip_prefix("table ") {
            table = name;
        } else if let Some(name) = name.strip_prefix("\tchain ") {
            chain = name;
        } else if line == "\t}" {
            chain = "";
        } else if !chain.is_empty() && may_count(line) {
            let rule = format!("{table} {chain}: {}", line.trim());
            rules.push(printable::text(&rule).into_owned());
        }
    }
    rules
}

/// The rules of iptables-save(8) that may count SYNs, behind their family and table.
fn of_iptables(family: &str, text: &str) -> Vec<String> {
    let mut table = "";
    let mut rules = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        } else if line.starts_with("-A ") && may_count(line) {
            let rule = format!("{family} {table}: {}", line.trim());
            rules.push(printable::text(&rule).into_owned());
        }
    }
    rules
}

/// Whether a rule contains a rate limit, or remembers addresses: `limit`, `meter`, `add @set`, `update @set`, and of
/// iptables limit, hashlimit and recent, which nft prints as `xt match "recent"` or, without their library, as
/// `# xt_recent`.
fn may_count(rule: &str) -> bool {
    let words = rule.split_ascii_whitespace();
    let words: Vec<&str> = words
        .map(|word| word.trim_matches('"').trim_start_matches("xt_"))
        .collect();
    let has = |names: &[&str]| words.iter().any(|word| names.contains(word));
    has(&["limit", "meter", "recent", "hashlimit"])
        || has(&["add", "update"]) && words.iter().any(|word| word.starts_with('@'))
}

#[cfg(test)]
mod tests {
    use super::{super::Severity, *};

    /// The output of `nft -t list ruleset` of nftables 1.0.6, of which `recent` is in the spellings of three versions.
    const NFT: &str = "\
table ip filter {
\tchain INPUT {
\t\ttype filter hook input priority filter; policy accept;
\t\ttcp dport 22 ct state new xt match recent counter packets 0 bytes 0
\t\ttcp dport 22 xt match \"recent\" counter packets 0 bytes 0 drop
\t\ttcp dport 22 # xt_recent counter packets 0 bytes 0 drop
\t\ttcp flags syn / fin,syn,rst,ack limit rate 3/minute counter packets 0 bytes 0 accept
\t\ttcp flags syn / fin,syn,rst,ack xt match connlimit counter packets 0 bytes 0 drop
\t}
}
table inet own {
\tlimit ssh {
\t\trate 6/minute
\t}

\tset seen {
\t\ttype ipv4_addr
\t\tflags dynamic
\t}

\tchain in {
\t\ttype filter hook input priority filter; policy accept;
\t\ttcp dport 22 limit name \"ssh\" accept
\t\ttcp dport 24 ct count over 5 drop
\t\tip saddr @seen drop
\t\ttcp flags syn meter m size 65535 { ip saddr limit rate over 6/minute } drop
\t\ttcp flags syn / syn,ack update @seen { ip saddr timeout 5s }
\t}
}
";

    #[test]
    fn nft_rules_that_may_count_syns_are_listed() {
        assert_eq!(
            of_nft(NFT),
            [
                "ip filter INPUT: tcp dport 22 ct state new xt match recent counter packets 0 bytes 0",
                "ip filter INPUT: tcp dport 22 xt match \"recent\" counter packets 0 bytes 0 drop",
                "ip filter INPUT: tcp dport 22 # xt_recent counter packets 0 bytes 0 drop",
                "ip filter INPUT: tcp flags syn / fin,syn,rst,ack limit rate 3/minute counter packets \
                 0 bytes 0 accept",
                "inet own in: tcp dport 22 limit name \"ssh\" accept",
                "inet own in: tcp flags syn meter m size 65535 { ip saddr limit rate over 6/minute } drop",
                "inet own in: tcp flags syn / syn,ack update @seen { ip saddr timeout 5s }",
            ]
        );
    }

    #[test]
    fn iptables_rules_that_may_count_syns_are_listed() {
        let text = "\
*filter
:ufw-user-input - [0:0]
-A ufw-user-input -p tcp -m tcp --dport 22 -m recent --set --name DEFAULT --rsource
-A INPUT -p tcp -m tcp --dport 22 -m hashlimit --hashlimit-above 5/sec --hashlimit-name x -j DROP
-A INPUT -p tcp -m connlimit --connlimit-above 20 -j REJECT
COMMIT
";
        assert_eq!(
            of_iptables("ip", text),
            [
                "ip filter: -A ufw-user-input -p tcp -m tcp --dport 22 -m recent --set --name DEFAULT --rsource",
                "ip filter: -A INPUT -p tcp -m tcp --dport 22 -m hashlimit --hashlimit-above 5/sec \
                 --hashlimit-name x -j DROP",
            ]
        );
    }

    #[test]
    fn unreadable_rules_are_a_note() {
        let errors = "# Warning: table ip filter is managed by iptables-nft\nXT match recent not found\n\
                      XT match recent not found\n";
        let undecoded = undecoded(errors).unwrap();
        assert!(undecoded.contains("nft: XT match recent not found (iptables-save"));
        let missing = output(&["rto-no-such-program"], &[]).unwrap_err();
        assert_eq!(missing, "rto-no-such-program is not installed");
        let finding = finding(&[], &[undecoded, missing]);
        assert_eq!(finding.severity, Severity::Note);
        assert!(
            finding.found.contains("not be read: nft: XT"),
            "{finding:?}"
        );
        assert!(
            finding
                .found
                .ends_with("rto-no-such-program is not installed")
        );
    }

    #[test]
    fn further_rules_are_counted() {
        let rules: Vec<String> = (0..SHOWN + 2).map(|n| format!("rule {n}")).collect();
        let finding = finding(&rules, &[]);
        assert!(finding.found.ends_with("rule 4\nand 2 more"), "{finding:?}");
        assert_eq!(super::finding(&[], &[]).severity, Severity::Ok);
    }

    #[test]
    fn output_of_program_that_fails_is_an_error() {
        let error = output(&["false"], &[]).unwrap_err();
        assert!(error.contains("CAP_NET_ADMIN"), "{error}");
        assert_eq!(output(&["none", "echo"], &["a"]).unwrap().text, "a\n");
    }
}
