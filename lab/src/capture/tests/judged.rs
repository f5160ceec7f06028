//! The evidence for advice: handshakes without a sample, the host's side, times, and what the advice leaves out.

use std::net::IpAddr;

use rto_model::{
    advice::{self, NoSuggestion, PEER_DELACK_US, Question},
    syn::INITIAL_RTO_US,
};

use super::{files::*, *};

const JIFFY_US: u64 = 4_000;
const QUESTION: Question = Question {
    hz: 250,
    share: 0.001,
    min_us: 60_000,
    peer_delack_us: PEER_DELACK_US,
};

/// Little-endian words: a record of a pcap file, or the content of a pcapng block.
fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn record(at_us: u64, frame: &[u8]) -> Vec<u8> {
    let length = frame.len() as u32;
    let at = [
        (BEGAN_S + at_us / 1_000_000) as u32,
        (at_us % 1_000_000) as u32,
    ];
    [words(&[at[0], at[1], length, length]), frame.to_vec()].concat()
}

/// A frame with timestamps instead of the no-operation options.
fn stamped(packet: &Packet, value: u32, echo: u32) -> Vec<u8> {
    let mut frame = Link::Ethernet.frame(packet, false);
    let options = 14 + 20 + 20;
    frame[options..options + 4].copy_from_slice(&[1, 1, 8, 10]);
    frame[options + 4..options + 8].copy_from_slice(&value.to_be_bytes());
    frame[options + 8..options + 12].copy_from_slice(&echo.to_be_bytes());
    frame
}

/// The same connection n times, each with its own sequence numbers.
fn repeated(n: u32, apart_us: u64, one: &[Packet]) -> Vec<Packet> {
    let each = (0..n).flat_map(|n| {
        one.iter().map(move |packet| Packet {
            at_us: packet.at_us + u64::from(n) * apart_us,
            seq: packet.seq.wrapping_add(n * 1_000_000),
            ack: packet.ack.wrapping_add(n * 1_000_000),
            ..packet.clone()
        })
    });
    each.collect()
}

/// Advice for the initial RTO from the host's flows.
fn advised(mut capture: Capture) -> advice::Advice {
    capture.retain_sent_by_host(&[], None);
    let fit = capture.fit(JIFFY_US).unwrap();
    advice::initial_rto(
        &fit.handshakes(capture.flows.iter()),
        &QUESTION,
        INITIAL_RTO_US,
    )
}

/// A path with an RTT of 5 s: three SYNs are sent before the answer. The host's side is clear without an ACK from the
/// peer.
fn far() -> Vec<Packet> {
    vec![
        client(0, "S", 100, 0, 0),
        client(1_000_100, "S", 100, 0, 0),
        client(3_000_300, "S", 100, 0, 0),
        server(5_000_017, "S.", 500, 101, 0),
        client(5_000_040, ".", 101, 501, 0),
    ]
}

#[test]
fn far_peer_with_every_syn_repeated_has_no_advice() {
    let capture = read(&FORM.file(&repeated(3_200, 5_000_500, &far()))).unwrap();
    let advice = advised(capture);
    assert_eq!(advice.samples, 3_200);
    assert_eq!(advice.reason, Some(NoSuggestion::NothingShorter));
    assert!(advice.present.expected.share > 0.99, "{advice:?}");
    // A few such connections among near ones bound the share.
    let near = [
        client(0, "S", 100, 0, 0),
        server(10_017, "S.", 500, 101, 0),
        client(10_040, ".", 101, 501, 0),
    ];
    for (far_ones, is_advised) in [(0, true), (32, false)] {
        let mut packets = repeated(3_200, 20_000, &near);
        let later = repeated(far_ones, 5_000_500, &far()).into_iter();
        packets.extend(later.map(|packet| Packet {
            at_us: packet.at_us + 3_200 * 20_000,
            seq: packet.seq.wrapping_sub(1_000_000_000),
            ack: packet.ack.wrapping_sub(1_000_000_000),
            ..packet
        }));
        let advice = advised(read(&FORM.file(&packets)).unwrap());
        assert_eq!(advice.samples, 3_200 + u64::from(far_ones));
        assert_eq!(advice.suggestion.is_some(), is_advised, "{advice:?}");
    }
}

