//! What was observed in a packet capture, which `rto-lab advise --pcap` reads: this program parses no packets.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use rto_model::{
    capture::{Capture, Flow, NamedCapture, Opening},
    estimator::Sample,
};

use super::{
    evidence::{ByDirection, Gathered, Present, Source, Times, rows},
    text,
};
use crate::{
    policy::{Cidr, Settings},
    printable::counted,
};

/// What a capture shows of the peers in these prefixes, or of all.
pub(super) fn read(path: &Path, cidrs: &[Cidr]) -> anyhow::Result<Gathered> {
    let at = || format!("--samples {}", path.display());
    let input: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(path).with_context(at)?)
    };
    let read: NamedCapture = serde_json::from_reader(BufReader::new(input))
        .context("not what rto-lab advise hands over: rto-lab advise --pcap FILE reads a capture")
        .with_context(at)?;
    let mut capture = read.capture;
    choose(&mut capture, cidrs)?;
    Ok(of_flows(read.file, cidrs, &capture))
}

fn choose(capture: &mut Capture, cidrs: &[Cidr]) -> anyhow::Result<()> {
    ensure!(
        !capture.flows.is_empty(),
        "there is no TCP segment with data or SYN among the packets of the capture, {}",
        capture.counts.packets
    );
    if cidrs.is_empty() {
        capture.retain_far();
        return Ok(());
    }
    capture.retain_peers(|peer| cidrs.iter().any(|cidr| cidr.contains(peer)));
    ensure!(
        !capture.flows.is_empty(),
        "no connection of the capture has a peer in {}",
        text::cidrs(cidrs)
    );
    Ok(())
}

fn of_flows(file: PathBuf, cidrs: &[Cidr], capture: &Capture) -> Gathered {
    let sent = capture.sent();
    let directions = [
        ("active", Some(Opening::Active)),
        ("passive", Some(Opening::Passive)),
        ("unknown", None),
    ];
    let of = |opened: Option<Opening>| capture.flows.iter().filter(move |f| f.opened == opened);
    let handshakes = directions.map(|(direction, opened)| {
        let samples = of(opened).flat_map(|flow| &flow.handshake);
        (direction, samples.map(|s| s.rtt_us).collect())
    });
    let round_trips = directions.map(|(direction, opened)| {
        let samples = of(opened).flat_map(|flow| &flow.data);
        (direction, samples.map(|s| s.rtt_us).collect())
    });
    let mut evidence: Vec<_> = rows("handshake", &handshakes).collect();
    evidence.extend(rows("rtt", &round_trips));
    let flows = |opened: Option<Opening>| -> Vec<Vec<Sample>> {
        let samples = of(opened).map(Flow::samples);
        samples.filter(|samples| !samples.is_empty()).collect()
    };
    let each = directions.map(|(direction, opened)| (direction, Times::Flows(flows(opened))));
    let mut notes = vec![
        "the capture must be from the host that is to have the settings: elsewhere its times are not those of \
         the whole path"
            .to_owned(),
    ];
    if cidrs.is_empty() {
        notes.push(
            "of each connection the direction with the longer round trips was taken; --cidr chooses peers"
                .to_owned(),
        );
    }
    let mut warnings = capture.remarks();
    if sent.handshake_retransmitted > 0 {
        warnings.push(format!(
            "{} retransmitted: these handshakes give no round trip (Karn's algorithm); were they slow, the initial \
             RTO is judged too well",
            counted(
                sent.handshake_retransmitted,
                "SYN or SYN-ACK was",
                "SYNs or SYN-ACKs were"
            )
        ));
    }
    let again = sent.retransmitted - sent.handshake_retransmitted;
    if again > 0 {
        warnings.push(format!(
            "retransmitted, and so without a round trip: {again} of {}",
            counted(sent.segments, "segment", "segments")
        ));
    }
    Gathered {
        source: Source::Capture {
            file,
            cidrs: cidrs.to_vec(),
            packets: capture.counts.packets,
            began_us: capture.began_us,
            ended_us: capture.ended_us,
            flows: capture.flows.len(),
            segments: sent.segments,
            retransmitted: sent.retransmitted,
        },
        present: Present::KERNEL,
        settings: Settings::default(),
        evidence,
        handshakes: ByDirection::of(handshakes),
        round_trips: ByDirection::new(
            Times::Flows(capture.samples()),
            each,
            |times| matches!(times, Times::Flows(flows) if flows.is_empty()),
        ),
        warnings,
        notes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_capture() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        io::Write::write_all(&mut file, b"hello").unwrap();
        let error = read(file.path(), &[]).err().unwrap();
        let error = format!("{error:#}");
        assert!(error.contains("rto-lab advise --pcap FILE"), "{error}");
        let error = read(Path::new("/no/such/file"), &[]).err().unwrap();
        let error = format!("{error:#}");
        assert!(error.contains("--samples /no/such/file"), "{error}");
    }
}
