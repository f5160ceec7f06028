//! An e-CUSUM (Shin, Ramdas and Rinaldo, "E-detectors", 2022): notices that connections have begun to send spurious
//! copies of their SYN, whatever one looked at before.

use serde::{Deserialize, Serialize};

/// What is tolerated, and what must be noticed: shares of the judged connections with a spurious copy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// In control, 0 to 1.
    pub tolerated: f64,
    /// Out of control, above the other.
    pub intolerable: f64,
}

impl Rates {
    /// 0.5 % against 5 %.
    pub const DEFAULT: Self = Self {
        tolerated: 0.005,
        intolerable: 0.05,
    };

    /// What a connection with a spurious copy adds to the logarithm of the evidence: that of the likelihood ratio.
    #[must_use]
    pub fn spurious_step(&self) -> f64 {
        (self.intolerable / self.tolerated).ln()
    }

    /// What a clean one adds; below 0.
    #[must_use]
    pub fn clean_step(&self) -> f64 {
        ((1.0 - self.intolerable) / (1.0 - self.tolerated)).ln()
    }
}

/// Evidence against the tolerated rate. It begins anew whenever it is below none, so that a long good time before does
/// not delay the alarm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cusum {
    log_evidence: f64,
}

impl Cusum {
    /// Alarm at this evidence: on average no sooner than after so many connections at the tolerated rate.
    pub const ALARM: f64 = 10_000.0;

    /// Takes in connections that were judged meanwhile, and tells whether there is an alarm. Their order is not known:
    /// they count as spread evenly.
    #[must_use]
    pub fn add(&mut self, rates: &Rates, clean: u64, spurious: u64) -> bool {
        // The alarm must not hide behind clean ones that came with it.
        let mut alarm = false;
        #[expect(clippy::cast_precision_loss, reason = "counts of a second")]
        let relief = clean as f64 / (spurious as f64 + 1.0) * rates.clean_step();
        for _ in 0..spurious {
            self.log_evidence = (self.log_evidence + relief).max(0.0) + rates.spurious_step();
            alarm |= self.is_alarm();
            if alarm {
                break;
            }
        }
        self.log_evidence = (self.log_evidence + relief).max(0.0);
        alarm
    }

    /// The logarithm of the evidence, 0 of none.
    #[must_use]
    pub const fn log_evidence(&self) -> f64 {
        self.log_evidence
    }

    fn is_alarm(&self) -> bool {
        // Four times ln 10 is ln 10^4 but for the last bit.
        self.log_evidence > Self::ALARM.ln() - 1e-9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Always the same draws below 1.
    struct Draws(u64);

    impl Draws {
        fn next(&mut self) -> f64 {
            // Knuth's linear congruential generator; its high bits.
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    #[test]
    fn evidence_is_what_one_spurious_one_adds() {
        let mut cusum = Cusum::default();
        assert_eq!(cusum.log_evidence(), 0.0);
        assert!(!cusum.add(&Rates::DEFAULT, 0, 1));
        assert_eq!(cusum.log_evidence(), Rates::DEFAULT.spurious_step());
        assert!(!cusum.add(&Rates::DEFAULT, 1_000_000, 0));
        assert_eq!(cusum.log_evidence(), 0.0);
    }

    /// Connections until the alarm, at a rate.
    fn delay(draws: &mut Draws, rate: f64, at_most: u64) -> Option<u64> {
        let mut cusum = Cusum::default();
        (1..=at_most).find(|_| {
            let spurious = draws.next() < rate;
            cusum.add(&Rates::DEFAULT, u64::from(!spurious), spurious.into())
        })
    }

    #[test]
    fn steps_follow_from_the_rates() {
        assert!((Rates::DEFAULT.spurious_step() - 10f64.ln()).abs() < 1e-12);
        assert!((Rates::DEFAULT.clean_step() + 0.0463).abs() < 5e-5);
    }

    #[test]
    fn how_long_an_alarm_takes() {
        let mut draws = Draws(1);
        assert_eq!(delay(&mut draws, 1.0, 10), Some(4));
        for (rate, expected) in [(0.2, 20..27), (0.05, 95..135)] {
            let delays = (0..2_000).map(|_| delay(&mut draws, rate, 100_000).unwrap());
            let mean = delays.sum::<u64>() / 2_000;
            assert!(expected.contains(&mean), "{rate}: {mean}");
        }
    }

    #[test]
    fn at_the_tolerated_rate_alarms_are_as_rare_as_promised() {
        let mut draws = Draws(2);
        let delays = (0..30).map(|_| delay(&mut draws, 0.005, 2_000_000).unwrap_or(2_000_000));
        let mean = delays.sum::<u64>() / 30;
        assert!(mean >= 10_000, "{mean}");
        // A fifth of it: none.
        assert_eq!(delay(&mut draws, 0.001, 300_000), None);
    }

    #[test]
    fn a_batch_counts_as_spread_evenly() {
        let rates = Rates::DEFAULT;
        // Many connections a second, of which 0.1 % are spurious: 5 in a batch are no alarm.
        let mut cusum = Cusum::default();
        for _ in 0..100 {
            assert!(!cusum.add(&rates, 4_995, 5));
        }
        assert!(Cusum::default().add(&rates, 0, 4));
        assert!(!Cusum::default().add(&rates, 0, 3));
        // Three, and one a second later.
        let mut cusum = Cusum::default();
        assert!(!cusum.add(&rates, 0, 3) && cusum.add(&rates, 0, 1));
        // A tenth of a large batch: an alarm, though clean ones come last.
        assert!(Cusum::default().add(&rates, 900, 100));
    }
}
