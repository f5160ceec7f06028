//! Advice on a policy's timers: what `rto-agent advise` prints for the samples of a daemon or of a fleet, and
//! `rto-lab advise` for those of a capture.

use std::time::Duration;

use rto_model::{
    advice::{self, Advice, Handshakes, NoSuggestion, Question, RTO_MIN_US, RoundTrips},
    syn::INITIAL_RTO_US,
};

mod answer;
mod text;

pub use self::{
    answer::{Answer, Decided, Evidence},
    text::{cidrs, percent, rounded, text},
};
use crate::policy::{
    Cidr, HostFacts, InitialRtoSetting, PolicyName, Settings,
    compile::{check_prefix_width, compile},
};

/// Observed for less than this, other times of day may be missing.
pub const DAY_MS: u64 = 24 * 3_600_000;
/// The valid shares: a smaller one needs more samples than any host has.
const SHARES: std::ops::RangeInclusive<f64> = 0.000_01..=0.5;

/// Parses `--spurious`.
pub fn share(text: &str) -> Result<f64, String> {
    let percent = text.trim().strip_suffix('%');
    let Some(percent) = percent.and_then(|number| number.trim_end().parse::<f64>().ok()) else {
        return Err(format!(
            "--spurious {text}: not a percentage; write, for example, 0.1%"
        ));
    };
    let share = percent / 100.0;
    if SHARES.contains(&share) {
        Ok(share)
    } else {
        Err(format!("--spurious {text}: must be 0.001% to 50%"))
    }
}

