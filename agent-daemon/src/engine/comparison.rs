//! The one comparison of the kernel with the desired state: `verify`, readiness, a reload and the
//! rolling check differ only in how much of it they compare.

use rto_agent_core::{
    policy::{
        differences::{Cursor, Differences},
        plan::MapState,
    },
    wire::types::VerifyAnswer,
};
use rto_agent_kernel::datapath::{DatapathError, KernelReader};

use super::desired::Resolved;

/// What a comparison has found.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Where the next part begins.
    pub(super) cursor: Cursor,
    pub(super) differences: Differences,
}

/// What is compared: up to this number of entries from the cursor on, and the tables beside them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) cursor: Cursor,
    pub(super) entries: usize,
}

impl Part {
    /// Everything.
    pub(super) const ALL: Self = Self {
        cursor: Cursor {
            policy: 0,
            is_ipv6: false,
            after: None,
        },
        entries: usize::MAX,
    };
}

/// Compares a part of the kernel with the desired state.
///
/// # Errors
///
/// If the kernel cannot be read, or changes during each attempt.
pub(super) fn compare(
    reader: &dyn KernelReader,
    desired: &MapState,
    part: Part,
) -> Result<Comparison, DatapathError> {
    /// Attempts if a map changes during the read.
    const ATTEMPTS: usize = 3;
    let once = || {
        let mut cursor = part.cursor.resumed(&desired.entries);
        let differences = reader.compare(desired, &mut cursor, part.entries)?;
        Ok(Comparison {
            cursor,
            differences,
        })
    };
    (1..ATTEMPTS).fold(once(), |compared, _| compared.or_else(|_| once()))
}

/// The answer to `verify`. `problems`: those of the attachment, and what could not be repaired.
pub(super) fn answer(
    resolved: &Resolved,
    differences: Differences,
    problems: Vec<String>,
    repaired: bool,
) -> VerifyAnswer {
    VerifyAnswer {
        ok: differences.is_empty() && problems.is_empty(),
        entries: resolved.set.entries.len(),
        policies: resolved.set.policies.len(),
        repaired,
        differences,
        problems,
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, sync::Arc};

    use super::*;
    use crate::engine::{
        desired::tests::{NEAR, desired},
        fake::FakeHost,
        snapshot::{Snapshot, tests::healthy},
    };

    /// A snapshot with two entries and its kernel, which holds both and is attached.
    fn near() -> (FakeHost, Snapshot) {
        healthy(desired(NEAR))
    }

    fn compare_part(snapshot: &Snapshot, cursor: Cursor, entries: usize) -> Comparison {
        let maps = &snapshot.resolved.as_ref().unwrap().maps;
        let reader = snapshot.reader.as_deref().unwrap();
        compare(reader, maps, Part { cursor, entries }).unwrap()
    }

    #[test]
    fn verify_fails_on_any_single_problem() {
        let (host, snapshot) = near();
        let is_ok = |snapshot: &Snapshot| snapshot.verify().unwrap().ok;
        assert!(is_ok(&snapshot));
        let mut out_of_sync = snapshot.clone();
        Arc::make_mut(&mut out_of_sync.health).in_sync = false;
        assert!(!is_ok(&out_of_sync));
        host.state().attached = false;
        assert!(!is_ok(&snapshot));
        host.state().attached = true;
        let gone = "10.1.0.0/16".parse().unwrap();
        assert!(host.state().maps.entries.remove(&gone));
        assert!(!is_ok(&snapshot));
    }

    #[test]
    fn comparison_restarts_if_cursor_entry_is_gone() {
        let (host, snapshot) = near();
        let compared_after = |text: &str| {
            let cursor = Cursor {
                after: text.parse().ok(),
                ..Cursor::default()
            };
            let before = host.state().compared;
            let compared = compare_part(&snapshot, cursor, 4096);
            (
                host.state().compared - before,
                !compared.differences.is_empty(),
            )
        };
        let (known, gone) = ("10.1.0.0/16", "10.2.0.0/16");
        let all = host.state().maps.entries.len();
        assert_eq!(compared_after(gone).0, compared_after(known).0 + 1);
        assert!(compared_after(gone).0 <= all);
        assert!(!compared_after(gone).1);
        assert!(host.state().maps.entries.remove(&known.parse().unwrap()));
        assert!(compared_after(gone).1);
    }

    #[test]
    fn comparison_parts_are_bounded_and_cover_each_entry_once() {
        const OF_EACH_FAMILY: u32 = 2500;
        const PART: usize = 1000;
        let mut text = "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\n".to_owned();
        for n in 0..OF_EACH_FAMILY {
            writeln!(text, "\"11.{}.{}.0/24\",", n >> 8, n & 0xff).unwrap();
            writeln!(text, "\"2001:db8:{n:x}::/48\",").unwrap();
        }
        text.push_str("]\n");
        let (host, snapshot) = healthy(desired(&text));
        let (mut cursor, mut rounds) = (Cursor::default(), 0);
        loop {
            let before = host.state().compared;
            let compared = compare_part(&snapshot, cursor, PART);
            let read = host.state().compared - before;
            assert!(
                compared.differences.is_empty() && read <= PART,
                "{compared:?}, {read} entries"
            );
            cursor = compared.cursor;
            rounds += 1;
            if cursor.is_at_start() {
                break;
            }
        }
        let all = snapshot.resolved.as_ref().unwrap().set.entries.len();
        assert_eq!(
            (all, host.state().compared),
            (2 * OF_EACH_FAMILY as usize, all)
        );
        // A family ends with a part that may be smaller.
        assert!(rounds <= all / PART + 2, "{rounds} rounds");
    }
}
