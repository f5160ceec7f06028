//! Published completion times, and times in the same form.

use anyhow::Context as _;
use serde::Deserialize;

use super::case::Coverage;

/// Completion times that were published for a case: so many requests between two times.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Published {
    case: String,
    coverage: String,
    /// Both are empty for requests without a time.
    from_ms: Option<u64>,
    to_ms: Option<u64>,
    count: u64,
}

/// All of them.
pub(super) fn all() -> anyhow::Result<Vec<Published>> {
    let mut reader = csv::Reader::from_reader(include_str!("published.csv").as_bytes());
    let all: Result<Vec<_>, _> = reader.deserialize().collect();
    all.context("published.csv")
}

/// What was published for a case, as text; `None`: nothing.
pub(super) fn text(all: &[Published], case: &str, coverage: Coverage) -> Option<String> {
    let coverage = match coverage {
        Coverage::Kernel => "kernel",
        // What was published had the one timer for SYN and SYN-ACK.
        Coverage::ServerShort => "server",
        Coverage::Agent | Coverage::Server | Coverage::Auto => return None,
    };
    let groups: Vec<_> = all
        .iter()
        .filter(|one| one.case == case && one.coverage == coverage)
        .map(|one| Group {
            from_ms: one.from_ms.unwrap_or(0),
            to_ms: one.to_ms.unwrap_or(0),
            count: one.count,
            elsewhere: one.from_ms.is_none(),
        })
        .collect();
    (!groups.is_empty()).then(|| describe(&groups))
}

/// Requests whose times are near each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Group {
    from_ms: u64,
    to_ms: u64,
    count: u64,
    /// Not between these times.
    elsewhere: bool,
}

/// Groups shown at most; the others are taken together.
const SHOWN: usize = 4;

/// Completion times (microseconds) in groups: "96.3 % at 6-9 ms, 2.8 % at 1026-1054 ms, 0.9 % elsewhere".
pub(super) fn groups(times_us: &[u64]) -> String {
    let mut sorted = times_us.to_vec();
    sorted.sort_unstable();
    let mut groups: Vec<Group> = Vec::new();
    for us in sorted {
        let ms = (us + 500) / 1000;
        match groups.last_mut() {
            // The next group begins where there is none for 10 ms or a tenth.
            Some(last) if ms <= last.to_ms + (last.to_ms / 10).max(10) => {
                last.to_ms = ms;
                last.count += 1;
            }
            _ => groups.push(Group {
                from_ms: ms,
                to_ms: ms,
                count: 1,
                elsewhere: false,
            }),
        }
    }
    let mut largest = groups.clone();
    largest.sort_by_key(|group| std::cmp::Reverse(group.count));
    if let Some(least) = largest.get(SHOWN - 1).map(|group| group.count) {
        let (shown, others): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(|group| group.count >= least);
        // Many of one request each are no groups.
        let (shown, more) = shown.split_at(shown.len().min(SHOWN));
        groups = shown.to_vec();
        let elsewhere = others.iter().chain(more).map(|group| group.count).sum();
        if elsewhere > 0 {
            groups.push(Group {
                from_ms: 0,
                to_ms: 0,
                count: elsewhere,
                elsewhere: true,
            });
        }
    }
    describe(&groups)
}

fn describe(groups: &[Group]) -> String {
    let all: u64 = groups.iter().map(|group| group.count).sum();
    let each = groups.iter().map(|group| {
        #[expect(clippy::cast_precision_loss, reason = "a share of some thousand")]
        let percent = 100.0 * group.count as f64 / all as f64;
        let percent = if percent < 0.1 {
            format!("{percent:.2}")
        } else {
            format!("{percent:.1}")
        };
        let percent = percent.trim_end_matches(".0");
        match (group.elsewhere, group.from_ms == group.to_ms) {
            (true, _) => format!("{percent} % elsewhere"),
            (false, true) => format!("{percent} % at {}", group.from_ms),
            (false, false) => format!("{percent} % at {}-{}", group.from_ms, group.to_ms),
        }
    });
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::{super::case, *};

    #[test]
    fn figures_belong_to_cases() {
        let all = all().unwrap();
        let cases = case::all(false, crate::topology::LinkBackend::Relay);
        for one in &all {
            let case = cases.iter().find(|case| case.name == one.case).unwrap();
            let coverage = Coverage::ALL.into_iter().find(|coverage| {
                case.is_for(*coverage) && text(&all, &case.name, *coverage).is_some()
            });
            assert!(coverage.is_some(), "{one:?}");
        }
        let said = |case, coverage| text(&all, case, coverage).unwrap();
        assert_eq!(
            said("syn-3", Coverage::Kernel),
            "50 % at 20-40, 50 % at 1020-1050"
        );
        assert_eq!(
            said("syn-ack-2", Coverage::ServerShort),
            "5 % at 100, 69 % at 110, 26 % at 120"
        );
        assert_eq!(
            said("random-3-to-server", Coverage::Kernel),
            "96.3 % at 10-40, 2.8 % at 1020-1120, 0.9 % elsewhere"
        );
        assert_eq!(text(&all, "syn-3", Coverage::Agent), None);
        assert_eq!(text(&all, "syn-ack-2", Coverage::Server), None);
    }

    #[test]
    fn groups_of_times() {
        assert_eq!(groups(&[]), "");
        assert_eq!(
            groups(&[6_400, 7_600, 6_500, 1_030_000]),
            "75 % at 6-8, 25 % at 1030"
        );
        let spread: Vec<u64> = (1..=10).map(|n| 1000 * (1 << n)).collect();
        let mut many = vec![5_000; 90];
        many.extend(spread.iter().map(|us| us * 10));
        let text = groups(&many);
        assert!(text.starts_with("90 % at 5"), "{text}");
        assert!(text.ends_with("7 % elsewhere"), "{text}");
    }
}
