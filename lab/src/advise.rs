//! Advice from a packet capture: its evidence, and the answer as text.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{bail, ensure};
use comfy_table::{ContentArrangement, Table, presets::NOTHING};
use rto_agent_core::{
    advice::{self, Answer, ByDirection, Evidence, Gathered},
    policy::Cidr,
    printable::{self, counted},
};
use rto_model::{
    advice::{Handshakes, RoundTrips},
    distribution::Distribution,
};
use serde::Serialize;

use crate::capture::{Capture, Fit, Opening};

/// The most addresses of the host that are written out.
const HOSTS_SHOWN: usize = 4;

/// A capture, as the source of evidence.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename = "capture")]
pub struct Source {
    file: PathBuf,
    /// The only peers considered; empty: all peers.
    cidrs: Vec<Cidr>,
    packets: u64,
    /// Times of the first and the last packet, Unix microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    began_us: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_us: Option<i64>,
    /// Directions of connections that were examined.
    flows: usize,
    /// Segments that these sent, and segments sent again.
    segments: u64,
    retransmitted: u64,
}

/// The evidence of a capture for peers in these prefixes, or for all peers, or why advice cannot be based on it; `hosts`
/// are addresses of the captured host.
pub fn evidence(
    file: &Path,
    mut capture: Capture,
    cidrs: &[Cidr],
    hosts: &[IpAddr],
    hz: u32,
) -> anyhow::Result<Gathered<Source>> {
    let jiffy_us = 1_000_000 / u64::from(hz.max(1));
    let mut warnings = capture.remarks();
    if capture.flows.is_empty() {
        warnings.push(format!(
            "none of {} is a TCP segment with data or a SYN",
            counted(capture.counts.packets, "packet", "packets")
        ));
        bail!("nothing to evaluate: {}", warnings.join("; "));
    }
    let connections = capture.flows.len();
    ensure!(
        capture.one_way() < connections,
        "nothing to evaluate: the capture has only one direction of {}; capture both directions",
        counted(connections, "connection", "connections")
    );
    // Before the sides are determined, which also depends on times.
    warnings.extend(capture.fit(jiffy_us)?.remark());
    let is_peer = |peer: IpAddr| cidrs.iter().any(|cidr| cidr.contains(peer));
    ensure!(
        cidrs.is_empty()
            || capture
                .flows
                .iter()
                .any(|flow| is_peer(flow.to.ip().to_canonical())),
        "no connection of the capture has a peer in {}",
        advice::cidrs(cidrs)
    );
    let sides = capture.retain_sent_by_host(
        hosts,
        (!cidrs.is_empty()).then_some(&is_peer as &dyn Fn(IpAddr) -> bool),
    );
    let undecided = counted(sides.undecided, "connection", "connections");
    ensure!(
        !capture.flows.is_empty(),
        "nothing to evaluate: it is unknown which side of {undecided} is this host; give its \
         address with --host{}",
        warnings
            .iter()
            .map(|warning| format!("; {warning}"))
            .collect::<String>()
    );
    if sides.undecided > 0 {
        warnings.push(format!(
            "left out: {undecided}, because it is unknown which side is this host; give its \
             address with --host"
        ));
    }
    if sides.reversed > 0 {
        warnings.push(format!(
            "in {} the peer's packets are answered later than this host's packets: do --host and \
             --cidr name the wrong side?",
            counted(sides.reversed, "connection", "connections")
        ));
    }
    if sides.late > sides.prompt {
        warnings.push(format!(
            "in {} of {} handshakes this host took longer than 1 ms to answer: was the capture \
             taken on another host?",
            sides.late,
            sides.late + sides.prompt
        ));
    }
    let fit = capture.fit(jiffy_us)?;
    let mut gathered = of_flows(file, cidrs, &capture, fit, warnings);
    if !sides.measured.is_empty() {
        let hosts = sides.measured.iter().take(HOSTS_SHOWN);
        let hosts: Vec<_> = hosts.map(ToString::to_string).collect();
        gathered.notes.push(format!(
            "assumed to be this host, because its packets are answered later than those of its \
             peers: {}; --host sets it explicitly",
            hosts.join(", ")
        ));
    }
    Ok(gathered)
}

