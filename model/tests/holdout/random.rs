//! Draws, and losses that come in bursts.

/// Steele, Lea and Flood's generator.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// 0 to 1.
    pub(crate) fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(crate) fn happens(&mut self, probability: f64) -> bool {
        self.uniform() < probability
    }

    /// How many of many rare ones.
    pub(crate) fn poisson(&mut self, mean: f64) -> u64 {
        if mean > 30.0 {
            let twelve: f64 = (0..12).map(|_| self.uniform()).sum();
            return (mean + mean.sqrt() * (twelve - 6.0)).round().max(0.0) as u64;
        }
        let end = (-mean).exp();
        let mut product = self.uniform();
        let mut count = 0;
        while product > end {
            product *= self.uniform();
            count += 1;
        }
        count
    }

    /// How many trials until one succeeds.
    pub(crate) fn geometric(&mut self, probability: f64) -> u64 {
        (self.uniform().ln() / (-probability).ln_1p()) as u64 + 1
    }
}

/// Loss that comes in bursts: 0.2 % of the handshakes, and once in 5 minutes 30 % for 1 to 10 seconds.
#[derive(Default)]
pub(crate) struct Bursts {
    left_s: u64,
}

impl Bursts {
    /// How many attempts of one second lose a packet.
    pub(crate) fn second(&mut self, random: &mut Random, attempts: f64) -> u64 {
        if self.left_s == 0 && random.happens(1.0 / 300.0) {
            self.left_s = 1 + (random.uniform() * 10.0) as u64;
        }
        let share = if self.left_s > 0 { 0.3 } else { 0.002 };
        self.left_s = self.left_s.saturating_sub(1);
        random.poisson(attempts * share)
    }
}
