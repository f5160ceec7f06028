//! Harm that policies' counters show now: since the last change of a policy's settings, but at most
//! the last ten minutes. `status` reads no counters: it reports what their last reading for another
//! purpose has shown.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use rto_agent_core::{
    policy::{PolicyName, Settings, units::format_duration},
    printable::counted,
    wire::{
        stats::{ArmStats, DirectionStats, PolicyStats, TOO_MANY_SPURIOUS},
        types::now_s,
    },
};
use rto_agent_kernel::datapath::DatapathError;

/// From this share of connections with a spurious SYN or SYN-ACK, a policy counts as harmful.
const MOSTLY_SPURIOUS: f64 = 0.5;
/// Fewer connections with a spurious SYN or SYN-ACK are not reported.
const FEWEST: u64 = 20;
/// Older counts are forgotten.
const RECENT: Duration = Duration::from_mins(10);
/// Least time between two readings that are kept.
const APART: Duration = Duration::from_secs(30);

/// What the last readings of all policies' counters have shown.
#[derive(Debug, Default)]
pub(super) struct Harms {
    policies: BTreeMap<PolicyName, Recent>,
    /// When the counters of all policies had last been read, Unix seconds.
    read_at_s: Option<u64>,
    /// Why counters could not be read the last time.
    unread: Option<String>,
}

/// A policy's readings.
#[derive(Debug)]
struct Recent {
    settings: Settings,
    /// The first reading is subtracted from the last one.
    readings: VecDeque<(Instant, Counts)>,
    harm: Harm,
}

/// A policy's counts of harm.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counts {
    connections: u64,
    /// With a spurious SYN or SYN-ACK.
    spurious: u64,
    /// With a loss whose callbacks another program had overwritten.
    callbacks_lost: u64,
    without_memory: u64,
    refused: BTreeMap<String, u64>,
}

/// What a policy's counters show.
#[derive(Clone, Debug, Default, PartialEq)]
struct Harm {
    /// The share of connections with a spurious SYN or SYN-ACK, if it is too large, and what to do about it.
    spurious: Option<(f64, String)>,
    warnings: Vec<String>,
}

impl Harms {
    /// Follows these policies. Returns those that are new or whose settings have changed: their
    /// counters must be read now, because earlier counts are not theirs.
    pub(super) fn follow<'a>(
        &mut self,
        policies: impl Iterator<Item = (&'a PolicyName, &'a Settings)>,
    ) -> Vec<&'a PolicyName> {
        let mut former = std::mem::take(&mut self.policies);
        let mut begun = Vec::new();
        for (name, settings) in policies {
            let same = former.remove(name).filter(|of| of.settings == *settings);
            let of = same.unwrap_or_else(|| {
                begun.push(name);
                Recent {
                    settings: settings.clone(),
                    readings: VecDeque::new(),
                    harm: Harm::default(),
                }
            });
            self.policies.insert(name.clone(), of);
        }
        begun
    }

    /// Notes the counters of policies; `is_last`: the counters of all policies have now been read.
    pub(super) fn note<'a>(
        &mut self,
        now: Instant,
        read: impl IntoIterator<Item = (&'a PolicyName, &'a PolicyStats)>,
        is_last: bool,
    ) {
        for (policy, stats) in read {
            if let Some(recent) = self.policies.get_mut(policy) {
                recent.note(policy, now, Counts::of(stats));
            }
        }
        self.unread = None;
        if is_last {
            self.read_at_s = Some(now_s());
        }
    }

    /// Counters could not be read.
    pub(super) fn note_unread(&mut self, error: &DatapathError) {
        self.unread = Some(format!("{error}; the statistics shown are out of date"));
    }

    /// When the counters of all policies had last been read, Unix seconds.
    pub(super) const fn read_at_s(&self) -> Option<u64> {
        self.read_at_s
    }

    /// The problems and the warnings of these policies; `short`: policies whose timers are reported as too short
    /// already.
    pub(super) fn report(
        &self,
        active: &BTreeSet<PolicyName>,
        short: &BTreeSet<PolicyName>,
    ) -> (Vec<String>, Vec<String>) {
        let (mut problems, mut warnings) = (Vec::from_iter(self.unread.clone()), Vec::new());
        for (name, recent) in self
            .policies
            .iter()
            .filter(|(name, _)| active.contains(name))
        {
            warnings.extend_from_slice(&recent.harm.warnings);
            match &recent.harm.spurious {
                Some(_) if short.contains(name) => {}
                Some((share, text)) if *share > MOSTLY_SPURIOUS => problems.push(text.clone()),
                Some((_, text)) => warnings.push(text.clone()),
                None => {}
            }
        }
        (problems, warnings)
    }
}

impl Recent {
    fn note(&mut self, name: &PolicyName, now: Instant, counts: Counts) {
        let is_over = |(at, _): &(Instant, Counts)| now.duration_since(*at) > RECENT;
        while self.readings.len() > 1 && self.readings.front().is_some_and(is_over) {
            self.readings.pop_front();
        }
        let Some((since, first)) = self.readings.front() else {
            self.readings.push_back((now, counts));
            return;
        };
        let grown = counts.since(first);
        self.harm = grown.harm(name, now.duration_since(*since));
        let last = self.readings.back().map(|(at, _)| *at);
        if last.is_some_and(|at| now.duration_since(at) >= APART) {
            self.readings.push_back((now, counts));
        }
    }
}

