//! The comparison of a policy's arms: turns their counters into a verdict.

use rto_agent_common::{GOOD_US, Statistics};
use rto_agent_core::{
    policy::{PolicyName, Settings, Share},
    wire::{
        events::VerdictEvent,
        histogram::HistogramView,
        holdout::{ArmConnects, Difference, HoldoutView},
        stats::ArmStatistics,
    },
};
use rto_model::tune::{
    evidence::Probability,
    holdout::{Arms, Assessment, Comparison, Counts, Increments, Verdict},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::moment::Moment;

/// How long after a change of the arms counting begins, milliseconds: an attempt of before is good
/// by then, or never will be. (An attempt is good within 500 ms; the rest is for the change itself.)
const BEGINS_AFTER_MS: u64 = if cfg!(test) { 40 } else { 2000 };

/// What is compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HoldoutSpec {
    /// Share of connections in the control arm.
    share: Share,
    /// Identifies the policy's other settings.
    settings: String,
}

impl HoldoutSpec {
    pub(super) fn new(share: Share, settings: &Settings) -> Self {
        let others = Settings {
            holdout: None,
            ..settings.clone()
        };
        // Later versions must omit unset new settings, so that digests stay the same.
        let text = serde_json::to_string(&others).unwrap_or_default();
        let digest = Sha256::digest(text);
        Self {
            share,
            settings: digest.iter().take(8).map(|b| format!("{b:02x}")).collect(),
        }
    }
}

/// The comparison of one policy, in the form that outlives the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Holdout {
    spec: HoldoutSpec,
    comparison: Comparison,
    /// Connect times of both arms.
    connect_time: Arms<HistogramView>,
    /// When counting began, milliseconds of the tuner's clock.
    since_ms: Option<u64>,
    /// When the verdict was reached.
    at_ms: Option<u64>,
    /// The last reading. Not stored: what is counted without a daemon is left out.
    #[serde(skip)]
    last: Option<(u64, Arms<Counted>)>,
    /// Time until counting begins, milliseconds.
    #[serde(skip)]
    begins_in_ms: u64,
    /// Why nothing is counted.
    #[serde(skip)]
    paused: Option<&'static str>,
}

impl Holdout {
    fn new(spec: HoldoutSpec) -> Option<Self> {
        let share = f64::from(spec.share.below()) / 2_f64.powi(32);
        Some(Self {
            comparison: Comparison::new(Probability::try_from(1.0 - share).ok()?),
            spec,
            connect_time: Arms::default(),
            since_ms: None,
            at_ms: None,
            last: None,
            begins_in_ms: 0,
            paused: None,
        })
    }

    /// Follows the policy's settings. Another share starts again, but does not end a fallback;
    /// other settings do.
    pub(super) fn following(known: Option<Self>, spec: Option<&HoldoutSpec>) -> Option<Self> {
        let spec = spec?;
        match known {
            Some(known) if known.spec == *spec => Some(known),
            Some(known) if known.is_harm() && known.spec.settings == spec.settings => Some(known),
            _ => Self::new(spec.clone()),
        }
    }

    /// Its spec, if it compares a policy with these settings.
    pub(super) fn spec_with(&self, settings: &Settings) -> Option<HoldoutSpec> {
        Some(HoldoutSpec::new(self.spec.share, settings)).filter(|spec| *spec == self.spec)
    }

    /// Whether harm is proven: new connections get the kernel's own timers.
    pub(super) fn is_harm(&self) -> bool {
        self.comparison.verdict() == Verdict::Harm
    }

    /// The counters have no relation to the last reading.
    pub(super) fn begin_again(&mut self) {
        self.last = None;
    }

    /// Ends a fallback, or starts again after a mismatch. Returns whether there was one.
    pub(super) fn resume(&mut self) -> bool {
        if self.comparison.is_open() {
            return false;
        }
        if let Some(new) = Self::new(self.spec.clone()) {
            *self = new;
        }
        true
    }

