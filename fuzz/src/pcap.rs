//! A packet capture, as `rto-lab advise --pcap` reads it.
//!
//! Parsing is deterministic. What is kept stays within the limits, and is never more than what was read.

use rto_lab::capture::{Capture, Flow};
use rto_lab::capture::{Limits, read_with};

/// Small limits, so that inputs reach them.
const LIMITS: Limits = Limits {
    flows: 8,
    outstanding: 8,
    outstanding_in_all: 16,
};

/// Checks a file.
pub fn check(data: &[u8]) {
    let read = read_with(data, LIMITS);
    assert_eq!(read, read_with(data, LIMITS));
    let capture = match read {
        Ok(capture) => capture,
        Err(e) => {
            assert!(e.to_string().len() < 1024);
            return;
        }
    };
    let counts = &capture.counts;
    // Each packet has at least a block or record header.
    assert!(counts.packets * 12 <= data.len() as u64);
    assert!(capture.cut_off_at.is_none_or(|at| at < data.len()));
    let left_out = counts.not_tcp
        + counts.other_links
        + counts.other_protocols
        + counts.tunnelled
        + counts.fragments
        + counts.cut_short
        + counts.without_time
        + counts.beyond_flows
        + counts.elsewhere;
    assert!(left_out <= counts.packets);
    assert!(capture.flows.len() <= LIMITS.flows);
    let sent = capture.sent();
    // A SYN may carry data.
    assert!(sent.segments <= 2 * counts.packets);
    assert!(sent.retransmitted <= sent.segments);
    assert!(sent.handshake_retransmitted <= sent.retransmitted);
    let samples: usize = capture.flows.iter().map(|flow| flow.samples().len()).sum();
    assert!(samples as u64 + sent.unanswered <= 2 * sent.segments);
    if let (Some(began), Some(ended)) = (capture.times.began_us, capture.times.ended_us) {
        assert!(began <= ended);
    }
    let _said = (capture.remarks(), capture.fit(4_000));
    only_less(&capture);
}

/// At most one direction of each connection is kept, and nothing is invented.
fn only_less(capture: &Capture) {
    let mut far = capture.clone();
    far.retain_sent_by_host(&[], None);
    assert!(far.flows.iter().all(|flow| capture.flows.contains(flow)));
    for flow in &far.flows {
        let both = |other: &&Flow| other.from == flow.to && other.to == flow.from;
        assert!(flow.from == flow.to || far.flows.iter().find(both).is_none());
    }
}
