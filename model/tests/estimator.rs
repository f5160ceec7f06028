//! Linux's estimator against Linux: RTTs of a capture, and what TCP_INFO said after each.
//!
//! estimator/linux-6.18-hz250.csv: 400 requests of one connection over loopback, Linux 6.18, HZ 250, rto_min 48 ms by
//! the client's route (reno, `tcp_no_metrics_save`), answers after 0 to 35 ms, the peer with its own delayed ACK.
//! The first line is the handshake. RTTs are the capture's, some microseconds longer or shorter than the kernel's own.

use rto_model::estimator::{Linux, in_turn};

const HZ: u32 = 250;
const RTO_MIN_US: u64 = 48_000;
/// The difference between the capture's times and the kernel's.
const CLOSE_US: u64 = 100;
const JIFFY_US: u64 = 1_000_000 / HZ as u64;

#[test]
fn estimator_matches_tcp_info() {
    let lines: Vec<[u64; 4]> = include_str!("estimator/linux-6.18-hz250.csv")
        .lines()
        .skip(1)
        .map(|line| {
            let fields: Vec<u64> = line.split(',').map(|n| n.parse().unwrap()).collect();
            fields.try_into().unwrap()
        })
        .collect();
    assert_eq!(lines.len(), 401);
    let mut estimator = Linux::new(HZ).with_minimum(RTO_MIN_US);
    let mut equal = 0;
    let samples = in_turn(lines.iter().map(|line| line[0]));
    for (sample, [_, rto_us, srtt_us, mdev_us]) in samples.into_iter().zip(&lines) {
        estimator.take(sample);
        let context = format!("{sample:?}: {estimator:?}, {rto_us} {srtt_us} {mdev_us}");
        // A jiffy, where those microseconds decide over it.
        assert!(
            estimator.rto_us().abs_diff(*rto_us) <= JIFFY_US,
            "{context}"
        );
        let (srtt, mdev) = estimator.state();
        assert!(u64::from(srtt).abs_diff(*srtt_us) <= CLOSE_US, "{context}");
        assert!(u64::from(mdev).abs_diff(*mdev_us) <= CLOSE_US, "{context}");
        equal += usize::from(estimator.rto_us() == *rto_us);
    }
    println!("{equal} of {} RTOs are equal", lines.len());
    assert!(equal >= lines.len() - 4, "{equal}");
    // It says something: they vary.
    let rtos = || lines.iter().map(|line| line[1]);
    assert!(rtos().max() >= rtos().min().map(|least| least + 5 * JIFFY_US));
}