#[test]
fn unanswered_and_refused_syns_are_no_evidence() {
    // 3,300 answered handshakes, and SYNs without an answer, with RST and RST-ACK.
    let mut packets = repeated(3_300, 1_000_000, &connection());
    let begin = packets.last().unwrap().at_us + 1_000;
    for n in 0..90 {
        let (at_us, seq) = (begin + u64::from(n) * 10_000_000, 7 + 1_000_000 * n);
        let syn = |wait_us| client(at_us + wait_us, "S", seq, 0, 0);
        packets.extend([syn(0), syn(1_000_000)]);
        match n % 3 {
            0 => packets.push(server(at_us + 5_000_000, "R", 0, 0, 0)),
            1 => packets.push(server(at_us + 5_000_000, "R.", 0, seq.wrapping_add(1), 0)),
            _ => {}
        }
    }
    let capture = read(&FORM.file(&packets)).unwrap();
    let sent = capture.sent();
    assert_eq!(sent.handshake_unanswered, 90);
    assert!(
        capture
            .flows
            .iter()
            .all(|flow| flow.unsampled_us.is_empty())
    );
    let advice = advised(capture);
    assert_eq!(advice.samples, 3_300);
    assert!(advice.suggestion.is_some(), "{advice:?}");
}

#[test]
fn spoofed_syns_are_no_evidence() {
    let mut packets = repeated(3_300, 1_000_000, &connection());
    let begin = packets.last().unwrap().at_us + 1_000;
    // The client's SYN-ACKs to them are retransmitted, and never answered.
    for n in 0..90 {
        let at_us = begin + u64::from(n) * 10_000_000;
        packets.extend([
            server(at_us, "S", 9 + 1_000_000 * n, 0, 0),
            client(at_us + 10, "S.", 5 + 2_000_000 * n, 10 + 1_000_000 * n, 0),
            client(
                at_us + 1_000_010,
                "S.",
                5 + 2_000_000 * n,
                10 + 1_000_000 * n,
                0,
            ),
        ]);
    }
    let advice = advised(read(&FORM.file(&packets)).unwrap());
    assert!(advice.suggestion.is_some(), "{advice:?}");
}

#[test]
fn one_direction_is_named() {
    let sent: Vec<_> = connection().into_iter().filter(|p| p.from_client).collect();
    let capture = read(&FORM.file(&sent)).unwrap();
    assert_eq!((capture.one_way(), capture.flows.len()), (1, 1));
    assert!(
        capture.remarks()[0].contains("only one direction"),
        "{:?}",
        capture.remarks()
    );
    assert_eq!(read(&FORM.file(&connection())).unwrap().one_way(), 0);
    // A SYN alone may be unanswered.
    let syn = read(&FORM.file(&sent[..1])).unwrap();
    assert_eq!(syn.one_way(), 0);
}

#[test]
fn connection_goes_on_in_the_next_file() {
    let packets = connection();
    let whole = read(&FORM.file(&packets)).unwrap();
    for cut in 1..packets.len() {
        let parts = [&packets[cut..], &packets[..cut]].map(|part| FORM.file(part));
        let parts = parts.each_ref().map(Vec::as_slice);
        let read = read_parts(&parts, Limits::default()).unwrap();
        assert_eq!(read.flows, whole.flows, "{cut}");
    }
}

#[test]
fn timestamps_tell_which_syn_was_answered() {
    let answers = |echo| {
        let mut file = FORM.file(&[]);
        let syns = [(0, 7), (1_000_000, 1_007), (3_000_000, 3_007)];
        for (at_us, value) in syns {
            let syn = client(at_us, "S", 100, 0, 0);
            file.extend(record(at_us, &stamped(&syn, value, 0)));
        }
        let answer = server(3_010_000, "S.", 500, 101, 0);
        file.extend(record(answer.at_us, &stamped(&answer, 1, echo)));
        let flow = read(&file).unwrap().flows.remove(0);
        (
            rtts(&flow.handshake),
            flow.unsampled_us,
            flow.counts.ambiguous,
        )
    };
    assert_eq!(answers(3_007), (vec![10_000], vec![], 0));
    assert_eq!(answers(7), (vec![3_010_000], vec![], 0));
    assert_eq!(answers(8), (vec![], vec![3_010_000], 1));
}

