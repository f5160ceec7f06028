use super::{super::Severity, *};

/// The output of `nft -j -t list ruleset` of nftables 1.0.6.
const NFT: &str = include_str!("nft-1.0.6.json");

/// `ufw limit 22/tcp`, and rules that limit other things.
const UFW: &str = "\
*filter
:ufw-user-input - [0:0]
-A ufw-user-input -p tcp -m tcp --dport 22 -m conntrack --ctstate NEW -m recent --set --name DEFAULT --rsource
-A ufw-user-input -p tcp -m tcp --dport 22 -m conntrack --ctstate NEW -m recent --update --seconds 30 --hitcount 6 \
--name DEFAULT --rsource -j ufw-user-limit
-A ufw-user-limit -m limit --limit 3/min -j LOG --log-prefix \"[UFW LIMIT BLOCK] \"
-A ufw-user-limit -j REJECT --reject-with icmp-port-unreachable
-A INPUT -p udp -m limit --limit 3/min -j ACCEPT
-A INPUT -p tcp -m conntrack --ctstate RELATED,ESTABLISHED -m limit --limit 9/sec -j ACCEPT
-A INPUT -p tcp -m tcp --tcp-flags RST RST -m limit --limit 2/sec -j ACCEPT
-A INPUT -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m hashlimit --hashlimit-above 5/sec --hashlimit-name x -j DROP
-A INPUT ! -p udp -m limit --limit 100/sec -j ACCEPT
-A INPUT -p tcp -m connlimit --connlimit-above 20 -j REJECT
COMMIT
";

#[test]
fn nft_rules_that_limit_syns_are_listed() {
    assert_eq!(
        of_nft(NFT).unwrap(),
        [
            "inet filter input (handle 9): limit over 6/minute",
            "inet filter input (handle 10): limit ssh",
            "inet filter input (handle 11): update @seen",
            "inet filter input (handle 13): add @ban",
            "inet filter input (handle 18): meter m",
            "inet filter input (handle 21): limit over 100/second",
        ]
    );
    assert_eq!(of_nft("{\"nftables\":[]}").unwrap(), [] as [&str; 0]);
    assert!(of_nft("{").unwrap_err().contains("JSON"));
}

#[test]
fn iptables_nft_matches_are_listed_by_name() {
    let rule = |expr: &str| {
        let text = format!(
            r#"{{"nftables":[{{"rule":{{"family":"ip","table":"filter","chain":"c","handle":4,"expr":[{expr}]}}}}]}}"#
        );
        of_nft(&text).unwrap()
    };
    let recent = r#"{"xt":{"type":"match","name":"recent"}}"#;
    let target = |name: &str| format!(r#"{recent},{{"xt":{{"type":"target","name":"{name}"}}}}"#);
    let found = ["ip filter c (handle 4): -m recent"];
    assert_eq!(rule(&target("REJECT")), found);
    assert_eq!(
        rule(&format!(r#"{recent},{{"jump":{{"target":"ban"}}}}"#)),
        found
    );
    for harmless in [recent, &target("LOG"), r#"{"xt":null},{"drop":null}"#] {
        assert_eq!(rule(harmless), [] as [&str; 0], "{harmless}");
    }
}

#[test]
fn iptables_rules_that_limit_syns_are_listed() {
    assert_eq!(
        of_iptables("ip", UFW),
        [
            "ip filter ufw-user-input: -m recent",
            "ip filter INPUT: -m hashlimit",
            "ip filter INPUT: -m limit",
        ]
    );
}

#[test]
fn missing_program_is_named_and_is_no_warning() {
    let error = output(&["rto-no-such-program"], &[]).unwrap_err();
    assert_eq!(error, "rto-no-such-program is not installed");
    let finding = finding(Vec::new(), &[error]);
    assert_eq!(finding.severity, Severity::Ok);
    assert!(
        finding
            .found
            .contains("some rules could not be read: rto-no-such-program")
    );
}

#[test]
fn output_of_program_that_fails_is_an_error() {
    let error = output(&["false"], &[]).unwrap_err();
    assert!(error.contains("CAP_NET_ADMIN"), "{error}");
    assert_eq!(output(&["none", "echo"], &["a"]).unwrap(), "a\n");
}