/// The times of all connections, and of each direction if there are several.
#[derive(Debug)]
pub struct ByDirection<T> {
    /// All of them.
    pub all: T,
    /// By direction.
    pub each: Vec<(&'static str, T)>,
}

impl<T> ByDirection<T> {
    fn new(
        all: T,
        each: impl IntoIterator<Item = (&'static str, T)>,
        is_empty: impl Fn(&T) -> bool,
    ) -> Self {
        let mut each: Vec<_> = each
            .into_iter()
            .filter(|(_, times)| !is_empty(times))
            .collect();
        if each.len() == 1 {
            each.clear();
        }
        Self { all, each }
    }
}

impl ByDirection<Handshakes> {
    /// The handshakes of these directions.
    pub fn handshakes(each: impl IntoIterator<Item = (&'static str, Handshakes)>) -> Self {
        let each: Vec<_> = each.into_iter().collect();
        let mut all = Handshakes::default();
        for (_, handshakes) in &each {
            all.took.extend(&handshakes.took);
            all.longer_than.extend(&handshakes.longer_than);
        }
        Self::new(all, each, |handshakes| handshakes.count() == 0)
    }
}

impl ByDirection<RoundTrips> {
    /// The round trips of all directions, and of each.
    pub fn round_trips(
        all: RoundTrips,
        each: impl IntoIterator<Item = (&'static str, RoundTrips)>,
    ) -> Self {
        Self::new(all, each, RoundTrips::is_empty)
    }
}

/// The active values, microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Present {
    /// The initial RTO.
    pub initial_rto_us: u64,
    /// The minimum RTO.
    pub rto_min_us: u64,
}

impl Present {
    /// The kernel's defaults.
    pub const KERNEL: Self = Self {
        initial_rto_us: INITIAL_RTO_US,
        rto_min_us: RTO_MIN_US,
    };
}

/// Everything that advice is based on.
#[derive(Debug)]
pub struct Gathered<S> {
    /// Where it is from.
    pub source: S,
    /// The policy that the suggestion is for, if there is one.
    pub policy: Option<PolicyName>,
    /// The prefixes that the suggestion is for.
    pub cidrs: Vec<Cidr>,
    /// The active values.
    pub present: Present,
    /// The policy's settings.
    pub settings: Settings,
    /// The time observed, milliseconds, if known; for several hosts the shortest.
    pub observed_ms: Option<u64>,
    /// The observed times.
    pub evidence: Vec<Evidence>,
    /// Times of handshakes.
    pub handshakes: ByDirection<Handshakes>,
    /// Round trips of established connections.
    pub round_trips: ByDirection<RoundTrips>,
    /// Reasons not to follow the advice.
    pub warnings: Vec<String>,
    /// Explanations.
    pub notes: Vec<String>,
}

impl<S> Gathered<S> {
    /// No evidence for a new policy, with the kernel's own timers as the active values.
    pub fn new(source: S) -> Self {
        Self {
            source,
            policy: None,
            cidrs: Vec::new(),
            present: Present::KERNEL,
            settings: Settings::default(),
            observed_ms: None,
            evidence: Vec::new(),
            handshakes: ByDirection::handshakes([]),
            round_trips: ByDirection::round_trips(RoundTrips::Flows(Vec::new()), []),
            warnings: Vec::new(),
            notes: Vec::new(),
        }
    }
}

/// The answer to a question, for a host with these facts.
pub fn answer<S>(gathered: Gathered<S>, question: &Question, host: &HostFacts) -> Answer<S> {
    let present = gathered.present;
    let auto = gathered.settings.auto_initial_rto();
    let question = &Question {
        min_us: auto.map_or(question.min_us, |auto| auto.to_law(host.hz).min_us),
        ..*question
    };
    let initial_rto = decided(&gathered.handshakes, |times| {
        advice::initial_rto(times, question, present.initial_rto_us)
    });
    let rto_min = decided(&gathered.round_trips, |times| {
        advice::rto_min(times, question, present.rto_min_us)
    });
    let mut answer = Answer {
        source: gathered.source,
        hz: question.hz,
        spurious: question.share,
        peer_delack_us: question.peer_delack_us,
        observed_ms: gathered.observed_ms,
        evidence: gathered.evidence,
        initial_rto,
        rto_min,
        snippet: None,
        command: None,
        warnings: gathered.warnings,
        notes: gathered.notes,
        is_new_policy: gathered.policy.is_none(),
    };
    match answer.observed_ms {
        Some(ms) if ms < DAY_MS => answer.warnings.push(format!(
            "observed for only {}: other times of day may need longer timers; repeat after a day",
            rounded(ms)
        )),
        Some(_) => {}
        None => answer.warnings.push(
            "the length of the observation is unknown: if it is less than a day, times of day that \
             need longer timers may be missing"
                .to_owned(),
        ),
    }
    let handshakes = match gathered.handshakes.all.longer_than.count() {
        0 => "handshakes",
        _ => "handshakes (those without a round trip included)",
    };
    for (setting, what, advice) in [
        ("initial_rto", handshakes, &answer.initial_rto.advice),
        ("rto_min", "round trips", &answer.rto_min.advice),
    ] {
        if advice.reason == Some(NoSuggestion::TooFewSamples) {
            let by = text::needed_by(setting, question.share);
            // The law needs as many for any share.
            let or = match setting {
                "initial_rto" => "",
                _ => ", or accept a larger share (--spurious)",
            };
            answer.warnings.push(format!(
                "{setting}: {} of the {} {what} that {by} needs: wait for more{or}",
                advice.samples, advice.needed,
            ));
        } else if advice.present.expected.share > question.share {
            answer.warnings.push(format!(
                "the active {setting} = {} is too short: {} of the {what} took longer",
                text::duration(advice.present.value_us),
                percent(advice.present.expected.share),
            ));
        }
    }
    let present = &gathered.settings;
    suggest(&mut answer, gathered.policy, &gathered.cidrs, present, host);
    answer
}

/// The advice for the direction that needs the longest value, because a setting applies to all
/// directions.
fn decided<T>(times: &ByDirection<T>, advise: impl Fn(&T) -> Advice) -> Decided {
    let rank = |advice: &Advice| {
        let enough = advice.samples >= advice.needed;
        let jiffies = advice.suggestion.map_or(u64::MAX, |c| c.jiffies);
        (enough, if enough { jiffies } else { advice.samples })
    };
    let mut best = Decided {
        by: "all",
        advice: advise(&times.all),
    };
    for (by, times) in &times.each {
        let advice = advise(times);
        if rank(&advice) > rank(&best.advice) {
            best = Decided { by, advice };
        }
    }
    best
}

/// Adds the suggestions to a policy, unless a host with these facts would refuse it.
fn suggest<S>(
    answer: &mut Answer<S>,
    name: Option<PolicyName>,
    cidrs: &[Cidr],
    present: &Settings,
    host: &HostFacts,
) {
    let value = |decided: &Decided| {
        let suggestion = decided.advice.suggestion.as_ref()?;
        Some(Duration::from_micros(suggestion.value_us))
    };
    // A learnt timer needs no advice.
    let initial_rto = value(&answer.initial_rto).map(InitialRtoSetting::Fixed);
    let initial_rto = initial_rto
        .filter(|rto| present.auto_initial_rto().is_none() && Some(*rto) != present.initial_rto);
    let rto_min = value(&answer.rto_min).filter(|rto| Some(*rto) != present.rto_min);
    // The advice on rto_min assumes that rto_restart is off.
    let restarts = present.rto_restart == Some(true) && rto_min.is_some();
    let changes = Settings {
        initial_rto,
        rto_min,
        rto_restart: restarts.then_some(false),
        ..Settings::default()
    };
    if changes.is_empty() {
        return;
    }
    if restarts {
        answer.warnings.push(
            "rto_restart lowers the policy's rto_min by the round trip: the effective value is \
             shorter than shown here, and the suggestion assumes no rto_restart"
                .to_owned(),
        );
    }
    let settings = Settings {
        initial_rto: changes.initial_rto.or(present.initial_rto),
        rto_min: changes.rto_min.or(present.rto_min),
        rto_restart: changes.rto_restart.or(present.rto_restart),
        ..present.clone()
    };
    match check(&settings, cidrs, host) {
        Ok(warnings) => answer.warnings.extend(warnings),
        Err(errors) => {
            let errors = errors.into_iter();
            let errors = errors.map(|error| format!("rto-agent check would reject this: {error}"));
            answer.warnings.extend(errors);
            return;
        }
    }
    match name {
        None => answer.snippet = Some(text::policy(cidrs, &settings)),
        Some(name) if name.is_made_of(present) => {
            answer.command = Some(text::command(cidrs, &settings));
        }
        Some(name) => answer.snippet = Some(text::keys(&name, &changes)),
    }
}

/// The warnings or errors that `check` would report for a policy.
fn check(
    settings: &Settings,
    cidrs: &[Cidr],
    host: &HostFacts,
) -> Result<Vec<String>, Vec<String>> {
    let compiled = compile(
        &PolicyName::for_settings(settings, |_| false),
        settings,
        host,
    );
    let too_wide = cidrs
        .iter()
        .find_map(|cidr| check_prefix_width(cidr, settings).err());
    match (compiled, too_wide) {
        (Ok(compiled), None) => {
            let warnings = compiled.warnings.iter();
            Ok(warnings.map(ToString::to_string).collect())
        }
        (compiled, too_wide) => {
            let errors = compiled.err().unwrap_or_default().into_iter();
            Err(errors.chain(too_wide).map(|e| e.to_string()).collect())
        }
    }
}

#[cfg(test)]
mod tests;