#[test]
fn host_is_the_side_with_a_sample_on_other_flows() {
    // The second connection has no answer; its host is known from the first.
    let mut file = FORM.file(&connection());
    let mut syn = Link::Ethernet.frame(&client(0, "S", 9, 0, 0), false);
    syn[14 + 16..14 + 20].copy_from_slice(&[10, 0, 0, 3]);
    file.extend(record(100_000, &syn));
    let mut capture = read(&file).unwrap();
    assert_eq!(capture.retain_sent_by_host(&[], None).undecided, 0);
    let from: Vec<_> = capture.flows.iter().map(|flow| flow.from.ip()).collect();
    assert_eq!(from, [IpAddr::from(CLIENT); 2]);
    // Alone it does not show its host, but an address does.
    let mut file = FORM.file(&[]);
    file.extend(record(100_000, &syn));
    let capture = read(&file).unwrap();
    for (hosts, undecided, kept) in [
        (vec![], 1, 0),
        (vec![IpAddr::from(CLIENT)], 0, 1),
        (vec![IpAddr::from([10, 0, 0, 3])], 0, 0),
    ] {
        let mut capture = capture.clone();
        let sides = capture.retain_sent_by_host(&hosts, None);
        assert_eq!((sides.undecided, capture.flows.len()), (undecided, kept));
    }
}

#[test]
fn host_within_the_prefix_of_its_peers_is_one_side() {
    let capture = read(&FORM.file(&connection())).unwrap();
    let all = |_: IpAddr| true;
    for hosts in [vec![], vec![IpAddr::from(CLIENT)]] {
        let mut capture = capture.clone();
        let sides = capture.retain_sent_by_host(&hosts, Some(&all));
        assert_eq!((sides.prompt, capture.flows.len()), (1, 1));
        assert_eq!(sides.measured.is_empty(), !hosts.is_empty());
        assert_eq!(capture.flows[0].from.ip(), IpAddr::from(CLIENT));
    }
    // An option that names the wrong side is obeyed and reported.
    let is_client = |peer| peer == IpAddr::from(CLIENT);
    for (hosts, is_peer) in [
        (&[][..], Some(&is_client as &dyn Fn(IpAddr) -> bool)),
        (&[IpAddr::from(SERVER)], None),
    ] {
        let mut capture = capture.clone();
        let sides = capture.retain_sent_by_host(hosts, is_peer);
        assert_eq!((sides.reversed, sides.late, capture.flows.len()), (1, 1, 1));
    }
}

/// A Linux cooked header, version 2, with an interface and a packet type.
fn cooked(packet: &Packet, interface: u8, kind: u8) -> Vec<u8> {
    let mut frame = Link::Sll2.frame(packet, false);
    (frame[7], frame[10]) = (interface, kind);
    record(packet.at_us, &frame)
}

#[test]
fn answers_by_another_interface_are_matched() {
    let form = Form {
        link: Link::Sll2,
        ..FORM
    };
    let mut file = form.file(&[]);
    for packet in connection() {
        let (interface, kind) = if packet.from_client { (2, 4) } else { (3, 0) };
        file.extend(cooked(&packet, interface, kind));
    }
    let mut capture = read(&file).unwrap();
    assert_eq!(rtts(&capture.flows[0].handshake), [10_000]);
    assert_eq!(rtts(&capture.flows[0].data), [20_000, 12_000]);
    assert_eq!(capture.flows[0].sent_by_host, Some(true));
    assert_eq!(capture.flows[1].sent_by_host, Some(false));
    assert_eq!(capture.remarks(), [""; 0]);
    capture.retain_sent_by_host(&[], None);
    assert_eq!(capture.flows.len(), 1);
}

#[test]
fn copies_on_another_interface_are_counted() {
    let form = Form {
        link: Link::Sll2,
        ..FORM
    };
    let mut file = form.file(&[]);
    for packet in connection() {
        for interface in [2, 3] {
            file.extend(cooked(
                &packet,
                interface,
                if packet.from_client { 4 } else { 0 },
            ));
        }
    }
    let capture = read(&file).unwrap();
    assert_eq!(capture.flows.len(), 2);
    assert_eq!(rtts(&capture.flows[0].data), [20_000, 12_000]);
    assert_eq!(capture.sent().retransmitted, 0);
    assert_eq!(capture.counts.elsewhere, 6);
    assert!(capture.remarks()[0].contains("6 packet(s) are copies"));
}

