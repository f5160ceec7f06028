//! The report of a soak.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde_json::Value;

use super::trend::Trend;
use crate::vm::image::EXIT;

/// Tolerated growth.
const FLAT: f64 = 0.02;
/// Unit of values that are memory. Memory varies by 2 % or more within a round, because each disturbance uses some of
/// its own, and a daemon's heap reaches its size only after each disturbance has run a few times.
const MEMORY: &str = "KiB";
/// Minimum number of rounds of one daemon, or of the kernel, to decide whether its memory grows: each compared quarter
/// has at least four.
const ROUNDS_OF_MEMORY: usize = 20;
/// Maximum interval between two checks of the kernel, s. There are five checks per second, but a busy host may stop the
/// machine.
const LONGEST_GAP: f64 = 5.0;
/// RSS without mapped files. A heap takes hundreds of rounds to reach its size. A daemon that repeated one addition
/// (refused by a full disk, then accepted, then removed) grew by 9.6 % in its first 150 rounds, by 1.8 % in the next
/// 750, and by 0.4 % in 2,000 more. Shown separately, to explain the growth of RSS.
const ANONYMOUS: &str = "anonymous part of it, KiB";
/// Values of a sample, their names, and whether they belong to the last daemon, which runs through the second half, or
/// to the kernel.
const VALUES: [(&str, &str, bool); 9] = [
    ("rss_kib", "RSS of the daemon, KiB", true),
    ("anonymous_kib", ANONYMOUS, true),
    ("descriptors", "descriptors of the daemon", true),
    ("maps", "BPF maps", false),
    ("programs", "BPF programs", false),
    ("links", "BPF links", false),
    ("slab_kib", "slab (SUnreclaim), KiB", false),
    ("percpu_kib", "per-CPU memory, KiB", false),
    ("dying_cgroups", "dying cgroups", false),
];
/// Counters, with the JSON pointers of the clients' counts and of the agent's.
const COUNTERS: [(&str, &str, &str); 3] = [
    ("connections opened", "/host/established", "/counted/active"),
    (
        "connections accepted",
        "/peer/established",
        "/counted/passive",
    ),
    (
        "SYNs retransmitted",
        "/host/syn_retransmissions",
        "/counted/syn_retransmissions",
    ),
];

/// The trend of a value over the rounds with samples.
struct Series {
    name: &'static str,
    rounds: usize,
    /// `None` if there were too few samples.
    trend: Option<Trend>,
}

impl Series {
    /// The reason why the value is not judged.
    fn not_judged(&self) -> Option<String> {
        let rounds = self.rounds;
        if self.name == ANONYMOUS {
            Some("a part of RSS".to_owned())
        } else if self.name.ends_with(MEMORY) && rounds < ROUNDS_OF_MEMORY {
            Some(format!("{rounds} rounds of {ROUNDS_OF_MEMORY}"))
        } else {
            None
        }
    }
}

/// Everything that the machine has reported. `tests/src/soak/event.rs` documents its events, which are kept as JSON.
#[derive(Debug, Default)]
pub(super) struct Report {
    begin: Value,
    rounds: u64,
    samples: Vec<Value>,
    /// Number of runs of each disturbance, and their total time, s.
    done: BTreeMap<String, (u32, f64)>,
    failures: Vec<String>,
    counters: Value,
    end: Value,
    status: Option<i32>,
}

impl Report {
    /// Adds an event; returns a line to print at once.
    pub(super) fn take(&mut self, text: &str) -> Option<String> {
        let event: Value = serde_json::from_str(text).unwrap_or_default();
        let (t_s, round) = (number(&event, "/t_s"), event["round"].as_u64().unwrap_or(0));
        self.rounds = self.rounds.max(round);
        match event["event"].as_str() {
            Some("begin") => self.begin = event,
            Some("sample") => self.samples.push(event),
            Some("counters") => self.counters = event,
            Some("end") => self.end = event,
            Some("done") => {
                let (name, took_s) = (string(&event["disturbance"]), number(&event, "/took_s"));
                let message = format!("{t_s:7.0} s, round {round}: {name} ({took_s:.1} s)");
                let (count, total) = self.done.entry(name.to_owned()).or_default();
                *count += 1;
                *total += took_s;
                return Some(message);
            }
            Some("failure") => {
                let after = event["after"].as_str().unwrap_or("the start");
                let why = string(&event["why"]);
                let failure = format!("at {t_s:.1} s, round {round}, at or after {after}: {why}");
                return Some(self.fail(failure));
            }
            _ => return Some(self.fail(format!("not an event: {text}"))),
        }
        None
    }

