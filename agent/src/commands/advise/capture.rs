//! Evidence from a packet capture, as a summary from `rto-lab advise --pcap`: this program parses
//! no packets.

use std::{net::IpAddr, path::Path};

use anyhow::{Context as _, bail, ensure};
use rto_advice::{
    advice::Handshakes,
    capture::{Capture, Fit, NamedCapture, Opening},
};
use rto_agent_core::{
    policy::Cidr,
    printable::{self, counted},
};
use rto_model::distribution::Distribution;

use super::{
    evidence::{ByDirection, Gathered, Source, Times, open, rows},
    text,
};

/// The most addresses of the host that are written out.
const HOSTS_SHOWN: usize = 4;

/// Reads a capture's summary for peers in these prefixes, or for all peers; `hosts` are addresses
/// of the captured host.
pub(super) fn read(
    path: &Path,
    cidrs: &[Cidr],
    hosts: &[IpAddr],
    hz: u32,
) -> anyhow::Result<Gathered> {
    let (title, input) = open("--samples", path)?;
    let read: NamedCapture = serde_json::from_reader(input)
        .context(
            "not the JSON that rto-lab advise writes; to read a capture, run rto-lab advise \
             --pcap FILE",
        )
        .context(title)?;
    let file = read.file;
    let jiffy_us = 1_000_000 / u64::from(hz.max(1));
    judged(&file, read.capture, (cidrs, hosts), jiffy_us).with_context(|| printable::path(&file))
}

/// The evidence of a capture, or why advice cannot be based on it.
fn judged(
    file: &Path,
    mut capture: Capture,
    (cidrs, hosts): (&[Cidr], &[IpAddr]),
    jiffy_us: u64,
) -> anyhow::Result<Gathered> {
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
        text::cidrs(cidrs)
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
) -> Gathered {
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
    let mut evidence: Vec<_> = rows("handshake", &parts(|h| &h.took)).collect();
    evidence.extend(rows("unsampled", &parts(|h| &h.longer_than)));
    evidence.extend(rows("rtt", &round_trips));
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
    let source = Source::Capture {
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
        handshakes: ByDirection::of(handshakes),
        round_trips: ByDirection::new(
            Times::Flows(fit.round_trips(capture.flows.iter())),
            flows.map(|(direction, flows)| (direction, Times::Flows(flows))),
            Times::is_empty,
        ),
        warnings,
        notes,
        ..Gathered::of(source)
    }
}

#[cfg(test)]
mod tests {
    use rto_advice::{
        capture::{Flow, FlowCounts, Times as CaptureTimes},
        estimator::Sample,
    };

    use super::*;

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
            times: CaptureTimes {
                began_us: Some(1_700_000_000_000_000),
                ended_us: Some(1_700_000_900_000_000),
                resolution_us: 1,
                ..CaptureTimes::default()
            },
            ..Capture::default()
        }
    }

    fn gathered(capture: Capture) -> Result<Gathered, String> {
        let file = Path::new("a.pcap");
        judged(file, capture, (&[], &[]), 4_000).map_err(|error| format!("{error:#}"))
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
        for (error, said) in [
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
            assert!(error.contains(said), "{said}: {error}");
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
    fn a_file_that_is_no_capture() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"hello").unwrap();
        let error = read(file.path(), &[], &[], 250).err().unwrap();
        let error = format!("{error:#}");
        assert!(error.contains("rto-lab advise --pcap FILE"), "{error}");
        let error = read(Path::new("/no/such/file"), &[], &[], 250)
            .err()
            .unwrap();
        let error = format!("{error:#}");
        assert!(error.contains("--samples /no/such/file"), "{error}");
    }
}