#[test]
fn direction_in_the_flags_of_pcapng_is_the_hosts() {
    for (bits, first) in [(1, Some(false)), (2, Some(true)), (0, None)] {
        let ng = Form { ng: true, ..FORM };
        let mut file = ng.file(&[]);
        let frame = Link::Ethernet.frame(&client(0, "S", 1, 0, 0), false);
        let length = frame.len() as u32;
        let padding = vec![0; frame.len().next_multiple_of(4) - frame.len()];
        // A comment first, then the flags.
        let options = [
            words(&[0x0003_0001, 0x0000_0000]),
            words(&[0x0004_0002, bits, 0]),
        ]
        .concat();
        let content = [words(&[0, 0, 5, length, length]), frame, padding, options].concat();
        ng.block(&mut file, 6, &content);
        let capture = read(&file).unwrap();
        assert_eq!(capture.flows[0].sent_by_host, first);
    }
}

#[test]
fn equal_or_coarse_times_are_refused() {
    let file = |change: fn(u64) -> u64| {
        let packets = repeated(50, 100_003, &connection());
        let packets = packets.into_iter().map(|packet| Packet {
            at_us: change(packet.at_us),
            ..packet
        });
        read(&FORM.file(&packets.collect::<Vec<_>>())).unwrap()
    };
    let fit = |change| file(change).fit(JIFFY_US);
    assert_eq!(fit(|us| us).unwrap().remark(), None);
    assert_eq!(fit(|_| 0), Err(Unfit::SameTimes));
    let seconds = fit(|us| us / 1_000_000 * 1_000_000);
    assert!(
        matches!(seconds, Err(Unfit::TooCoarse { .. })),
        "{seconds:?}"
    );
    // All packets of a connection have the same time.
    let instant = fit(|us| us / 100_003 * 100_003);
    assert!(instant.is_err(), "{instant:?}");
}

#[test]
fn handshakes_of_no_time_are_unfit_with_a_fine_clock() {
    // The SYN-ACK has the SYN's time, as if both were read at once, so the peer looks like the host.
    let mut connection = connection();
    connection[1].at_us = 0;
    let packets = repeated(50, 100_003, &connection);
    let capture = read(&FORM.file(&packets)).unwrap();
    let unfit = Unfit::Instant {
        instant: 50,
        of: 100,
    };
    assert_eq!(capture.fit(JIFFY_US), Err(unfit));
}

#[test]
fn times_of_milliseconds_make_round_trips_longer() {
    let packets = repeated(50, 101_003, &connection());
    let packets: Vec<_> = packets
        .into_iter()
        .map(|packet| Packet {
            at_us: packet.at_us / 1_000 * 1_000,
            ..packet
        })
        .collect();
    let mut capture = read(&FORM.file(&packets)).unwrap();
    capture.retain_sent_by_host(&[], None);
    let fit = capture.fit(JIFFY_US).unwrap();
    assert!(fit.remark().unwrap().contains("resolution of only 1000 us"));
    let handshakes = fit.handshakes(capture.flows.iter());
    assert_eq!(handshakes.took.largest_us(), Some(11_000));
    assert!(!fit.round_trips(capture.flows.iter()).is_empty());
    // With a resolution coarser than a jiffy, no estimator can be judged.
    capture.times.resolution_us = 10_000;
    let fit = capture.fit(JIFFY_US).unwrap();
    assert!(fit.round_trips(capture.flows.iter()).is_empty());
    assert!(fit.remark().unwrap().contains("rto_min is not evaluated"));
}

#[test]
fn round_trips_across_clock_steps_are_left_out() {
    let mut packets = connection();
    // The clock makes a handshake of 5 s look like 20 ms.
    packets.insert(1, client(5_000_000, ".", 7, 7, 0));
    packets.insert(2, client(9_000, ".", 7, 7, 0));
    let (capture, [handshake, data, ..]) = all(&packets);
    assert_eq!((handshake.len(), data), (0, vec![20_000, 12_000]));
    assert_eq!(capture.flows[0].unsampled_us, [u64::MAX]);
    assert_eq!((capture.times.back, capture.times.back_us), (1, 4_991_000));
    assert!(capture.remarks()[0].starts_with("the clock goes back 1 time(s)"));
    // The first packet need not be the earliest.
    assert_eq!(capture.times.began_us, Some(BEGAN_S as i64 * 1_000_000));
    packets.insert(0, client(20_000_000, ".", 7, 7, 0));
    let (capture, [handshake, ..]) = all(&packets);
    assert_eq!((capture.times.back, handshake.len()), (2, 0));
}