fn of_flows(
    file: &Path,
    cidrs: &[Cidr],
    capture: &Capture,
    fit: Fit,
    mut warnings: Vec<String>,
) -> Gathered<Source> {
    let sent = capture.sent();
    let directions = [
        ("active", Some(Opening::Active)),
        ("passive", Some(Opening::Passive)),
        ("unknown", None),
    ];
    let of = |opened: Option<Opening>| capture.flows.iter().filter(move |f| f.opened == opened);
    let handshakes = directions.map(|(direction, opened)| (direction, fit.handshakes(of(opened))));
    let flows = directions.map(|(direction, opened)| (direction, fit.round_trips(of(opened))));
    let parts = |part: fn(&Handshakes) -> &Distribution| {
        handshakes
            .each_ref()
            .map(|(direction, handshakes)| (*direction, part(handshakes).clone()))
    };
    let round_trips = directions.map(|(direction, opened)| {
        let samples = of(opened).flat_map(|flow| &flow.data);
        (direction, samples.map(|s| s.rtt_us).collect())
    });
    let mut evidence: Vec<_> = Evidence::rows("handshake", &parts(|h| &h.took)).collect();
    evidence.extend(Evidence::rows("unsampled", &parts(|h| &h.longer_than)));
    evidence.extend(Evidence::rows("rtt", &round_trips));
    let mut notes = vec![
        "the capture must be taken on the host that will use the settings: elsewhere its times do \
         not cover the whole path"
            .to_owned(),
    ];
    if cidrs.is_empty() {
        notes.push("all peers are included; --cidr selects some".to_owned());
    }
    let unsampled: u64 = handshakes.iter().map(|(_, h)| h.longer_than.count()).sum();
    if unsampled > 0 {
        warnings.push(format!(
            "{} no round trip (retransmitted, or the clock went back): each counts as longer than \
             the capture shows; capture with timestamps (tcpdump -s 128)",
            counted(unsampled, "handshake gave", "handshakes gave"),
        ));
    }
    if sent.handshake_unanswered > 0 {
        notes.push(format!(
            "{} not answered or refused: no evidence about a round trip",
            counted(
                sent.handshake_unanswered,
                "SYN or SYN-ACK was",
                "SYNs or SYN-ACKs were"
            ),
        ));
    }
    let again = sent.retransmitted - sent.handshake_retransmitted;
    if again > 0 {
        warnings.push(format!(
            "without a round trip, because they were retransmitted: {again} of {}",
            counted(sent.segments, "segment", "segments")
        ));
    }
    let source = Source {
        file: file.to_owned(),
        cidrs: cidrs.to_vec(),
        packets: capture.counts.packets,
        began_us: capture.times.began_us,
        ended_us: capture.times.ended_us,
        flows: capture.flows.len(),
        segments: sent.segments,
        retransmitted: sent.retransmitted,
    };
    Gathered {
        observed_ms: (capture.times.began_us.zip(capture.times.ended_us))
            .map(|(began, ended)| ended.abs_diff(began) / 1000),
        evidence,
        handshakes: ByDirection::handshakes(handshakes),
        round_trips: ByDirection::round_trips(
            RoundTrips::Flows(fit.round_trips(capture.flows.iter())),
            flows.map(|(direction, flows)| (direction, RoundTrips::Flows(flows))),
        ),
        warnings,
        notes,
        cidrs: cidrs.to_vec(),
        ..Gathered::new(source)
    }
}

/// The answer as text.
pub fn text(answer: &Answer<Source>) -> String {
    advice::text(answer, &source(&answer.source), |header, rows, _, _| {
        let mut table = Table::new();
        table
            .load_style(NOTHING)
            .set_header(header)
            .set_content_arrangement(ContentArrangement::Disabled);
        for row in rows {
            table.add_row(row);
        }
        let lines = table.lines().map(|line| format!("{}\n", line.trim()));
        lines.collect()
    })
}

fn source(source: &Source) -> String {
    let Source {
        file,
        cidrs,
        packets,
        began_us,
        ended_us,
        flows,
        segments,
        retransmitted,
    } = source;
    let peers = if cidrs.is_empty() {
        String::new()
    } else {
        format!(" to {}", advice::cidrs(cidrs))
    };
    let lasted = match (began_us, ended_us) {
        (Some(began), Some(ended)) => lasted(*began, *ended),
        _ => String::new(),
    };
    format!(
        "{}: {}{lasted}; {}{peers} with {}, {retransmitted} of them retransmitted\n",
        printable::path(file),
        counted(*packets, "packet", "packets"),
        counted(*flows, "flow", "flows"),
        counted(*segments, "segment", "segments"),
    )
}

/// How long a capture lasted and when it began; empty for times outside the calendar.
fn lasted(began_us: i64, ended_us: i64) -> String {
    const YEAR_10000_S: u64 = 253_402_300_800;
    let began_s = u64::try_from(began_us / 1_000_000).ok();
    let Some(began_s) = began_s.filter(|began_s| *began_s < YEAR_10000_S) else {
        return String::new();
    };
    // Seconds are precise enough.
    let took = ended_us.abs_diff(began_us).div_ceil(1_000_000);
    let began = std::time::UNIX_EPOCH + Duration::from_secs(began_s);
    format!(
        " of {} from {}",
        humantime::format_duration(Duration::from_secs(took)),
        humantime::format_rfc3339_seconds(began)
    )
}

#[cfg(test)]
mod tests {
    use rto_agent_core::policy::HostFacts;
    use rto_model::{
        advice::{PEER_DELACK_US, Question},
        estimator::Sample,
    };

    use super::*;
    use crate::capture::{Flow, FlowCounts, Times};

