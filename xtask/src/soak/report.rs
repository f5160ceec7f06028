//! The report of a soak.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write as _},
};

use serde::Deserialize;

use super::trend::Trend;
use crate::vm::image::EXIT;

/// Tolerated growth.
const FLAT: f64 = 0.02;
/// Unit of values that are memory. Memory varies by 2 % or more within a round, because each disturbance uses some of
/// its own, and a daemon's heap reaches its size only after each disturbance has run a few times.
const MEMORY: &str = "KiB";
/// Minimum number of rounds of one daemon, or of the kernel, to decide whether its memory grows: each compared quarter
/// has at least four.
const ROUNDS_OF_MEMORY: u32 = 20;
/// Maximum interval between two checks of the kernel, s. There are five checks per second, but a busy host may stop the
/// machine.
const LONGEST_GAP: f64 = 5.0;

/// A line from the machine with the agent; `tests/src/soak/event.rs` documents it.
#[derive(Debug, Deserialize)]
struct Line {
    t_s: f64,
    round: u32,
    #[serde(flatten)]
    event: Event,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
enum Event {
    Begin {
        seed: u64,
        kernel: String,
    },
    Sample(Sample),
    Done {
        disturbance: String,
        took_s: f64,
    },
    Failure {
        after: Option<String>,
        why: String,
    },
    Counters {
        host: Sent,
        peer: Sent,
        accepted: u64,
        counted: Counted,
    },
    End {
        looks: u64,
        longest_gap_s: f64,
    },
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Sample {
    pid: i32,
    rss_kib: f64,
    anonymous_kib: f64,
    descriptors: f64,
    maps: f64,
    programs: f64,
    links: f64,
    slab_kib: f64,
    percpu_kib: f64,
    dying_cgroups: f64,
}

/// The trend of a value over the rounds with samples.
#[derive(Debug)]
struct Series {
    name: &'static str,
    rounds: u32,
    /// `None` if there were too few samples.
    trend: Option<Trend>,
}

impl Series {
    /// The reason why the value is not judged.
    fn not_judged(&self) -> Option<String> {
        if self.name == ANONYMOUS {
            return Some("a part of RSS".to_owned());
        }
        let rounds = self.rounds;
        let is_short = self.name.ends_with(MEMORY) && rounds < ROUNDS_OF_MEMORY;
        is_short.then(|| format!("{rounds} rounds of {ROUNDS_OF_MEMORY}"))
    }
}

/// RSS without mapped files. A heap takes hundreds of rounds to reach its size. A daemon that repeated one addition
/// (refused by a full disk, then accepted, then removed) grew by 9.6 % in its first 150 rounds, by 1.8 % in the next
/// 750, and by 0.4 % in 2,000 more. Shown separately, to explain the growth of RSS.
const ANONYMOUS: &str = "anonymous part of it, KiB";

/// A value of a sample.
type Value = fn(&Sample) -> f64;

/// Resources of the last daemon, which runs through the second half.
const OF_DAEMON: [(&str, Value); 3] = [
    ("RSS of the daemon, KiB", |s| s.rss_kib),
    (ANONYMOUS, |s| s.anonymous_kib),
    ("descriptors of the daemon", |s| s.descriptors),
];
/// Resources of the kernel.
const OF_KERNEL: [(&str, Value); 6] = [
    ("BPF maps", |s| s.maps),
    ("BPF programs", |s| s.programs),
    ("BPF links", |s| s.links),
    ("slab (SUnreclaim), KiB", |s| s.slab_kib),
    ("per-CPU memory, KiB", |s| s.percpu_kib),
    ("dying cgroups", |s| s.dying_cgroups),
];

#[derive(Clone, Copy, Debug, Deserialize)]
struct Sent {
    established: u64,
    lost: u64,
    syn_retransmissions: u64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Counted {
    active: u64,
    passive: u64,
    syn_retransmissions: u64,
    unmatched: u64,
}

#[derive(Clone, Copy, Debug)]
struct Counters {
    host: Sent,
    peer: Sent,
    accepted: u64,
    counted: Counted,
}

/// Number of runs of a disturbance, and their total time, s.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    count: u32,
    took_s: f64,
}

/// Everything that the machine has reported.
#[derive(Debug, Default)]
pub(super) struct Report {
    begin: Option<(u64, String)>,
    rounds: u32,
    /// Samples and their rounds.
    samples: Vec<(u32, Sample)>,
    done: BTreeMap<String, Done>,
    failures: Vec<String>,
    counters: Option<Counters>,
    /// Number of checks of the kernel, and the longest interval between two, s.
    end: Option<(u64, f64)>,
    status: Option<i32>,
}

impl Report {
    /// Adds an event; returns a line to print at once.
    pub(super) fn take(&mut self, text: &str) -> Option<String> {
        let line: Line = match serde_json::from_str(text) {
            Ok(line) => line,
            Err(error) => {
                self.failures.push(format!("{text}: {error}"));
                return self.failures.last().cloned();
            }
        };
        let (t_s, round) = (line.t_s, line.round);
        self.rounds = self.rounds.max(round);
        match line.event {
            Event::Begin { seed, kernel } => self.begin = Some((seed, kernel)),
            Event::Sample(sample) => self.samples.push((round, sample)),
            Event::Done {
                disturbance,
                took_s,
            } => {
                let done = self.done.entry(disturbance.clone()).or_default();
                done.count += 1;
                done.took_s += took_s;
                return Some(format!(
                    "{t_s:7.0} s, round {round}: {disturbance} ({took_s:.1} s)"
                ));
            }
            Event::Failure { after, why } => {
                let after = after.unwrap_or_else(|| "the start".to_owned());
                let failure = format!("at {t_s:.1} s, round {round}, at or after {after}: {why}");
                self.failures.push(failure.clone());
                return Some(format!("FAILURE {failure}"));
            }
            Event::Counters {
                host,
                peer,
                accepted,
                counted,
            } => {
                self.counters = Some(Counters {
                    host,
                    peer,
                    accepted,
                    counted,
                });
            }
            Event::End {
                looks,
                longest_gap_s,
            } => self.end = Some((looks, longest_gap_s)),
        }
        None
    }