impl Counts {
    /// Of the treated arm, except for connections without memory: in either arm, these are counted
    /// only in part.
    fn of(stats: &PolicyStats) -> Self {
        let treated = stats.treated.directions().map(|(_, stats)| stats);
        let mut refused = BTreeMap::new();
        for (option, count) in treated.iter().flat_map(|stats| &stats.setsockopt_failures) {
            *refused.entry(option.clone()).or_default() += count;
        }
        let all = stats
            .arms()
            .flat_map(|(_, arm)| ArmStats::directions(arm).map(|(_, stats)| stats));
        Self {
            connections: stats.treated.active.connections + stats.treated.passive.connections,
            spurious: treated.iter().map(|stats| stats.spurious_connections).sum(),
            callbacks_lost: treated.iter().map(|stats| stats.callbacks_lost).sum(),
            without_memory: all
                .map(|stats: &DirectionStats| stats.storage_failures)
                .sum(),
            refused,
        }
    }

    fn since(&self, earlier: &Self) -> Self {
        let refused = self.refused.iter().map(|(option, count)| {
            let before = earlier.refused.get(option).copied().unwrap_or_default();
            (option.clone(), count.saturating_sub(before))
        });
        Self {
            connections: self.connections.saturating_sub(earlier.connections),
            spurious: self.spurious.saturating_sub(earlier.spurious),
            callbacks_lost: self.callbacks_lost.saturating_sub(earlier.callbacks_lost),
            without_memory: self.without_memory.saturating_sub(earlier.without_memory),
            refused: refused.filter(|(_, count)| *count > 0).collect(),
        }
    }

    fn harm(&self, name: &PolicyName, within: Duration) -> Harm {
        let mut harm = Harm::default();
        harm.warnings
            .extend(self.refused.iter().map(|(option, count)| {
                let times = counted(*count, "time", "times");
                format!("policy {name}: the kernel refused {option} {times}")
            }));
        let spurious = self.spurious(name, within);
        harm.spurious = spurious.filter(|(share, _)| *share > TOO_MANY_SPURIOUS);
        if self.without_memory > 0 {
            harm.warnings.push(format!(
                "policy {name}: not enough memory for the state of {}, which may lack options or \
                 be counted only in part",
                counted(self.without_memory, "connection", "connections")
            ));
        }
        if self.callbacks_lost > 0 {
            harm.warnings.push(format!(
                "policy {name}: another sock_ops program overwrote the callbacks of {} with a loss, \
                 so not all losses are counted; rto-agent doctor names the programs \
                 (other-programs)",
                counted(self.callbacks_lost, "connection", "connections")
            ));
        }
        harm
    }