    /// Connections of this host to a peer. Handshakes take 50 ms, or have no sample and are waited
    /// for this long.
    fn captured(count: u16, waited_us: Option<u64>) -> Capture {
        let sample = |rtt_us| Sample { sent_us: 0, rtt_us };
        let flow = |n: u16| {
            let sent = Flow {
                from: ([10, 0, 0, 1], 1_024 + n).into(),
                to: ([192, 0, 2, 1], 80).into(),
                interface: 0,
                sent_by_host: None,
                opened: Some(Opening::Active),
                handshake: waited_us
                    .is_none()
                    .then(|| sample(50_000))
                    .into_iter()
                    .collect(),
                unsampled_us: waited_us.into_iter().collect(),
                data: Vec::new(),
                counts: FlowCounts::default(),
            };
            let answer = Flow {
                from: sent.to,
                to: sent.from,
                opened: Some(Opening::Passive),
                handshake: vec![sample(20)],
                unsampled_us: Vec::new(),
                ..sent.clone()
            };
            [sent, answer]
        };
        Capture {
            flows: (0..count).flat_map(flow).collect(),
            times: Times {
                began_us: Some(1_700_000_000_000_000),
                ended_us: Some(1_700_000_900_000_000),
                resolution_us: 1,
                ..Times::default()
            },
            ..Capture::default()
        }
    }

    fn gathered(capture: Capture) -> Result<Gathered<Source>, String> {
        let file = Path::new("a.pcap");
        evidence(file, capture, &[], &[], 250).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn handshakes_without_a_sample_are_evidence() {
        let far = gathered(captured(3_000, Some(5_000_000))).unwrap();
        assert_eq!(far.handshakes.all.longer_than.count(), 3_000);
        let [evidence] = &*far.evidence else {
            panic!("{:?}", far.evidence);
        };
        assert_eq!((evidence.what, evidence.direction), ("unsampled", "active"));
        assert_eq!(evidence.p50_us, Some(5_000_000));
        let [warning] = &*far.warnings else {
            panic!("{:?}", far.warnings);
        };
        assert!(warning.starts_with("3000 handshakes gave no"), "{warning}");
        let near = gathered(captured(3_000, None)).unwrap();
        assert_eq!(near.evidence[0].what, "handshake");
        assert_eq!(near.warnings, [""; 0]);
        let note = near.notes.last().map_or("", String::as_str);
        assert!(
            note.contains("than those of its peers: 10.0.0.1;"),
            "{note}"
        );
    }

    #[test]
    fn capture_that_is_unfit_is_refused_with_the_reason() {
        let with = |change: fn(&mut Capture)| {
            let mut capture = captured(3_000, None);
            change(&mut capture);
            gathered(capture).err().unwrap_or_default()
        };
        assert_eq!(with(|_| ()), "");
        for (error, message) in [
            (
                with(|c| c.times.ended_us = c.times.began_us),
                "the same time",
            ),
            (
                with(|c| c.times.resolution_us = 1_000_000),
                "resolution of only 1000 ms",
            ),
            (
                with(|c| c.flows.retain(|flow| flow.opened == Some(Opening::Active))),
                "it is unknown which side of 3000 connections is this host",
            ),
            (
                with(|c| {
                    c.flows.clear();
                    c.counts.without_time = 7;
                }),
                "nothing to evaluate: 7 packet(s) are without a time",
            ),
        ] {
            assert!(error.contains(message), "{message}: {error}");
        }
    }

    #[test]
    fn coarse_times_are_warned_of() {
        let mut capture = captured(3_000, None);
        capture.times.resolution_us = 10_000;
        let gathered = gathered(capture).unwrap();
        assert_eq!(gathered.handshakes.all.took.largest_us(), Some(60_000));
        assert!(gathered.warnings[0].contains("resolution of only 10000 us"));
    }

    #[test]
    fn answer_names_capture_and_suggests_policy() {
        let cidr: Cidr = "192.0.2.0/24".parse().unwrap();
        let capture = captured(3_000, None);
        let evidence = evidence(Path::new("a.pcap"), capture, &[cidr], &[], 250).unwrap();
        let question = Question {
            hz: 250,
            share: 0.001,
            min_us: 60_000,
            peer_delack_us: PEER_DELACK_US,
        };
        let host = HostFacts::of_kernel((6, 12), 250);
        let answer = advice::answer(evidence, &question, &host);
        let json = serde_json::to_value(&answer).unwrap();
        assert_eq!(json["source"]["kind"], "capture");
        assert_eq!(json["source"]["file"], "a.pcap");
        assert_eq!(json["initial_rto"]["suggestion"]["value_us"], 100_000);
        let text = text(&answer);
        for part in [
            "a.pcap: 0 packets of 15m from 2023-11-14T22:13:20Z; 3000 flows to 192.0.2.0/24 with",
            "initial_rto: 100ms (25 jiffies at HZ=250) for at most 0.1% spurious; 3000 handshakes",
            "rto_min: no suggestion; 0 round trips",
            "[policy.suggested]\n  cidrs = [\"192.0.2.0/24\"]\n  initial_rto = \"100ms\"\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