    /// Adds another line of the console.
    pub(super) fn take_other(&mut self, line: &str) {
        if let Some(status) = line.strip_prefix(EXIT) {
            self.status = status.trim().parse().ok();
        }
    }

    /// All failures; empty if the soak passed.
    pub(super) fn wrong(&self) -> Vec<String> {
        let mut wrong = self.failures.clone();
        for series in self.series() {
            let name = series.name;
            match series.trend {
                None => wrong.push(format!("{name}: too few samples")),
                Some(trend) if trend.growth() > FLAT && series.not_judged().is_none() => wrong
                    .push(format!(
                        "{name}: {} at first, {} at last: {}",
                        trend.first,
                        trend.last,
                        percent(trend)
                    )),
                Some(_) => {}
            }
        }
        match &self.counters {
            None => wrong.push("no counters were compared".to_owned()),
            Some(counters) => wrong.extend(counters.missing()),
        }
        match self.end {
            None => wrong.push("the machine ended before the soak did".to_owned()),
            Some((_, gap)) if gap > LONGEST_GAP => {
                wrong.push(format!("the kernel was not checked for {gap:.1} s"));
            }
            Some(_) => {}
        }
        if self.status != Some(0) {
            wrong.push(format!("exit status {:?}", self.status));
        }
        wrong
    }