    /// The share of connections that sent a spurious copy in their handshake, and what to do about
    /// it; `None` if too few have been counted.
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    fn spurious(&self, name: &PolicyName, within: Duration) -> Option<(f64, String)> {
        let Self {
            connections,
            spurious,
            ..
        } = self;
        let share = *spurious as f64 / (*connections).max(*spurious) as f64;
        (*spurious >= FEWEST).then(|| {
            let within = format_duration(Duration::from_secs(within.as_secs().max(1)));
            let text = format!(
                "policy {name}: {spurious} of {connections} connections ({:.1}%) sent a spurious \
                 SYN or SYN-ACK in the last {within}, because the initial RTO is shorter than \
                 their path RTT; raise it above the path RTT that rto-agent stats --policy {name} \
                 shows, or set it to \"auto\"",
                share * 100.0
            );
            (share, text)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near() -> PolicyName {
        "near".parse().unwrap()
    }

    fn with_initial_rto(ms: u64) -> Settings {
        Settings {
            initial_rto: Some(Duration::from_millis(ms).into()),
            ..Settings::default()
        }
    }

    fn stats(connections: u64, spurious_connections: u64) -> PolicyStats {
        active(DirectionStats {
            connections,
            spurious_connections,
            ..DirectionStats::default()
        })
        .into()
    }

    fn active(active: DirectionStats) -> ArmStats {
        ArmStats {
            active,
            ..ArmStats::default()
        }
    }

    /// Notes readings after these seconds; returns the numbers of problems and warnings.
    fn noted(harms: &mut Harms, begin: Instant, read: &[(u64, PolicyStats)]) -> (usize, usize) {
        for (after_s, stats) in read {
            let now = begin + Duration::from_secs(*after_s);
            harms.note(now, [(&near(), stats)], true);
        }
        let (problems, warnings) = harms.report(&[near()].into(), &BTreeSet::new());
        (problems.len(), warnings.len())
    }

    fn following(ms: u64) -> Harms {
        let mut harms = Harms::default();
        harms.follow([(&near(), &with_initial_rto(ms))].into_iter());
        harms
    }

    #[test]
    fn spurious_share_warns_and_beyond_half_is_a_problem() {
        let found = |connections, spurious| {
            let read = [(0, stats(0, 0)), (5, stats(connections, spurious))];
            noted(&mut following(40), Instant::now(), &read)
        };
        assert_eq!(found(10_000, 100), (0, 0));
        assert_eq!(found(10_000, 101), (0, 1));
        // Too few for a warning.
        assert_eq!(found(19, 19), (0, 0));
        assert_eq!(found(200, 150), (1, 0));
    }

    #[test]
    fn changed_settings_reset_counts() {
        let (mut harms, begin) = (following(300), Instant::now());
        let clean = [(0, stats(0, 0)), (100, stats(1500, 0))];
        assert_eq!(noted(&mut harms, begin, &clean), (0, 0));
        // A bad push: all connections since are spurious, after 1,500 that were not.
        let near = near();
        let bad = with_initial_rto(40);
        assert_eq!(harms.follow([(&near, &bad)].into_iter()), [&near]);
        let read = [(105, stats(1500, 0)), (110, stats(1640, 140))];
        assert_eq!(noted(&mut harms, begin, &read), (1, 0));
        let (problems, _) = harms.report(&[near.clone()].into(), &BTreeSet::new());
        assert!(
            problems[0].contains("140 of 140 connections (100.0%)")
                && problems[0].contains("in the last 5s"),
            "{problems:?}"
        );
        // It is not reported twice.
        let all = [near.clone()].into();
        assert_eq!(harms.report(&all, &all), (Vec::new(), Vec::new()));
        // The same settings change nothing.
        assert!(harms.follow([(&near, &bad)].into_iter()).is_empty());
        assert_eq!(noted(&mut harms, begin, &[]), (1, 0));
        // Corrected: the problem ends at once.
        let good = with_initial_rto(300);
        assert_eq!(harms.follow([(&near, &good)].into_iter()), [&near]);
        let read = [(115, stats(1640, 140)), (120, stats(1700, 140))];
        assert_eq!(noted(&mut harms, begin, &read), (0, 0));
        // Removed, and added again.
        harms.follow(std::iter::empty());
        assert_eq!(harms.follow([(&near, &good)].into_iter()), [&near]);
    }

    #[test]
    fn spurious_connections_are_forgotten_after_ten_minutes() {
        let (mut harms, begin) = (following(40), Instant::now());
        let bad = [(0, stats(0, 0)), (30, stats(200, 200))];
        assert_eq!(noted(&mut harms, begin, &bad), (1, 0));
        let every_five = |from: u64, to: u64| {
            let times = (from..to).step_by(5);
            Vec::from_iter(times.map(|at_s| (at_s, stats(200, 200))))
        };
        assert_eq!(noted(&mut harms, begin, &every_five(35, 595)), (1, 0));
        assert_eq!(noted(&mut harms, begin, &every_five(595, 640)), (0, 0));
        let kept = harms.policies[&near()].readings.len();
        assert!(kept <= 22, "{kept} readings");
    }

    #[test]
    fn connections_without_memory_are_counted_in_both_arms() {
        let counted = |treated, control| {
            let of = |storage_failures| {
                active(DirectionStats {
                    storage_failures,
                    ..DirectionStats::default()
                })
            };
            let stats = PolicyStats {
                control: Some(of(control)),
                ..of(treated).into()
            };
            let harm = Counts::of(&stats).harm(&near(), RECENT);
            harm.warnings.into_iter().next_back().unwrap_or_default()
        };
        assert_eq!(counted(0, 0), "");
        assert!(counted(2, 0).contains("state of 2 connections"));
        assert!(counted(2, 3).contains("state of 5 connections"));
        assert!(counted(0, 3).contains("state of 3 connections"));
    }

    #[test]
    fn lost_callbacks_are_reported_with_their_number() {
        let stats = |callbacks_lost| DirectionStats {
            callbacks_lost,
            ..DirectionStats::default()
        };
        let harm = |stats: ArmStats| Counts::of(&stats.into()).harm(&near(), RECENT);
        assert!(harm(active(stats(0))).warnings.is_empty());
        let unknown = ArmStats {
            unknown: stats(3),
            ..active(stats(2))
        };
        let warnings = harm(unknown).warnings;
        assert!(warnings[0].contains("callbacks of 5 connections"));
    }

    #[test]
    fn harm_of_inactive_policy_is_not_reported() {
        let refused = BTreeMap::from([("TCP_RTO_MIN_US".to_owned(), 2)]);
        let stats = DirectionStats {
            setsockopt_failures: refused,
            ..DirectionStats::default()
        };
        let (mut harms, begin) = (following(40), Instant::now());
        let read = [(0, PolicyStats::default()), (5, active(stats).into())];
        assert_eq!(noted(&mut harms, begin, &read), (0, 1));
        let warnings = |active: &[PolicyName]| {
            let active = active.iter().cloned().collect();
            harms.report(&active, &BTreeSet::new()).1
        };
        let text = "policy near: the kernel refused TCP_RTO_MIN_US 2 times";
        assert_eq!(warnings(&[near()]), [text]);
        assert!(warnings(&[]).is_empty() && harms.read_at_s().is_some());
    }
}