    fn fail(&mut self, failure: String) -> String {
        let line = format!("FAILURE {failure}");
        self.failures.push(failure);
        line
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
                Some(trend) if trend.growth() > FLAT && series.not_judged().is_none() => {
                    let (Trend { first, last }, growth) = (trend, percent(trend));
                    wrong.push(format!(
                        "{name}: {first} at first, {last} at last: {growth}"
                    ));
                }
                Some(_) => {}
            }
        }
        for (what, sent, counted) in self.counters() {
            // Also if one is missing.
            if sent != counted {
                wrong.push(format!("{what}: {sent} sent, {counted} counted"));
            }
        }
        let traffic = ["/host/established", "/host/lost", "/accepted"];
        if traffic
            .map(|path| number(&self.counters, path))
            .contains(&0.0)
        {
            wrong.push("there were no connections".to_owned());
        }
        let gap = number(&self.end, "/longest_gap_s");
        if gap.is_nan() {
            wrong.push("the machine ended before the soak did".to_owned());
        } else if gap > LONGEST_GAP {
            wrong.push(format!("the kernel was not checked for {gap:.1} s"));
        }
        if self.status != Some(0) {
            wrong.push(format!("exit status {:?}", self.status));
        }
        wrong
    }

    fn series(&self) -> [Series; 9] {
        let last = self.samples.last().map(|sample| &sample["pid"]);
        VALUES.map(|(key, name, is_of_daemon)| {
            let is_of_it = |sample: &&Value| !is_of_daemon || Some(&sample["pid"]) == last;
            let samples: Vec<&Value> = self.samples.iter().filter(is_of_it).collect();
            let values = samples.iter().filter_map(|sample| sample[key].as_f64());
            let rounds = samples.iter().map(|sample| sample["round"].as_u64());
            Series {
                name,
                rounds: rounds.collect::<BTreeSet<_>>().len(),
                trend: Trend::of(&values.collect::<Vec<_>>()),
            }
        })
    }

    /// Counters: the clients' count of each and the agent's; NaN if there is none.
    fn counters(&self) -> impl Iterator<Item = (&'static str, f64, f64)> {
        let count = |path| number(&self.counters, path);
        let pairs = COUNTERS.map(|(what, sent, counted)| (what, count(sent), count(counted)));
        let unmatched = (
            "connections without a policy",
            0.0,
            count("/counted/unmatched"),
        );
        pairs.into_iter().chain([unmatched])
    }
}

