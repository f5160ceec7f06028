//! The fuse for outages: after how many first SYNs lost in a row, none established between, new connections of a
//! policy get the kernel's own timer, and what it leaves of the delay before Linux 6.15.
//!
//! `cargo test -p rto-model --test fuse -- --nocapture` prints both tables.

#[cfg(test)]
mod fuse {
    use rto_model::outage::{Host, Timers, first_from};

    /// Before Linux 6.15: no TCP_RTO_MAX_MS.
    const HOST: Host = Host {
        hz: 250,
        linear_timeouts: 4,
        syn_retries: 6,
    };
    /// 100 ms.
    const POLICY: Timers = Timers::Doubling(25);
    /// A round trip, jiffies.
    const RTT: u64 = 5;

    /// The policy's state in the program.
    #[derive(Default)]
    struct Fuse {
        losses_in_a_row: usize,
        trips: u64,
    }

    impl Fuse {
        fn first_loss(&mut self, limit: usize) {
            self.losses_in_a_row += 1;
            self.trips += u64::from(self.losses_in_a_row == limit);
        }
    }

    /// SplitMix64, of which the upper 32 bits are taken.
    struct Random(u64);

    impl Random {
        fn happens(&mut self, probability: f64) -> bool {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let upper = u32::try_from((z ^ (z >> 31)) >> 32).unwrap_or(u32::MAX);
            f64::from(upper) < probability * f64::from(u32::MAX)
        }
    }

    /// How often the fuse trips among attempts with independent loss, `every` jiffies apart or, with 0, 4 a
    /// jiffy.
    fn trips(limit: usize, every: u64, loss: f64, attempts: u64) -> u64 {
        let mut random = Random(limit as u64 + 1);
        let sent = HOST.syns(POLICY, 0).sent;
        // (when, whether established), of the attempts that are still open.
        let mut events: Vec<(u64, bool)> = Vec::new();
        let mut fuse = Fuse::default();
        for attempt in 0..attempts {
            let now = if every == 0 {
                attempt / 4
            } else {
                attempt * every
            };
            let lost = (0..sent.len()).take_while(|_| random.happens(loss)).count();
            if lost > 0 {
                events.push((now + sent[1], false));
            }
            events.push((now + sent[lost.min(sent.len() - 1)] + RTT, true));
            events.sort_unstable();
            let due = events.partition_point(|(at, _)| *at <= now);
            for (_, established) in events.drain(..due) {
                match established {
                    true => fuse.losses_in_a_row = 0,
                    false => fuse.first_loss(limit),
                }
            }
        }
        fuse.trips
    }

    /// What an outage costs attempts that begin in it, against the kernel's own timers.
    #[derive(Debug, Default)]
    struct Cost {
        mean_ms: f64,
        worst_ms: i64,
        late: f64,
    }

    /// Attempts of a second spread evenly from the beginning of an outage; `limit` first losses trip the fuse.
    fn cost(outage_ms: u64, per_second: u64, limit: usize) -> Cost {
        let (hz, mut cost, mut count) = (HOST.hz, Cost::default(), 0_u32);
        let outage = outage_ms * hz / 1_000;
        // Where in the interval between two attempts the outage begins is an average as well.
        for offset in 0..8 {
            let attempts = (0..).map(|n| (n * 8 + offset) * hz / (per_second * 8));
            let attempts: Vec<u64> = attempts.take_while(|at| *at < outage).collect();
            let mut lost_at = Vec::new();
            for begin in attempts {
                let takes = |timers| {
                    let sent = HOST.syns(timers, begin).sent;
                    first_from(&sent, outage - begin).map(|at| at * 1_000 / hz)
                };
                // No attempt of the outage is established before it ends, so the losses are all in a row.
                let tripped = lost_at.get(limit - 1).is_some_and(|at| *at <= begin);
                let timers = if tripped { Timers::Kernel } else { POLICY };
                lost_at.push(begin + HOST.syns(timers, begin).sent[1]);
                let (Some(own), Some(with)) = (takes(Timers::Kernel), takes(timers)) else {
                    panic!("an outage of {outage_ms} ms outlives connect()");
                };
                let later =
                    i64::try_from(with).unwrap_or(i64::MAX) - i64::try_from(own).unwrap_or(0);
                let residual_ms = i64::try_from((outage - begin) * 1_000 / hz).unwrap_or(i64::MAX);
                cost.mean_ms += later as f64;
                cost.worst_ms = cost.worst_ms.max(later);
                cost.late += f64::from(u8::from(later > 250.max(residual_ms / 20)));
                count += 1;
            }
        }
        let count = f64::from(count.max(1));
        Cost {
            mean_ms: cost.mean_ms / count,
            late: cost.late / count,
            ..cost
        }
    }

    /// `Brake::OUTAGE` of the program. The least that does not trip at 100 attempts a second is 4.
    const N: usize = 6;

    #[test]
    fn independent_loss_of_five_percent_does_not_trip() {
        println!(
            "first SYNs lost in a row: trips in 200,000 attempts at 5 % loss, 10, 100 and 1000 a second"
        );
        for limit in 2..=N {
            let trips = [25, 2, 0].map(|every| trips(limit, every, 0.05, 200_000));
            println!("{limit}: {trips:?}");
            match limit {
                2 => assert!(trips[1] > 0, "{trips:?}"),
                4.. => assert_eq!(trips[..2], [0, 0]),
                _ => assert!(trips[1] <= 1, "{trips:?}"),
            }
        }
        assert_eq!(trips(N, 0, 0.05, 200_000), 0);
    }

    #[test]
    fn fuse_leaves_few_late_connections_at_high_rates() {
        println!("mean and longest delay in ms and share late, without the fuse and with N = {N}");
        for outage_ms in [500, 1_000, 2_000, 3_000, 5_000, 7_000, 10_000] {
            for per_second in [1, 10, 100] {
                let without = cost(outage_ms, per_second, usize::MAX);
                let with = cost(outage_ms, per_second, N);
                let text = |Cost {
                                mean_ms,
                                worst_ms,
                                late,
                            }: &Cost| {
                    format!("{mean_ms:6.0} {worst_ms:5} {:3.0}%", late * 100.0)
                };
                println!(
                    "{outage_ms:5} ms {per_second:3}/s  {}  {}",
                    text(&without),
                    text(&with)
                );
                if per_second >= 10 && outage_ms >= 5_000 {
                    assert!(with.late <= 0.15 && with.mean_ms < 270.0, "{with:?}");
                    assert!(without.late > 0.3 && without.mean_ms > 480.0, "{without:?}");
                }
            }
        }
    }
}