#[test]
fn only_unknown_blocks_are_counted() {
    let ng = Form { ng: true, ..FORM };
    let mut file = ng.file(&connection());
    for kind in [4, 5, 10, 0xbad, 0x8000_0001, 7] {
        ng.block(&mut file, kind, &[0; 8]);
    }
    let capture = read(&file).unwrap();
    assert_eq!(capture.counts.other_blocks, 2);
    assert_eq!(capture.counts.other_block, Some(0x8000_0001));
    assert!(capture.remarks()[0].contains("the first of type 2147483649"));
}

#[test]
fn fcs_bits_of_the_link_type_are_masked() {
    for bits in [0x0400_0000, 0x2400_0000, 0xf400_0000u32] {
        let mut file = FORM.file(&connection());
        file[20..24].copy_from_slice(&(1 | bits).to_le_bytes());
        let capture = read(&file).unwrap();
        assert_eq!(rtts(&capture.flows[0].handshake), [10_000], "{bits:#x}");
    }
}

#[test]
fn vlan_tags_are_looked_through() {
    for kinds in [&[0x88a8u16, 0x8100][..], &[0x9100, 0x8100, 0x8100]] {
        let mut file = FORM.file(&[]);
        for packet in connection() {
            let mut frame = Link::Ethernet.frame(&packet, false);
            for kind in kinds.iter().rev() {
                let [high, low] = kind.to_be_bytes();
                frame.splice(12..12, [high, low, 0, 7]);
            }
            file.extend(record(packet.at_us, &frame));
        }
        let capture = read(&file).unwrap();
        assert_eq!(rtts(&capture.flows[0].data), [20_000, 12_000], "{kinds:x?}");
    }
}

#[test]
fn headers_and_tunnels_that_are_not_read_are_counted() {
    let whole = Link::Ethernet.frame(&connection()[3], false);
    let with_protocol = |protocol: u8| {
        let mut frame = whole.clone();
        frame[14 + 9] = protocol;
        frame
    };
    let mut vxlan = with_protocol(17);
    vxlan[14 + 20 + 2..14 + 20 + 4].copy_from_slice(&4789u16.to_be_bytes());
    let mut pppoe = whole.clone();
    pppoe[12..14].copy_from_slice(&[0x88, 0x64]);
    let mut file = FORM.file(&[]);
    for frame in [with_protocol(47), with_protocol(4), vxlan, pppoe, whole] {
        file.extend(record(0, &frame));
    }
    let capture = read(&file).unwrap();
    let counts = capture.counts;
    assert_eq!((counts.tunnelled, counts.other_protocols), (3, 1));
    assert_eq!((counts.other_protocol, counts.not_tcp), (Some(0x8864), 0));
    let remarks = capture.remarks();
    assert!(remarks[0].contains("the first of 0x8864"), "{remarks:?}");
    assert!(
        remarks[1].starts_with("3 packet(s) are inside a tunnel"),
        "{remarks:?}"
    );
}

#[test]
fn sampled_capture_keeps_only_complete_handshakes() {
    let all = connection();
    let mut complete = 0;
    // Every choice of packets.
    for drawn in 0..1u32 << all.len() {
        let is_drawn = |n: &usize| drawn & (1 << n) != 0;
        let sampled = (0..all.len()).filter(is_drawn).map(|n| all[n].clone());
        let sampled: Vec<Packet> = sampled.collect();
        let is_there = |flags: &str| sampled.iter().any(|packet| packet.flags == flags);
        let mut capture = read(&FORM.file(&sampled)).unwrap();
        match retain_sampled(&mut capture, 2) {
            Ok(()) => {
                let samples: Vec<Sample> = capture.flows.iter().flat_map(Flow::samples).collect();
                assert_eq!(rtts(&samples), [10_000], "{sampled:?}");
                assert!(is_there("S") && is_there("S."), "{sampled:?}");
                assert!(capture.remarks()[0].contains("one in 2 packets"));
                complete += 1;
            }
            Err(error) => {
                assert!(error.to_string().contains("proves nothing"), "{error}");
                assert!(!is_there("S") || !is_there("S."), "{sampled:?}");
            }
        }
    }
    assert_eq!(complete, 1 << (all.len() - 2));
}

#[test]
fn every_number_of_raw_ip_is_read() {
    let form = Form {
        link: Link::Raw,
        ..FORM
    };
    let mut file = form.file(&connection());
    let whole = read(&file).unwrap();
    for link in [12, 14] {
        file[20..24].copy_from_slice(&u32::to_le_bytes(link));
        assert_eq!(read(&file).unwrap(), whole, "{link}");
    }
}
