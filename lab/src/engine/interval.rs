//! The confidence interval of a difference between two levels, and the number of runs needed for a verdict.

use std::collections::BTreeMap;

use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};

use super::{Design, EffectSpec, Record, Stat, Weighted};
use crate::summary::{f, quantile};

/// Number of draws of the bootstrap.
const DRAWS: usize = 400;
/// Share of the draws that the interval leaves out at each end.
const TAIL: f64 = 0.025;
/// Minimum number of values for an interval: draws from fewer values cover too little.
const LEAST: usize = 5;
/// Additional factor by which an interval must be narrower, so that chance hides the difference in one of five
/// experiments instead of every second one: (1.96 + 0.84) / 1.96.
const POWER: f64 = 1.43;
/// Seed of the generator: the same records have the same intervals.
const SEED: u64 = 0x426f_6f74_7374_7261;

/// Records by number of the run.
type Runs<'a> = BTreeMap<u32, Vec<&'a Record>>;

fn runs<'a>(records: &[&'a Record]) -> Runs<'a> {
    let mut runs = Runs::new();
    for record in records {
        runs.entry(record.run).or_default().push(record);
    }
    runs
}

/// The measurements at a level, and at the base.
pub(super) struct Samples<'a> {
    spec: &'a EffectSpec,
    one: Runs<'a>,
    base: Runs<'a>,
    /// Numbers of the runs to draw from; if runs are paired, the numbers that both levels have.
    drawn: [Vec<u32>; 2],
}

impl<'a> Samples<'a> {
    pub(super) fn new(spec: &'a EffectSpec, one: &[&'a Record], base: &[&'a Record]) -> Self {
        let (one, base) = (runs(one), runs(base));
        let mut drawn = [&one, &base].map(|runs| runs.keys().copied().collect::<Vec<u32>>());
        if spec.paired {
            drawn[0].retain(|number| base.contains_key(number));
            drawn[1] = drawn[0].clone();
        }
        Self {
            spec,
            one,
            base,
            drawn,
        }
    }

    fn values(&self, runs: &Runs<'_>) -> usize {
        let records = runs.values().flatten();
        let values = records.filter_map(|record| record.values.get(&self.spec.measure));
        values.map(Vec::len).sum()
    }

    /// The smaller number of values of the two levels.
    fn least_values(&self) -> usize {
        self.values(&self.one).min(self.values(&self.base))
    }

    /// The smaller number of runs of the two levels.
    fn least_runs(&self) -> usize {
        self.drawn[0].len().min(self.drawn[1].len())
    }

    /// What an interval is computed over: the smaller number of runs of the two levels, or the values of a single run.
    pub(super) fn over(&self, design: &Design) -> String {
        let run = match design.run_is.as_str() {
            "" => "run",
            named => named,
        };
        match self.least_runs() {
            1 => format!("values of 1 {run}"),
            count => format!("{count} {run}s"),
        }
    }

    /// The bounds that contain 95 % of the drawn differences. The bootstrap draws runs, and then values within each
    /// run, because values of the same run may be alike. If runs are paired, it draws the same runs for both levels.
    pub(super) fn interval(&self) -> Option<(f64, f64)> {
        if self.least_values() < LEAST || self.least_runs() == 0 {
            return None;
        }
        let [of_one, of_base] = &self.drawn;
        let mut rng = ChaCha8Rng::seed_from_u64(SEED);
        let mut differences = Vec::with_capacity(DRAWS);
        for _ in 0..DRAWS {
            let numbers = draw(of_one, &mut rng);
            let value = drawn(self.spec, &self.one, &numbers, &mut rng);
            let numbers = match self.spec.paired {
                true => numbers,
                false => draw(of_base, &mut rng),
            };
            let at_base = drawn(self.spec, &self.base, &numbers, &mut rng);
            if let (Some(value), Some(at_base)) = (value, at_base) {
                differences.push(value - at_base);
            }
        }
        bounds(&differences)
    }

    /// The number of runs (with a single run: of values) needed for a verdict on a difference of this size, if this
    /// interval is inconclusive: an interval narrows with the square root of their number. At the edge of the tolerance
    /// no number suffices.
    pub(super) fn runs_needed(&self, difference: f64, bounds: (f64, f64), tolerance: f64) -> u64 {
        let (below, above) = (difference - bounds.0, bounds.1 - difference);
        // The factor by which the interval must be narrower to be beyond the tolerance, or within it.
        let narrower = if difference > tolerance {
            below / (difference - tolerance)
        } else if difference < -tolerance {
            above / (-tolerance - difference)
        } else {
            (below / (difference + tolerance)).max(above / (tolerance - difference))
        };
        let measured = match self.least_runs() {
            1 => self.least_values(),
            runs => runs,
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a cast saturates"
        )]
        let wanted = (f(measured as u64) * (POWER * narrower).powi(2)).ceil() as u64;
        wanted.max(measured as u64 + 1)
    }
}