    /// Evaluates the growth of the counters since the last call; returns a new verdict. `paused`:
    /// why the arms cannot be compared now.
    pub(super) fn look(
        &mut self,
        now_ms: u64,
        statistics: &ArmStatistics,
        paused: Option<&'static str>,
    ) -> (bool, Option<Verdict>) {
        self.paused = paused;
        let now = Counted::of(statistics);
        let Some((last_ms, before)) = self.last.replace((now_ms, now.clone())) else {
            self.begins_in_ms = BEGINS_AFTER_MS;
            return (false, None);
        };
        if paused.is_some() || !self.comparison.is_open() {
            self.begins_in_ms = BEGINS_AFTER_MS;
            return (false, None);
        }
        let elapsed_ms = now_ms.saturating_sub(last_ms);
        let grown = now.zip(&before, Counted::since);
        let under_way = grown.map(|arm| arm.under_way(elapsed_ms));
        if self.begins_in_ms > 0 {
            self.begins_in_ms = self.begins_in_ms.saturating_sub(elapsed_ms);
            self.comparison.wait(under_way);
            return (false, None);
        }
        self.since_ms.get_or_insert(last_ms);
        self.connect_time = self.connect_time.zip(&grown, |all, more| {
            all.with(&more.connect_time, u64::saturating_add)
        });
        let has_grown = grown != Arms::default();
        let increments = Increments {
            counts: grown.map(|arm| arm.counts),
            under_way,
        };
        let verdict = self.comparison.observe(&increments, elapsed_ms);
        if verdict.is_some() {
            self.at_ms = Some(now_ms);
        }
        (has_grown, verdict)
    }

    /// The verdict and the counts, for the log and watchers.
    pub(super) fn event(&self, policy: &PolicyName, now: Moment) -> VerdictEvent {
        let Arms { treated, control } = self.comparison.counts().map(|counts| {
            let (bad, attempts) = (counts.bad(), counts.attempts);
            format!("{bad} of {attempts}")
        });
        VerdictEvent {
            at_us: now.unix_ms.saturating_mul(1000),
            policy: policy.clone(),
            verdict: self.comparison.verdict(),
            text: format!(
                "{}; bad connects: {treated} with the policy's timers, {control} with the \
                 kernel's own",
                self.text(&self.comparison.assess())
            ),
        }
    }

    /// The view. `fallback`: whether the fallback is in force.
    pub(super) fn view(&self, now: Moment, fallback: bool) -> HoldoutView {
        let counts = self.comparison.counts();
        let evidence = self.comparison.assess();
        HoldoutView {
            verdict: self.comparison.verdict(),
            text: self.text(&evidence),
            fallback,
            share: self.spec.share,
            since_ms: self.since_ms.map(|at_ms| now.unix(at_ms)),
            at_ms: self.at_ms.map(|at_ms| now.unix(at_ms)),
            arms: counts.zip(&self.connect_time, |counts, times| ArmConnects {
                attempts: counts.attempts,
                bad: counts.bad(),
                mean_connect_time_us: times.mean_us(),
            }),
            evidence,
            connect_time_difference: Difference::of(&self.connect_time),
        }
    }

    fn text(&self, evidence: &Assessment) -> String {
        let counts = self.comparison.counts();
        let attempts = counts.treated.attempts + counts.control.attempts;
        let bad = counts.treated.bad() + counts.control.bad();
        match self.comparison.verdict() {
            Verdict::Gain => {
                "gain: fewer bad connects with the policy's timers than with the kernel's own"
                    .to_owned()
            }
            Verdict::Harm => {
                "harm: more bad connects with the policy's timers than with the kernel's own"
                    .to_owned()
            }
            Verdict::Invalid => format!(
                "invalid: the arms do not have the attempts that holdout = {} gives them, so \
                 connections are drawn or counted wrongly; rto-agent tune resume starts again",
                self.spec.share
            ),
            Verdict::NotYet => match (self.paused, evidence.attempts_needed) {
                (Some(why), _) => format!("not yet: nothing is compared: {why}"),
                (None, Some(needed)) => format!(
                    "not yet: about {} more attempts are needed if bad connects stay as frequent",
                    rounded(needed)
                ),
                (None, None) if attempts == 0 => "not yet: no attempt so far".to_owned(),
                (None, None) if bad == 0 => {
                    "not yet: no bad connect so far, and a verdict needs some".to_owned()
                }
                (None, None) => "not yet: the arms hardly differ".to_owned(),
            },
        }
    }
}

