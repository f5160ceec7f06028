//! Captures built packet by packet.

#![expect(
    clippy::cast_possible_truncation,
    reason = "small numbers, and halves of times"
)]

mod files;
mod judged;

use std::net::{IpAddr, Ipv4Addr};

use etherparse::PacketBuilder;
use proptest::prelude::*;
use rto_model::estimator::Sample;

use super::*;
use files::*;

fn rtts(samples: &[Sample]) -> Vec<u64> {
    samples.iter().map(|s| s.rtt_us).collect()
}

/// The samples of both directions: handshake and data of the client, then of the server.
fn all(packets: &[Packet]) -> (Capture, [Vec<u64>; 4]) {
    let capture = read(&FORM.file(packets)).unwrap();
    let of = |from: [u8; 4]| {
        let from = IpAddr::from(from);
        let flow = capture.flows.iter().find(|f| f.from.ip() == from);
        flow.map_or_else(Default::default, |f| (rtts(&f.handshake), rtts(&f.data)))
    };
    let ((ch, cd), (sh, sd)) = (of(CLIENT), of(SERVER));
    (capture, [ch, cd, sh, sd])
}

#[test]
fn every_capture_format_gives_same_samples() {
    let mut forms = 0;
    for link in LINKS {
        for bits in 0..16 {
            let [v6, ng, big, nanos] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
            for snap in [262_144, 74 + 26] {
                let form = Form {
                    link,
                    v6,
                    ng,
                    big,
                    nanos,
                    snap,
                };
                let capture = read(&form.file(&connection())).unwrap();
                let [c, s] = &capture.flows[..] else {
                    panic!("{form:?}: {capture:#?}")
                };
                assert_eq!(rtts(&c.handshake), [10_000], "{form:?}");
                assert_eq!(rtts(&c.data), [20_000, 12_000], "{form:?}");
                assert_eq!(rtts(&s.handshake), [100], "{form:?}");
                assert_eq!(rtts(&s.data), [200, 300], "{form:?}");
                assert_eq!(
                    (c.opened, s.opened),
                    (Some(Opening::Active), Some(Opening::Passive))
                );
                assert_eq!((c.counts.segments, s.counts.segments), (3, 3));
                assert_eq!(c.data[0].sent_us, 11_000);
                let began_us = BEGAN_S as i64 * 1_000_000;
                assert_eq!(capture.times.began_us, Some(began_us));
                assert_eq!(capture.times.ended_us, Some(began_us + 52_300));
                assert_eq!(capture.counts.packets, 9);
                assert_eq!(capture.remarks(), [""; 0]);
                assert_eq!(c.interface, if link == Link::Sll2 { 3 } else { 0 });
                forms += 1;
            }
        }
    }
    assert_eq!(forms, 160);
}

#[test]
fn retransmitted_segment_gives_no_sample() {
    let (capture, [handshake, data, ..]) = all(&[
        client(0, "S", 100, 0, 0),
        client(100_000, "S", 100, 0, 0),
        server(110_000, "S.", 500, 101, 0),
        client(120_000, ".", 101, 501, 100),
        client(120_100, ".", 201, 501, 100),
        // The second segment was lost, so neither ACK after it gives a sample.
        server(130_000, ".", 501, 201, 0),
        client(330_000, ".", 201, 501, 100),
        server(340_000, ".", 501, 301, 0),
        client(350_000, ".", 301, 501, 100),
        server(360_000, ".", 501, 401, 0),
        // Acknowledged already, and retransmitted nevertheless.
        client(370_000, ".", 301, 501, 100),
        server(380_000, ".", 501, 401, 0),
    ]);
    assert_eq!(handshake, [0; 0]);
    assert_eq!(data, [10_000, 10_000]);
    let counts = capture.flows[0].counts;
    assert_eq!(counts.retransmitted, 3);
    assert_eq!(counts.handshake_retransmitted, 1);
    assert_eq!(counts.ambiguous, 2);
}

#[test]
fn ack_samples_oldest_covered_segment() {
    let (_, [_, data, ..]) = all(&[
        client(0, ".", 1, 1, 100),
        client(5_000, ".", 101, 1, 100),
        client(6_000, ".", 201, 1, 100),
        server(20_000, ".", 1, 201, 0),
        // Acknowledges nothing new.
        server(20_500, ".", 1, 201, 0),
        server(21_000, ".", 1, 301, 0),
        // The card split 3000 bytes into three segments.
        client(30_000, ".", 301, 1, 3000),
        server(31_000, ".", 1, 1301, 0),
        server(32_000, ".", 1, 2301, 0),
        server(33_000, ".", 1, 3301, 0),
    ]);
    assert_eq!(data, [20_000, 15_000, 1_000, 2_000, 3_000]);
}