/// The number at a JSON pointer; NaN if there is none.
fn number(value: &Value, path: &str) -> f64 {
    value
        .pointer(path)
        .and_then(Value::as_f64)
        .unwrap_or(f64::NAN)
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

fn percent(trend: Trend) -> String {
    format!("{:+.2} %", 100.0 * trend.growth())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kernel, seed) = (string(&self.begin["kernel"]), &self.begin["seed"]);
        writeln!(f, "\nLinux {kernel}, seed {seed}, {} rounds\n", self.rounds)?;
        writeln!(f, "disturbance                          times      mean, s")?;
        for (name, (count, took_s)) in &self.done {
            let mean = took_s / f64::from(*count);
            writeln!(f, "{name:<32} {count:>9} {mean:>12.1}")?;
        }
        writeln!(
            f,
            "\nmedian of                          1st qtr      4th qtr    growth"
        )?;
        for series in self.series() {
            let name = series.name;
            if let Some(trend) = series.trend {
                let (Trend { first, last }, growth) = (trend, percent(trend));
                write!(f, "{name:<32} {first:>9} {last:>12} {growth:>9}")?;
            } else {
                write!(f, "{name:<32} too few samples")?;
            }
            let why = series
                .not_judged()
                .map(|why| format!("  not judged: {why}"));
            writeln!(f, "{}", why.unwrap_or_default())?;
        }
        writeln!(
            f,
            "\ncounter                               sent      counted"
        )?;
        for (what, sent, counted) in self.counters() {
            writeln!(f, "{what:<32} {sent:>9} {counted:>12}")?;
        }
        let lost = number(&self.counters, "/host/lost");
        writeln!(f, "connections never answered       {lost:>9}")?;
        let (looks, gap) = (&self.end["looks"], number(&self.end, "/longest_gap_s"));
        let samples = self.samples.len();
        writeln!(
            f,
            "\n{looks} looks at the kernel, {samples} samples, at most {gap:.2} s apart"
        )
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

    /// Forty rounds with these values of RSS, maps and slab; each half has its own daemon.
    fn soak(values: impl Fn(u32) -> (u32, u32, u32)) -> Report {
        let mut report = Report::default();
        for i in 0..600 {
            let (pid, round) = (100 + i / 300, 1 + i / ROUND);
            let (rss, maps, slab) = values(i);
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

    /// The beginnings of the failures, which are all.
    fn assert_wrong(report: &Report, expected: &[&str]) {
        let wrong = report.wrong();
        let agree = wrong.iter().zip(expected).all(|(a, b)| a.starts_with(b));
        assert!(agree && wrong.len() == expected.len(), "{wrong:?}");
    }

    #[test]
    fn growth_of_a_resource_is_a_leak() {
        assert_wrong(&soak(|_| (8000, 20, 9000)), &[]);
        // Only the last daemon counts: a new one starts with less.
        assert_wrong(&soak(|i| (4000 + i / 300 * 4000, 20, 9000)), &[]);
        assert_wrong(&soak(|i| (8000 + 2 * i, 20, 9000)), &["RSS"]);
        let maps = "BPF maps: 21 at first, 23 at last";
        assert_wrong(&soak(|i| (8000, 20 + i / 150, 9000)), &[maps]);
    }

    #[test]
    fn memory_with_too_few_rounds_is_not_judged() {
        let mut report = soak(|i| (8000 + 2 * i, 20, 9000 + i));
        assert_wrong(&report, &["RSS", "slab"]);
        // The last daemon has one round less.
        let begin = usize::try_from(ROUND).unwrap();
        report.samples.drain(300..300 + begin);
        assert_wrong(&report, &["slab"]);
        assert!(report.to_string().contains("not judged: 19 rounds of 20"));
    }

    #[test]
    fn differing_counters_failures_and_gaps_are_reported() {
        let changed = |line: &str| {
            let mut report = soak(|_| (8000, 20, 9000));
            report.take(line);
            report
        };
        let counters = COUNTERS.replace("\"active\":100", "\"active\":99");
        let expected = "connections opened: 100 sent, 99 counted";
        assert_wrong(&changed(&counters), &[expected]);
        let counters = COUNTERS.replace("\"lost\":4", "\"lost\":0");
        assert_wrong(&changed(&counters), &["there were no connections"]);
        let end = END.replace("0.4", "5.4");
        assert_wrong(&changed(&end), &["the kernel was not checked for 5.4 s"]);
        let failure = r#"{"t_s":61.25,"round":2,"event":"failure","after":"kill","why":"no policy in force"}"#;
        let expected = "at 61.2 s, round 2, at or after kill: no policy in force";
        assert_wrong(&changed(failure), &[expected]);

        let mut report = soak(|_| (8000, 20, 9000));
        report.take_other("vm-exit-status 1");
        assert_wrong(&report, &["exit status Some(1)"]);
        // A machine that reported nothing.
        assert!(Report::default().wrong().len() > 3);
    }
}
