//! The estimators, predictions, and reading a capture. `cargo xtask bench pure` runs it.
#![expect(
    missing_docs,
    reason = "the macros of criterion make functions without"
)]
#![expect(clippy::expect_used, reason = "a bench may end so")]

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use etherparse::{PacketBuilder, TcpHeader};
use rto_advice::estimator::{Linux, Sample, in_turn};
use rto_lab::{
    capture,
    predict::{predict, steps},
    study::Study,
};
use rto_model::retransmit::LinuxTimers;

/// Round trips of one connection.
const ROUNDS: u32 = 10_000;

/// Round trips between 0.5 and 1.5 ms.
fn samples() -> Vec<Sample> {
    let rtts = (0..u64::from(ROUNDS)).map(|n| 500 + n.wrapping_mul(0x9e37_79b9) % 1000);
    in_turn(rtts)
}

fn estimator(c: &mut Criterion) {
    let flows = [samples()];
    let study = Study::Every;
    let linux = Linux::new(250);
    c.bench_function("estimator_10k", |b| {
        b.iter(|| study.run(black_box(&linux), black_box(&flows), &[]));
    });
    let kernel = LinuxTimers::near(250, 500).with_rto_min(20_000);
    c.bench_function("median_idle", |b| {
        b.iter(|| kernel.median_idle_us(black_box(700_000)));
    });
    let kernel = LinuxTimers::near(250, 500);
    let own = kernel.with_rto_min(20_000).thin();
    let disruptions = steps(Duration::from_millis(1), Duration::from_secs(10));
    c.bench_function("predict", |b| {
        b.iter(|| predict(black_box(&kernel), black_box(&own), &disruptions));
    });
}

/// A pcap file of a connection with requests and answers.
fn file() -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 262_144, 1] {
        bytes.extend(word.to_le_bytes());
    }
    let mut packet = |at_us: u32, from_client: bool, syn: bool, seq: u32, ack: u32, data: usize| {
        let (from, to) = if from_client {
            ([10, 0, 0, 1], [10, 0, 0, 2])
        } else {
            ([10, 0, 0, 2], [10, 0, 0, 1])
        };
        let (from_port, to_port) = if from_client {
            (40_000, 80)
        } else {
            (80, 40_000)
        };
        let mut tcp = TcpHeader::new(from_port, to_port, seq, 1000);
        tcp.syn = syn;
        tcp.ack = !(syn && from_client);
        tcp.acknowledgment_number = ack;
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([0; 6], [0; 6])
            .ipv4(from, to, 64)
            .tcp_header(tcp)
            .write(&mut frame, &vec![0; data])
            .expect("a packet");
        let length = u32::try_from(frame.len()).expect("short");
        for word in [at_us / 1_000_000, at_us % 1_000_000, length, length] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(frame);
    };
    packet(0, true, true, 0, 0, 0);
    packet(400, false, true, 0, 1, 0);
    packet(410, true, false, 1, 1, 0);
    for round in 0..ROUNDS {
        let at_us = 1000 + round * 1000;
        packet(at_us, true, false, 1 + round * 100, 1 + round, 100);
        packet(at_us + 450, false, false, 1 + round, 101 + round * 100, 1);
    }
    bytes
}

fn reader(c: &mut Criterion) {
    let file = file();
    let read = capture::read(&file).expect("a capture");
    assert_eq!(read.flows.len(), 2, "both directions of one connection");
    c.bench_function("capture_20k", |b| {
        b.iter(|| capture::read(black_box(&file)).expect("a capture"));
    });
}

criterion_group!(pure, estimator, reader);
criterion_main!(pure);