#[test]
fn sequence_numbers_wrap() {
    let begin = u32::MAX - 149;
    let (capture, [_, data, ..]) = all(&[
        client(0, ".", begin, 1, 100),
        server(1_000, ".", 1, begin + 100, 0),
        client(2_000, ".", begin + 100, 1, 100),
        client(2_100, ".", 50, 1, 100),
        server(4_000, ".", 1, 50, 0),
        server(5_000, ".", 1, 150, 0),
        // A retransmission from before the wrap.
        client(6_000, ".", begin + 100, 1, 100),
    ]);
    assert_eq!(data, [1_000, 2_000, 2_900]);
    assert_eq!(capture.flows[0].counts.retransmitted, 1);
}

#[test]
fn reused_ports_begin_a_new_flow() {
    let mut packets = connection();
    let second = connection().into_iter().map(|p| Packet {
        at_us: p.at_us + 1_000_000,
        seq: p.seq.wrapping_sub(1_000_000),
        ack: p.ack.wrapping_sub(1_000_000),
        ..p
    });
    packets.extend(second);
    let (capture, [ch, cd, sh, sd]) = all(&packets);
    assert_eq!(
        (ch, cd),
        (vec![10_000; 2], vec![20_000, 12_000, 20_000, 12_000])
    );
    assert_eq!((sh.len(), sd.len()), (2, 4));
    assert_eq!(capture.sent().retransmitted, 0);
}

#[test]
fn missing_packets_give_no_wrong_sample() {
    let (capture, [_, data, ..]) = all(&[
        client(0, ".", 1, 1, 100),
        // The segment 101 to 200 is missing in the file; its ACK is there.
        server(10_000, ".", 1, 201, 0),
        client(500_000, ".", 201, 1, 100),
        server(510_000, ".", 1, 301, 0),
        // No answer.
        client(600_000, ".", 301, 1, 100),
        server(700_000, "R", 1, 0, 0),
    ]);
    assert_eq!(data, [10_000, 10_000]);
    assert_eq!(capture.flows[0].counts.unanswered, 1);
    // An answer to an older connection with the same ports does not answer this one's SYN.
    let (_, [handshake, ..]) = all(&[
        client(0, "S", 100, 0, 0),
        server(1_000, ".", 900, 70_000, 0),
        server(9_000, "S.", 900, 101, 0),
    ]);
    assert_eq!(handshake, [9_000]);
}

#[test]
fn sent_is_the_sum_of_the_flows() {
    let mut capture = read(&FORM.file(&connection())).unwrap();
    let one = FlowCounts {
        segments: 1,
        retransmitted: 2,
        handshake_retransmitted: 3,
        unanswered: 4,
        handshake_unanswered: 6,
        ambiguous: 5,
    };
    for flow in &mut capture.flows {
        flow.counts = one;
    }
    assert_eq!(capture.flows.len(), 2);
    assert_eq!(
        capture.sent(),
        FlowCounts {
            segments: 2,
            retransmitted: 4,
            handshake_retransmitted: 6,
            unanswered: 8,
            handshake_unanswered: 12,
            ambiguous: 10,
        }
    );
}

#[test]
fn non_tcp_packets_are_counted() {
    let mut udp = Vec::new();
    PacketBuilder::ethernet2([0; 6], [0; 6])
        .ipv4(CLIENT, SERVER, 64)
        .udp(1, 2)
        .write(&mut udp, &[0; 10])
        .unwrap();
    let mut arp = vec![0; 12];
    arp.extend([0x08, 0x06]);
    arp.extend([0; 28]);
    let frame = Link::Ethernet.frame(&connection()[3], false);
    let mut fragment = frame.clone();
    // The flag "more fragments".
    fragment[20] |= 0x20;
    let mut tso = frame.clone();
    // TSO: the IP header has no length, so the frame's is used.
    tso[16..18].copy_from_slice(&[0, 0]);
    let mut file = FORM.file(&[]);
    for frame in [&udp, &arp, &fragment, &frame[..40].to_vec(), &tso] {
        file.extend([0; 8]);
        file.extend(u32::try_from(frame.len()).unwrap().to_le_bytes());
        file.extend(u32::try_from(frame.len().max(60)).unwrap().to_le_bytes());
        file.extend(frame);
    }
    let capture = read(&file).unwrap();
    let counts = capture.counts;
    assert_eq!((counts.packets, counts.not_tcp), (5, 2));
    assert_eq!((counts.fragments, counts.cut_short), (1, 1));
    assert_eq!(capture.flows[0].counts.unanswered, 1);
    // Of the one segment that was read the other direction is missing, too.
    assert_eq!(capture.remarks().len(), 3);
}