/// An estimate in two digits.
const fn rounded(count: u64) -> u64 {
    let mut unit = 1;
    while count / unit >= 100 {
        unit *= 10;
    }
    count.div_ceil(unit) * unit
}

/// The counters of one arm, of connections that this host opened. Sockets that were open before
/// their policy were not drawn into an arm.
#[derive(Clone, Debug, Default, PartialEq)]
struct Counted {
    counts: Counts,
    connect_time: HistogramView,
}

impl Counted {
    /// The counters of both arms; all zero for a missing control arm.
    fn of(statistics: &ArmStatistics) -> Arms<Self> {
        let of_arm = |[active, ..]: &[Statistics; 3]| Self {
            counts: Counts {
                attempts: active.counters.attempts,
                good: active.connections().saturating_sub(active.counters.late),
            },
            connect_time: (&active.connect_times()).into(),
        };
        Arms {
            treated: of_arm(&statistics.treated),
            control: statistics.control.as_ref().map(of_arm).unwrap_or_default(),
        }
    }

    fn since(&self, earlier: &Self) -> Self {
        Self {
            counts: self.counts.since(&earlier.counts),
            connect_time: self
                .connect_time
                .with(&earlier.connect_time, u64::saturating_sub),
        }
    }

    /// The average number of attempts under way that became good, over a period.
    #[expect(clippy::cast_precision_loss, reason = "an average")]
    fn under_way(&self, in_ms: u64) -> f64 {
        if in_ms == 0 {
            return 0.0;
        }
        let good = self.connect_time.buckets.iter();
        // Each lasts as long as its bucket's upper bound.
        let sum_us: f64 = good
            .filter(|bucket| bucket.from_us <= u64::from(GOOD_US))
            .map(|bucket| (bucket.count * bucket.below_us.unwrap_or_default()) as f64)
            .sum();
        sum_us / (in_ms * 1000) as f64
    }
}

#[cfg(test)]
mod tests {
    use rto_agent_common::histogram::bucket_of;

    use super::*;

    /// Counters of an arm: attempts, and of these bad ones.
    fn arm((attempts, bad): (u64, u64)) -> [Statistics; 3] {
        let mut active = Statistics::default();
        active.counters.attempts = attempts;
        active.path_rtt.buckets[bucket_of(1000)] = attempts - bad;
        active.path_rtt.sum_us = 1000 * (attempts - bad);
        [active, Statistics::default(), Statistics::default()]
    }

    fn arms(treated: (u64, u64), control: (u64, u64)) -> ArmStatistics {
        ArmStatistics {
            treated: arm(treated),
            control: Some(arm(control)),
        }
    }

    fn settings(toml: &str) -> Settings {
        toml::from_str(toml).unwrap()
    }

    fn spec(share: &str, toml: &str) -> HoldoutSpec {
        HoldoutSpec::new(share.parse().unwrap(), &settings(toml))
    }

    fn started() -> Holdout {
        Holdout::following(None, Some(&spec("50%", "initial_rto = '100ms'"))).unwrap()
    }

    /// Looks each second until a verdict, or for a time in which any must come.
    fn look(holdout: &mut Holdout, from_s: u64, statistics: &ArmStatistics) -> Option<Verdict> {
        (from_s..from_s + 20).find_map(|second| holdout.look(second * 1000, statistics, None).1)
    }

    fn proven_harm() -> Holdout {
        let mut holdout = started();
        assert_eq!(look(&mut holdout, 0, &arms((0, 0), (0, 0))), None);
        let harm = arms((1000, 40), (1000, 0));
        assert_eq!(look(&mut holdout, 20, &harm), Some(Verdict::Harm));
        holdout
    }

    #[test]
    fn counts_before_the_holdout_are_left_out() {
        let mut holdout = started();
        let before = arms((1000, 40), (1000, 0));
        assert_eq!(look(&mut holdout, 0, &before), None);
        let gain = arms((2000, 40), (2000, 40));
        assert_eq!(look(&mut holdout, 20, &gain), Some(Verdict::Gain));
        let now = Moment::default();
        let view = holdout.view(now, false);
        assert_eq!(
            (view.arms.treated.attempts, view.arms.control.bad),
            (1000, 40)
        );
        assert_eq!(view.arms.treated.mean_connect_time_us, Some(1000.0));
        assert!(view.text.starts_with("gain: fewer bad connects"));
    }