    fn series(&self) -> Vec<Series> {
        let last = self.samples.last().map_or(0, |(_, sample)| sample.pid);
        let of = |(name, value): (&'static str, Value), is_of: &dyn Fn(&Sample) -> bool| {
            let samples = || self.samples.iter().filter(|(_, sample)| is_of(sample));
            let values: Vec<f64> = samples().map(|(_, sample)| value(sample)).collect();
            let rounds: BTreeSet<u32> = samples().map(|(round, _)| *round).collect();
            Series {
                name,
                rounds: u32::try_from(rounds.len()).unwrap_or(u32::MAX),
                trend: Trend::of(&values),
            }
        };
        let is_last = |sample: &Sample| sample.pid == last;
        let of_daemon = OF_DAEMON.map(|named| of(named, &is_last));
        let of_kernel = OF_KERNEL.map(|named| of(named, &|_| true));
        of_daemon.into_iter().chain(of_kernel).collect()
    }
}

impl Counters {
    /// Counters, each with its expected value.
    fn pairs(&self) -> [(&'static str, u64, u64); 4] {
        let (host, counted) = (&self.host, &self.counted);
        [
            ("connections opened", host.established, counted.active),
            (
                "connections accepted",
                self.peer.established,
                counted.passive,
            ),
            (
                "SYNs retransmitted",
                host.syn_retransmissions,
                counted.syn_retransmissions,
            ),
            ("connections without a policy", 0, counted.unmatched),
        ]
    }

    /// Conditions that were not tested, and differences.
    fn missing(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for (what, sent, counted) in self.pairs() {
            if sent != counted {
                wrong.push(format!("{what}: {sent} sent, {counted} counted"));
            }
        }
        let Sent {
            established, lost, ..
        } = self.host;
        if [established, lost, self.accepted].contains(&0) {
            wrong.push("there were no connections".to_owned());
        }
        wrong
    }
}

fn percent(trend: Trend) -> String {
    format!("{:+.2} %", 100.0 * trend.growth())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((seed, kernel)) = &self.begin {
            writeln!(f, "\nLinux {kernel}, seed {seed}, {} rounds", self.rounds)?;
        }
        writeln!(
            f,
            "\n{:<32} {:>9} {:>12}",
            "disturbance", "times", "mean, s"
        )?;
        for (name, Done { count, took_s }) in &self.done {
            let mean = took_s / f64::from(*count);
            writeln!(f, "{name:<32} {count:>9} {mean:>12.1}")?;
        }
        writeln!(
            f,
            "\n{:<32} {:>9} {:>12} {:>9}",
            "median of", "1st qtr", "4th qtr", "growth"
        )?;
        for series in self.series() {
            let name = series.name;
            match series.trend {
                Some(trend) => {
                    let (first, last, growth) = (trend.first, trend.last, percent(trend));
                    write!(f, "{name:<32} {first:>9} {last:>12} {growth:>9}")?;
                    if let Some(why) = series.not_judged() {
                        write!(f, "  not judged: {why}")?;
                    }
                    writeln!(f)?;
                }
                None => writeln!(f, "{name:<32} too few samples")?,
            }
        }
        if let Some(counters) = &self.counters {
            writeln!(f, "\n{:<32} {:>9} {:>12}", "counter", "sent", "counted")?;
            for (what, sent, counted) in counters.pairs() {
                writeln!(f, "{what:<32} {sent:>9} {counted:>12}")?;
            }
            writeln!(
                f,
                "{:<32} {:>9}",
                "connections never answered", counters.host.lost
            )?;
        }
        if let Some((looks, gap)) = self.end {
            let mut line = format!(
                "\n{looks} looks at the kernel, {} samples",
                self.samples.len()
            );
            write!(line, ", at most {gap:.2} s apart")?;
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTERS: &str = r#"{"t_s":599.0,"round":12,"event":"counters",
        "host":{"established":100,"unanswered":0,"refused":0,"lost":4,"syn_retransmissions":9,"error":null},
        "peer":{"established":80,"unanswered":0,"refused":0,"lost":0,"syn_retransmissions":0,"error":null},
        "accepted":80,
        "counted":{"active":100,"passive":80,"syn_retransmissions":9,"unmatched":0}}"#;
    const END: &str = r#"{"t_s":600.0,"round":12,"event":"end","looks":3000,"longest_gap_s":0.4}"#;

    /// Samples in a round.
    const ROUND: u32 = 15;

    /// Forty rounds with these values; each half has its own daemon.
    fn with_samples(rss_kib: impl Fn(u32) -> u32, maps: impl Fn(u32) -> u32) -> Report {
        with_slab(rss_kib, maps, |_| 9000)
    }

    fn with_slab(
        rss_kib: impl Fn(u32) -> u32,
        maps: impl Fn(u32) -> u32,
        slab: impl Fn(u32) -> u32,
    ) -> Report {
        let mut report = Report::default();
        for i in 0..600 {
            let (pid, round) = (100 + i / 300, 1 + i / ROUND);
            let (rss, maps, slab) = (rss_kib(i), maps(i), slab(i));
            report.take(&format!(
                r#"{{"t_s":{i}.0,"round":{round},"event":"sample","pid":{pid},"rss_kib":{rss},"anonymous_kib":2000,
                "descriptors":20,"maps":{maps},"programs":5,"links":4,"slab_kib":{slab},"percpu_kib":700,"dying_cgroups":0}}"#
            ));
        }
        report.take(COUNTERS);
        report.take(END);
        report.take_other("vm-exit-status 0");
        report
    }

