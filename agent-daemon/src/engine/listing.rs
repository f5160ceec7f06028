//! `list` and `lookup`: the entries in force and where they come from.

use std::{collections::BTreeMap, net::IpAddr};

use rto_agent_core::{
    policy::{Cidr, EntryRef},
    wire::types::{EntryView, LookupAnswer, LookupEntry, PolicyView, SourceView},
};
use rto_agent_kernel::kernel::clock::boottime_ms;
use serde::Serialize;

use super::{desired::Resolved, error::EngineError, snapshot::Snapshot};

/// Bytes of a list that are passed on at once.
const PIECE: usize = 64 << 10;

/// The entry and settings that apply to an address, with the reasons.
pub fn lookup(snapshot: &Snapshot, address: IpAddr) -> Result<LookupAnswer, EngineError> {
    let resolved = snapshot.resolved()?;
    let looked_up = address.to_canonical();
    let (runtime, now_ms) = (&resolved.desired.runtime, boottime_ms());
    let covering = resolved.set.entries.covering(looked_up).into_iter();
    let mut matching = covering.filter(|cidr| !runtime.is_over(cidr, now_ms));
    let best = matching.next();
    let shadowed: Vec<Cidr> = matching.collect();
    let mut masked: Vec<Cidr> = masked(resolved).copied().collect();
    masked.retain(|cidr| cidr.contains(looked_up));
    masked.sort_unstable_by_key(|cidr| std::cmp::Reverse(cidr.prefix()));
    let mut reason = String::new();
    if looked_up != address {
        reason = format!("{address} is IPv4-mapped and treated as {looked_up}; ");
    }
    let entry = match best.and_then(|cidr| Some((cidr, resolved.set.entries.get(&cidr)?))) {
        None => {
            reason.push_str("no entry covers it: the kernel's own timers apply");
            None
        }
        Some((cidr, entry)) => {
            let reader = snapshot.reader.as_ref();
            let hits = reader.map_or(Ok(0), |reader| reader.hits_of(&cidr))?;
            reason.push_str(&match shadowed.len() {
                0 => "the only entry that covers it".to_owned(),
                n => format!("the longest of {} prefixes that cover it", n + 1),
            });
            if let Some(by) = &snapshot.health.detached_by {
                reason.push_str(&format!("; but no policy is active: detached by {by}"));
            }
            Some(view(
                resolved,
                listed(snapshot, resolved, cidr, entry, hits),
            ))
        }
    };
    Ok(LookupAnswer {
        address,
        looked_up,
        entry,
        shadowed,
        masked,
        reason,
    })
}

/// Reads the hit counters of all entries.
pub fn hits(snapshot: &Snapshot) -> Result<Vec<(Cidr, u32)>, EngineError> {
    let reader = snapshot.reader.as_ref();
    Ok(reader.map_or_else(|| Ok(Vec::new()), |reader| reader.hits())?)
}

/// Writes the JSON of a [`rto_agent_core::wire::types::ListAnswer`] in pieces until `take` wants no
/// more: a million entries are a hundred megabytes.
pub fn list(
    snapshot: &Snapshot,
    hits: &[(Cidr, u32)],
    mut take: impl FnMut(Vec<u8>) -> bool,
) -> serde_json::Result<()> {
    let Ok(resolved) = snapshot.resolved() else {
        return Ok(());
    };
    let mut text = Vec::with_capacity(2 * PIECE);
    text.extend_from_slice(b"{\"policies\":{");
    for (i, (name, policy)) in resolved.set.policies.iter().enumerate() {
        separate(&mut text, i);
        put(&mut text, name)?;
        text.push(b':');
        let effects = resolved.effects(name).to_vec();
        let settings = policy.settings.clone();
        let description = policy.description.clone();
        let view = PolicyView {
            description,
            settings,
            effects,
        };
        put(&mut text, &view)?;
    }
    text.extend_from_slice(b"},\"entries\":[");
    let mut hits = hits.iter().peekable();
    let (runtime, now_ms) = (&resolved.desired.runtime, boottime_ms());
    let entries = resolved.set.entries.iter();
    let entries = entries.filter(|(cidr, _)| !runtime.is_over(cidr, now_ms));
    for (i, (cidr, entry)) in entries.enumerate() {
        separate(&mut text, i);
        while hits.peek().is_some_and(|(other, _)| *other < cidr) {
            hits.next();
        }
        let counted = hits.peek().filter(|(other, _)| *other == cidr);
        let counted = counted.map_or(0, |(_, count)| *count);
        put(&mut text, &listed(snapshot, resolved, cidr, entry, counted))?;
        if text.len() >= PIECE {
            let piece = std::mem::replace(&mut text, Vec::with_capacity(2 * PIECE));
            if !take(piece) {
                return Ok(());
            }
        }
    }
    text.extend_from_slice(b"],\"masked\":");
    put(&mut text, &masked(resolved).collect::<Vec<_>>())?;
    text.extend_from_slice(b",\"left_out\":");
    let left_out: BTreeMap<_, &str> = resolved
        .left_out
        .iter()
        .map(|(c, why)| (c, &**why))
        .collect();
    put(&mut text, &left_out)?;
    if let Some(by) = snapshot.health.detached_by {
        text.extend_from_slice(b",\"detached_by\":");
        put(&mut text, &by)?;
    }
    text.push(b'}');
    take(text);
    Ok(())
}