    #[test]
    fn only_other_settings_or_an_operator_end_proven_harm() {
        let toml = "initial_rto = '100ms'";
        let following = |toml: &str, share: &str| {
            let followed = Holdout::following(Some(proven_harm()), Some(&spec(share, toml)));
            followed.unwrap().is_harm()
        };
        assert!(following(toml, "50%") && following(toml, "5%"));
        assert!(!following("initial_rto = '200ms'", "50%"));
        assert!(Holdout::following(Some(proven_harm()), None).is_none());
        let mut resumed = proven_harm();
        assert!(resumed.resume() && !resumed.is_harm() && !resumed.resume());
        assert_eq!(resumed.comparison.counts(), &Arms::default());
    }

    #[test]
    fn changed_holdout_share_resets_counts() {
        let mut holdout = started();
        look(&mut holdout, 0, &arms((0, 0), (0, 0)));
        look(&mut holdout, 20, &arms((100, 1), (100, 1)));
        let toml = "initial_rto = '100ms'";
        let same = Holdout::following(Some(holdout.clone()), Some(&spec("50%", toml)));
        assert_eq!(same, Some(holdout.clone()));
        let other = Holdout::following(Some(holdout), Some(&spec("5%", toml))).unwrap();
        assert_eq!(other.comparison.counts(), &Arms::default());
    }

    #[test]
    fn restart_keeps_counts_without_pause() {
        let mut holdout = started();
        look(&mut holdout, 0, &arms((0, 0), (0, 0)));
        look(&mut holdout, 20, &arms((100, 1), (100, 1)));
        let text = serde_json::to_string(&holdout).unwrap();
        let mut restarted: Holdout = serde_json::from_str(&text).unwrap();
        let later = arms((900, 99), (120, 1));
        assert_eq!(look(&mut restarted, 60, &later), None);
        assert_eq!(restarted.comparison.counts(), holdout.comparison.counts());
        look(&mut restarted, 90, &arms((1000, 99), (220, 1)));
        assert_eq!(restarted.comparison.counts().treated.attempts, 200);
        let mut harm: Holdout =
            serde_json::from_str(&serde_json::to_string(&proven_harm()).unwrap()).unwrap();
        assert_eq!(look(&mut harm, 0, &later), None);
        assert!(harm.is_harm());
    }

    #[test]
    fn nothing_is_compared_while_paused() {
        let mut holdout = started();
        look(&mut holdout, 0, &arms((0, 0), (0, 0)));
        for second in 20..40 {
            let harm = arms((1000, 40), (1000, 0));
            let looked = holdout.look(second * 1000, &harm, Some("no timer"));
            assert_eq!(looked, (false, None));
        }
        assert_eq!(
            holdout.text(&holdout.comparison.assess()),
            "not yet: nothing is compared: no timer"
        );
        assert_eq!(look(&mut holdout, 40, &arms((1000, 40), (1000, 0))), None);
        assert_eq!(
            holdout.text(&holdout.comparison.assess()),
            "not yet: no attempt so far"
        );
    }

    #[test]
    fn average_in_flight_counts_good_attempts_only() {
        let mut active = Statistics::default();
        // 100 of 320 to 384 ms in a second, and some late ones.
        active.path_rtt.buckets[bucket_of(350_000)] = 100;
        active.path_rtt.buckets[bucket_of(1_000_000)] = 100;
        let none = Statistics::default();
        let counted = Counted::of(&ArmStatistics {
            treated: [active, none, none],
            control: None,
        });
        let Arms { treated, control } = counted.map(|arm| arm.under_way(1000));
        assert!((35.0..40.0).contains(&treated), "{treated}");
        assert_eq!(control, 0.0);
    }

    #[test]
    fn needed_attempts_are_rounded_to_two_digits() {
        let texts = [0, 7, 99, 101, 12_345].map(rounded);
        assert_eq!(texts, [0, 7, 99, 110, 13_000]);
    }
}