    fn good() -> Report {
        with_samples(|_| 8000, |_| 20)
    }

    #[test]
    fn a_good_one() {
        let report = good();
        assert_eq!(report.wrong(), [""; 0]);
        let text = report.to_string();
        assert!(text.contains("RSS of the daemon, KiB"), "{text}");
        assert!(text.contains("3000 looks"), "{text}");
    }

    #[test]
    fn leaks() {
        // Only the last daemon counts: a new one starts with less.
        let other = with_samples(|i| if i < 300 { 4000 } else { 8000 }, |_| 20);
        assert_eq!(other.wrong(), [""; 0]);
        let daemon = with_samples(|i| 8000 + 2 * i, |_| 20).wrong();
        assert!(
            daemon.len() == 1 && daemon[0].starts_with("RSS"),
            "{daemon:?}"
        );
        let kernel = with_samples(|_| 8000, |i| 20 + i / 150).wrong();
        assert!(
            kernel.len() == 1 && kernel[0].starts_with("BPF maps: 21 at first, 23 at last"),
            "{kernel:?}"
        );
    }

    #[test]
    fn memory_with_too_few_rounds_is_not_judged() {
        let mut report = with_slab(|i| 8000 + 2 * i, |_| 20, |i| 9000 + i);
        let wrong = report.wrong();
        assert!(
            wrong.len() == 2 && wrong[0].starts_with("RSS") && wrong[1].starts_with("slab"),
            "{wrong:?}"
        );
        // The last daemon has one round less.
        report
            .samples
            .drain(300..300 + usize::try_from(ROUND).unwrap());
        let wrong = report.wrong();
        assert!(
            wrong.len() == 1 && wrong[0].starts_with("slab"),
            "{wrong:?}"
        );
        let text = report.to_string();
        assert!(text.contains("not judged: 19 rounds of 20"), "{text}");
    }

    #[test]
    fn differing_counters_failures_and_gaps_are_reported() {
        let mut report = good();
        report.take(&COUNTERS.replace("\"active\":100", "\"active\":99"));
        assert_eq!(report.wrong(), ["connections opened: 100 sent, 99 counted"]);

        let mut report = good();
        let said = report.take(
            r#"{"t_s":61.25,"round":2,"event":"failure","after":"kill","why":"no policy in force"}"#,
        );
        assert!(said.is_some_and(|said| said.starts_with("FAILURE")));
        let expected = "at 61.2 s, round 2, at or after kill: no policy in force";
        assert_eq!(report.wrong(), [expected]);

        let mut report = good();
        report.take(&COUNTERS.replace("\"lost\":4", "\"lost\":0"));
        assert_eq!(report.wrong(), ["there were no connections"]);

        let mut report = good();
        report.take(&END.replace("0.4", "5.4"));
        assert_eq!(report.wrong(), ["the kernel was not checked for 5.4 s"]);

        let mut report = good();
        report.take_other("vm-exit-status 1");
        assert_eq!(report.wrong(), ["exit status Some(1)"]);

        // A machine that reported nothing.
        assert!(Report::default().wrong().len() > 3);
    }
}