#[test]
fn damaged_files_name_offset_and_fix() {
    let good = FORM.file(&connection());
    let mut long = good.clone();
    long[24 + 8..24 + 12].copy_from_slice(&u32::MAX.to_le_bytes());
    let ng = Form { ng: true, ..FORM };
    let mut odd = ng.file(&connection());
    odd[28 + 4] = 7;
    let mut wrong = ng.file(&connection());
    // The interface number of the first packet.
    wrong[28 + 20 + 8] = 9;
    let mut usb = good.clone();
    usb[20] = 189;
    for (file, message) in [
        (&b""[..], &["byte 0", "empty", "tcpdump"][..]),
        (
            &long,
            &["byte 24", "after 0 packet(s)", "4294967295", "editcap"],
        ),
        (&odd, &["byte 28", "a length of 7 bytes"]),
        (&wrong, &["byte 48", "interface 9"]),
        (&usb, &["none of the 9 packet(s)", "189", "Ethernet"]),
    ] {
        let error = read(file).unwrap_err().to_string();
        for message in message {
            assert!(error.contains(message), "{error}: {message}");
        }
    }
}

#[test]
fn truncated_file_is_read_to_its_end() {
    for form in [FORM, Form { ng: true, ..FORM }] {
        let mut file = form.file(&connection());
        file.truncate(file.len() - 10);
        let capture = read(&file).unwrap();
        assert_eq!(capture.counts.packets, 8);
        assert!(capture.cut_off_at.is_some_and(|at| at < file.len()));
        assert!(capture.remarks()[0].contains("middle of a packet"));
    }
}

#[test]
fn reader_limits_are_kept_and_reported() {
    let limits = Limits {
        flows: 1,
        outstanding: 3,
        outstanding_in_all: 3,
    };
    let mut packets: Vec<_> = (0..5)
        .map(|n| client(n * 1000, ".", 1 + 100 * n as u32, 1, 100))
        .collect();
    packets.push(server(10_000, ".", 1, 501, 50));
    packets.push(client(20_000, ".", 501, 51, 100));
    packets.push(server(21_000, ".", 51, 601, 0));
    let capture = read_with(&FORM.file(&packets), limits).unwrap();
    assert_eq!(capture.counts.beyond_outstanding, 2);
    assert_eq!(capture.counts.beyond_flows, 1);
    assert_eq!(capture.flows.len(), 1);
    assert_eq!(rtts(&capture.flows[0].data), [10_000, 1_000]);
    assert_eq!(capture.remarks().len(), 2);
}

#[test]
fn peers_can_be_chosen() {
    let mut capture = read(&FORM.file(&connection())).unwrap();
    let is_server = |peer| peer == IpAddr::V4(Ipv4Addr::from(SERVER));
    capture.retain_sent_by_host(&[], Some(&is_server));
    assert_eq!(capture.flows.len(), 1);
    assert_eq!(capture.flows[0].samples().len(), 3);
}

#[test]
fn host_is_side_with_longer_round_trips() {
    let mut capture = read(&FORM.file(&connection())).unwrap();
    capture.retain_sent_by_host(&[], None);
    assert_eq!(capture.flows.len(), 1);
    assert_eq!(capture.flows[0].to.ip(), IpAddr::from(SERVER));
    // Captured at the other end.
    let delayed = connection().into_iter().map(|p| Packet {
        at_us: p.at_us + if p.from_client { 5_000 } else { 0 },
        ..p
    });
    let mut delayed: Vec<_> = delayed.collect();
    delayed[1].at_us = 5_100;
    delayed[2].at_us = 15_200;
    delayed[4].at_us = 17_000;
    delayed[7].at_us = 45_100;
    let mut capture = read(&FORM.file(&delayed)).unwrap();
    capture.retain_sent_by_host(&[], None);
    assert_eq!(capture.flows[0].to.ip(), IpAddr::from(CLIENT));
}

#[test]
fn one_of_two_equal_sides_is_kept() {
    let flow = |from: u16, to: u16, rtt_us: Option<u64>| Flow {
        from: (Ipv4Addr::LOCALHOST, from).into(),
        to: (Ipv4Addr::LOCALHOST, to).into(),
        interface: 0,
        sent_by_host: None,
        opened: None,
        handshake: Vec::new(),
        unsampled_us: Vec::new(),
        data: rtt_us
            .map(|rtt_us| Sample { sent_us: 0, rtt_us })
            .into_iter()
            .collect(),
        counts: FlowCounts::default(),
    };
    let kept = |flows: [Flow; 2]| {
        let mut capture = read(&FORM.file(&connection())).unwrap();
        capture.flows = flows.to_vec();
        capture.retain_sent_by_host(&[], None);
        let ports: Vec<u16> = capture.flows.iter().map(|flow| flow.from.port()).collect();
        ports
    };
    for same in [Some(30), None] {
        assert_eq!(kept([flow(1, 2, same), flow(2, 1, same)]), [1]);
        assert_eq!(kept([flow(2, 1, same), flow(1, 2, same)]), [1]);
    }
    assert_eq!(kept([flow(1, 2, Some(30)), flow(2, 1, Some(31))]), [2]);
    assert_eq!(kept([flow(1, 2, None), flow(2, 1, Some(31))]), [2]);
}

