//! Peers without an entry: from the kernel's map to the answer.

use std::time::{SystemTime, UNIX_EPOCH};

use rto_agent_common::{
    address::Peer,
    discovery::{Discovered, Prefix},
    histogram::bucket_of,
};

use super::*;
use crate::engine::discover::discovered;

fn noted(address: [u8; 4], connections: u64) -> (Prefix, Discovered) {
    let mut discovered = Discovered {
        connections,
        recovered: 1,
        ..Discovered::default()
    };
    discovered.times.buckets[bucket_of(20_000)] = connections - 1;
    (Prefix::of(&Peer::V4(address)), discovered)
}

#[test]
fn discovered_prefixes_have_counts() {
    let bed = Bed::with("count_unmatched = true\n");
    let made = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    {
        let mut state = bed.kernel.state();
        state.discovered = vec![
            noted([203, 0, 113, 7], 50),
            noted([192, 0, 2, 7], 40),
            noted([10, 9, 1, 1], 30),
        ];
        state.discovered_since = Some(made);
    }
    bed.add(AddRequest {
        // The second CIDR covers only a part of its prefix.
        cidrs: ["10.9.0.0/16", "203.0.113.7"].map(str::to_owned).into(),
        ..request("")
    })
    .unwrap();
    let snapshot = bed.engine.snapshot();
    let answer = discovered(&snapshot).unwrap();
    assert_eq!((answer.since_ms, answer.one_in), (1_700_000_000_000, 16));
    assert_eq!(answer.covered, 1);
    let prefixes = answer.prefixes.iter();
    let prefixes: Vec<_> = prefixes
        .map(|one| (one.prefix.to_string(), one.connections, one.handshake.count))
        .collect();
    assert_eq!(
        prefixes,
        [
            ("192.0.2.0/24".to_owned(), 40, 39),
            ("203.0.113.0/24".to_owned(), 50, 49)
        ]
    );
    // The map's age is unknown, and then the clock has been set back.
    bed.kernel.state().discovered_since = None;
    let answer = discovered(&snapshot).unwrap();
    assert!(answer.at_ms - answer.since_ms < 600_000);
    bed.kernel.state().discovered_since = Some(SystemTime::now() + Duration::from_secs(60));
    let answer = discovered(&snapshot).unwrap();
    assert_eq!(answer.at_ms, answer.since_ms);
}

#[test]
fn discover_without_count_unmatched_names_fix() {
    for (agent, fix) in [
        ("", "set count_unmatched = true in [agent]"),
        (
            "statistics = false\n",
            "set statistics = true and count_unmatched = true",
        ),
    ] {
        let bed = Bed::with(agent);
        let error = discovered(&bed.engine.snapshot()).unwrap_err();
        assert!(error.is_refusal());
        assert!(error.to_string().contains(fix), "{error}");
    }
    let bed = Bed::with("count_unmatched = true\n");
    bed.detach().unwrap();
    let error = discovered(&bed.engine.snapshot()).unwrap_err();
    assert!(error.to_string().contains("rto-agent attach"), "{error}");
}