fn listed(
    snapshot: &Snapshot,
    resolved: &Resolved,
    cidr: Cidr,
    entry: EntryRef<'_>,
    hits: u32,
) -> EntryView {
    let is_in_force = || !resolved.left_out.contains_key(&cidr);
    let runtime = resolved
        .desired
        .runtime
        .get(&cidr)
        .filter(|_| is_in_force());
    let (source, overrides) = match (runtime, file(entry)) {
        (Some(runtime), _) => {
            let left = |end: u64| end.saturating_sub(boottime_ms()).div_ceil(1000);
            let expires_in_s = runtime.expires_ms.map(left);
            (
                SourceView::Runtime {
                    by: runtime.by,
                    expires_in_s,
                },
                resolved.config().set.entries.get(&cidr).and_then(file),
            )
        }
        (None, Some(source)) => (source, None),
        // Neither a runtime entry nor one of a file. Impossible, but it must not hide the
        // entry.
        (None, None) => (
            SourceView::File {
                path: snapshot.config.config_path.clone(),
                line: 0,
            },
            None,
        ),
    };
    EntryView {
        cidr,
        policy: entry.policy.clone(),
        source,
        hits,
        overrides,
    }
}

/// Entries of the files that are masked.
fn masked(resolved: &Resolved) -> impl Iterator<Item = &Cidr> {
    let files = &resolved.config().set.entries;
    let masked = resolved.desired.runtime.masked().iter();
    masked.filter(|cidr| files.contains_key(cidr))
}

fn view(resolved: &Resolved, entry: EntryView) -> LookupEntry {
    let policy = resolved.set.policies.get(&entry.policy);
    LookupEntry {
        sets: PolicyView {
            description: policy.and_then(|p| p.description.clone()),
            settings: policy.map(|p| p.settings.clone()).unwrap_or_default(),
            effects: resolved.effects(&entry.policy).to_vec(),
        },
        entry,
    }
}

fn file(entry: EntryRef<'_>) -> Option<SourceView> {
    let (path, line) = entry.location?;
    Some(SourceView::File {
        path: path.to_path_buf(),
        line,
    })
}

fn put(text: &mut Vec<u8>, value: &impl Serialize) -> serde_json::Result<()> {
    serde_json::to_writer(text, value)
}

fn separate(text: &mut Vec<u8>, index: usize) {
    if index > 0 {
        text.push(b',');
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rto_agent_core::wire::types::ListAnswer;

    use super::*;
    use crate::engine::{config::EngineConfig, desired::tests::desired};

    fn snapshot(count: u32) -> Snapshot {
        use std::fmt::Write as _;

        let mut text = "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\n".to_owned();
        for i in 0..count {
            let address = std::net::Ipv4Addr::from(i << 8);
            writeln!(text, "\"{address}/24\",").unwrap();
        }
        text.push_str("]\n");
        Snapshot {
            resolved: Some(Arc::new(desired(&text).resolve().unwrap())),
            ..Snapshot::starting(&EngineConfig::for_tests())
        }
    }

    #[test]
    fn list_pieces_form_one_json_list() {
        for count in [0, 1, 5000] {
            let snapshot = snapshot(count);
            let third: Cidr = "0.0.3.0/24".parse().unwrap();
            let hits = [("0.0.0.0/8".parse().unwrap(), 9), (third, 7)];
            let (mut text, mut pieces) = (Vec::new(), 0);
            list(&snapshot, &hits, |piece| {
                text.extend(piece);
                pieces += 1;
                true
            })
            .unwrap();
            let answer: ListAnswer = serde_json::from_slice(&text).unwrap();
            assert_eq!(answer.entries.len(), count as usize);
            assert_eq!(answer.policies.len(), 1);
            assert_eq!(pieces > 2, count > 1000);
            let counted: Vec<_> = answer.entries.iter().filter(|e| e.hits > 0).collect();
            assert!(counted.iter().all(|e| e.cidr == third && e.hits == 7));
            assert_eq!(counted.len(), usize::from(count > 3));
        }
    }

    #[test]
    fn list_ends_with_its_reader() {
        let mut pieces = 0;
        let take = |_| {
            pieces += 1;
            false
        };
        list(&snapshot(20_000), &[], take).unwrap();
        assert_eq!(pieces, 1);
    }
}