/// The bounds of a statistic at a level, drawn in the same way.
pub(super) fn of_level(stat: &Stat, measure: &str, records: &[&Record]) -> Option<(f64, f64)> {
    let spec = EffectSpec {
        measure: measure.to_owned(),
        stat: stat.clone(),
        ..EffectSpec::default()
    };
    let own = Samples::new(&spec, records, records);
    if own.least_values() < LEAST {
        return None;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let drawn = (0..DRAWS).filter_map(|_| {
        let numbers = draw(&own.drawn[0], &mut rng);
        drawn(&spec, &own.one, &numbers, &mut rng)
    });
    bounds(&drawn.collect::<Vec<_>>())
}

/// For each of these values: the bounds of the share of values up to it, percent. Only runs are drawn; none with too
/// few runs.
pub(super) fn of_shares(at: &[f64], measure: &str, records: &[&Record]) -> Vec<(f64, f64, f64)> {
    let runs = runs(records);
    let counted: Vec<Vec<(f64, f64)>> = runs
        .values()
        .map(|records| {
            let values: Vec<Weighted> = records
                .iter()
                .flat_map(|one| one.weighted(measure))
                .collect();
            let all = values.iter().map(|(_, weight)| weight).sum();
            let below = |limit: f64| values.iter().filter(move |(value, _)| *value <= limit);
            at.iter()
                .map(|at| (below(*at).map(|(_, weight)| weight).sum(), all))
                .collect()
        })
        .collect();
    if counted.len() < LEAST {
        return Vec::new();
    }
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let numbers: Vec<usize> = (0..counted.len()).collect();
    let draws: Vec<Vec<usize>> = (0..DRAWS).map(|_| draw(&numbers, &mut rng)).collect();
    let at = at.iter().enumerate().filter_map(|(point, at)| {
        let share = |runs: &Vec<usize>| {
            let counts = runs.iter().map(|run| counted[*run][point]);
            let (below, all) = counts.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            100.0 * below / all
        };
        let (least, most) = bounds(&draws.iter().map(share).collect::<Vec<_>>())?;
        Some((*at, least, most))
    });
    at.collect()
}

/// The bounds of 95 % of the drawn values.
fn bounds(drawn: &[f64]) -> Option<(f64, f64)> {
    Some((quantile(drawn, TAIL)?, quantile(drawn, 1.0 - TAIL)?))
}

/// Draws as many items as there are, with replacement.
fn draw<T: Copy>(of: &[T], rng: &mut ChaCha8Rng) -> Vec<T> {
    of.iter()
        .map(|_| of[rng.random_range(0..of.len())])
        .collect()
}

fn drawn(spec: &EffectSpec, runs: &Runs<'_>, numbers: &[u32], rng: &mut ChaCha8Rng) -> Option<f64> {
    let records = numbers
        .iter()
        .filter_map(|number| runs.get(number))
        .flatten();
    if matches!(spec.stat, Stat::PercentOf(_)) {
        // Whole runs, because counts have no values to draw from.
        return spec.stat.of(records.copied(), &spec.measure);
    }
    let mut values = Vec::new();
    for record in records {
        let of_run: Vec<_> = record.weighted(&spec.measure).collect();
        values.extend(draw(&of_run, rng));
    }
    spec.stat.of_values(&values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> EffectSpec {
        EffectSpec {
            measure: "time".to_owned(),
            stat: Stat::Mean,
            ..EffectSpec::default()
        }
    }

    /// `runs` runs of a level whose times are within 40 ms.
    fn noise(runs: u32, from: f64, seed: u64) -> Vec<Record> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let record = |run| {
            let ms = from + 40.0 * rng.random::<f64>();
            Record::new([("n", "1")], run).with("time", ms)
        };
        (0..runs).map(record).collect()
    }

    fn samples<'a>(spec: &'a EffectSpec, one: &'a [Record], base: &'a [Record]) -> Samples<'a> {
        let [one, base] = [one, base].map(|level| level.iter().collect::<Vec<_>>());
        Samples::new(spec, &one, &base)
    }

    #[test]
    fn noise_has_no_effect() {
        let mut wrong = 0;
        for seed in 0..200 {
            let noise = noise(22, 200.0, seed);
            let (low, high) = samples(&spec(), &noise[..11], &noise[11..])
                .interval()
                .unwrap();
            wrong += i32::from(low > 4.0 || high < -4.0);
        }
        // It would be a twentieth if the intervals had no tolerance.
        assert!(wrong <= 10, "{wrong} of 200");
    }

    #[test]
    fn runs_needed_suffice_for_a_verdict() {
        let levels =
            |runs, more, seed| (noise(runs, 200.0 + more, seed), noise(runs, 200.0, !seed));
        // A difference above the tolerance, and one below it.
        for (more, tolerance) in [(12.0, 4.0), (0.5, 8.0)] {
            let mut wanted: Vec<u64> = (0..20)
                .map(|seed| {
                    let (one, base) = levels(8, more, seed);
                    // For the true difference: the difference that a few runs find is off by half of an interval.
                    let bounds = samples(&spec(), &one, &base).interval().unwrap();
                    let half = (bounds.1 - bounds.0) / 2.0;
                    let bounds = (more - half, more + half);
                    samples(&spec(), &one, &base).runs_needed(more, bounds, tolerance)
                })
                .collect();
            wanted.sort_unstable();
            let wanted = u32::try_from(wanted[10]).unwrap();
            let conclusive = |runs: u32| {
                let seeds = (100..120).filter(|seed| {
                    let (one, base) = levels(runs, more, *seed);
                    let bounds = samples(&spec(), &one, &base).interval();
                    bounds.is_some_and(|(low, high)| match more > tolerance {
                        true => low > tolerance,
                        false => low >= -tolerance && high <= tolerance,
                    })
                });
                seeds.count()
            };
            let (few, enough) = (conclusive(wanted / 4), conclusive(wanted));
            let found = format!(
                "{more} ms: {few} of 20 with {}, {enough} with {wanted}",
                wanted / 4
            );
            assert!(enough >= 10 && few < enough / 2, "{found}");
        }
    }
}