#[test]
fn remarks_match_events() {
    let remarks = |change: &dyn Fn(&mut Capture)| {
        let mut capture = read(&FORM.file(&connection())).unwrap();
        change(&mut capture);
        capture.remarks()
    };
    assert_eq!(remarks(&|_| ()), [""; 0]);
    let back = remarks(&|capture| (capture.times.back, capture.times.back_us) = (2, 4_000_000));
    assert!(
        back[0].starts_with("the clock goes back 2 time(s), by up to 4000 ms"),
        "{back:?}"
    );
    let again = |segments, retransmitted| {
        let repeated = remarks(&|capture| {
            capture.flows.truncate(1);
            let counts = &mut capture.flows[0].counts;
            (counts.segments, counts.retransmitted) = (segments, retransmitted);
        });
        assert!(
            repeated.iter().all(|remark| remark.contains("twice")),
            "{repeated:?}"
        );
        repeated.len()
    };
    // The remark requires at least ten segments, more than a third of them retransmitted.
    assert_eq!([again(9, 9), again(10, 3), again(10, 4)], [0, 0, 1]);
    assert_eq!([again(12, 4), again(12, 5)], [0, 1]);
}

#[test]
fn other_file_formats_have_a_hint() {
    for (bytes, hint) in [
        (&b""[..], "it is empty"),
        (&[0x28, 0xb5, 0x2f, 0xfd, 0], "unzstd it"),
        (&[0xfd, b'7', b'z', b'X', b'Z'], "unxz it"),
        (b"10:00:01.5 IP a.1 > b.2: Flags [S]", "it is text"),
        (&[0; 23], "shorter than a header"),
    ] {
        let error = read(bytes).unwrap_err().to_string();
        assert!(error.contains(hint), "{error}");
    }
    let other = read(&[0; 24]).unwrap_err().to_string();
    assert!(!other.contains("(it is"), "{other}");
}

/// Segments of a flow, some answered and some retransmitted; returns the expected samples, computed with a plain list.
fn oracle(script: &[(u64, u32, bool, bool)]) -> (Vec<Packet>, Vec<u64>) {
    let (mut packets, mut expected) = (Vec::new(), Vec::new());
    let (mut now, mut seq) = (0, 1u32.wrapping_sub(3000));
    // Unanswered segments: when each was sent, and whether it is a retransmission.
    let mut waiting: Vec<(u64, bool)> = Vec::new();
    for (rtt, length, again, answered) in script {
        packets.push(client(now, ".", seq, 1, *length as usize));
        waiting.push((now, *again));
        if *again {
            packets.push(client(now + 1, ".", seq, 1, *length as usize));
        }
        seq = seq.wrapping_add(*length);
        now += rtt + 2;
        if *answered {
            packets.push(server(now, ".", 1, seq, 0));
            if waiting.iter().all(|(_, again)| !again) {
                expected.push(now - waiting[0].0);
            }
            waiting.clear();
        }
    }
    (packets, expected)
}

proptest! {
    #[test]
    fn samples_match_plain_list(
        script in prop::collection::vec((0u64..100_000, 1u32..1400, prop::bool::weighted(0.2), any::<bool>()), 1..40)
    ) {
        let (packets, expected) = oracle(&script);
        let (_, [_, data, ..]) = all(&packets);
        prop_assert_eq!(data, expected);
    }

    #[test]
    fn damaged_capture_never_panics(
        link in 0usize..5,
        bits in 0u8..16,
        at in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
    ) {
        let [v6, ng, big, nanos] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
        let form = Form { link: LINKS[link], v6, ng, big, nanos, snap: 262_144 };
        let mut file = form.file(&connection());
        for (index, byte) in changes {
            let index = index.index(file.len());
            file[index] = byte;
        }
        let limits = Limits { flows: 3, outstanding: 2, outstanding_in_all: 4 };
        if let Ok(capture) = read_with(&file, limits) {
            prop_assert!(capture.flows.len() <= 3);
            let _ = capture.remarks();
        }
        file.truncate(at.index(file.len()));
        let _ = read(&file);
    }
}
