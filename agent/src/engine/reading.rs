//! `list` and `lookup`: answered from the state as it was published after the last change, on the asker's
//! own thread. The engine may be at a change that takes seconds meanwhile.

use std::{net::IpAddr, path::PathBuf};

use serde::Serialize;

use super::{
    EngineError,
    manual::{Manual, boottime_ms},
};
use crate::{
    datapath::Hits,
    policy::{Cidr, Entries, EntryRef, PolicySet, compile::Effects},
    wire::types::{Caller, EntryView, LookupAnswer, LookupEntry, PolicyView, SourceView},
};

/// What was in force after a change.
#[derive(Default)]
pub struct Reading {
    pub(super) set: PolicySet,
    pub(super) effects: Effects,
    /// What the files say.
    pub(super) files: Entries,
    pub(super) manual: Manual,
    pub(super) detached_by: Option<Caller>,
    pub(super) config_path: PathBuf,
    /// Absent while nothing is in the kernel.
    pub(super) hits: Option<Hits>,
}

/// Bytes of a list that are handed on at once.
const PIECE: usize = 64 << 10;

impl Reading {
    /// What a connection to an address takes, and why.
    ///
    /// # Errors
    ///
    /// If the kernel's map cannot be read.
    pub fn lookup(&self, address: IpAddr) -> Result<LookupAnswer, EngineError> {
        let looked_up = address.to_canonical();
        let mut matching = self.set.entries.covering(looked_up).into_iter();
        let best = matching.next();
        let shadowed: Vec<Cidr> = matching.collect();
        let mut reason = String::new();
        if looked_up != address {
            reason = format!("{address} is IPv4-mapped and looked up as {looked_up}; ");
        }
        let entry = match best.and_then(|cidr| Some((cidr, self.set.entries.get(&cidr)?))) {
            None => {
                reason.push_str("no entry covers it: the kernel's own timers apply");
                None
            }
            Some((cidr, entry)) => {
                let hits = self.hits.as_ref().map_or(Ok(0), |hits| hits.of(&cidr));
                let hits = hits.map_err(|e| EngineError::Failed(e.to_string()))?;
                reason.push_str(&match shadowed.len() {
                    0 => "the only entry that covers it".to_owned(),
                    n => format!("the longest of {} prefixes that cover it", n + 1),
                });
                if let Some(by) = &self.detached_by {
                    reason.push_str(&format!("; but nothing is in force, detached by {by}"));
                }
                Some(self.view(self.listed(cidr, entry, hits)))
            }
        };
        Ok(LookupAnswer {
            address,
            looked_up,
            entry,
            shadowed,
            reason,
        })
    }

    /// Reads what entries have counted.
    ///
    /// # Errors
    ///
    /// If a map cannot be read.
    pub fn hits(&self) -> Result<Vec<(Cidr, u32)>, EngineError> {
        let hits = self.hits.as_ref().map_or_else(|| Ok(Vec::new()), Hits::all);
        hits.map_err(|e| EngineError::Failed(e.to_string()))
    }

    /// The JSON of a [`crate::wire::types::ListAnswer`], piece by piece, for as long as `take` wants more: a
    /// million entries are a hundred megabytes.
    ///
    /// # Errors
    ///
    /// If something cannot be put into JSON.
    pub fn list(
        &self,
        hits: &[(Cidr, u32)],
        mut take: impl FnMut(Vec<u8>) -> bool,
    ) -> serde_json::Result<()> {
        let mut text = Vec::with_capacity(2 * PIECE);
        text.extend_from_slice(b"{\"policies\":{");
        for (i, (name, policy)) in self.set.policies.iter().enumerate() {
            separate(&mut text, i);
            put(&mut text, name)?;
            text.push(b':');
            let effects = self.effects.get(name).cloned().unwrap_or_default();
            let settings = policy.settings.clone();
            put(&mut text, &PolicyView { settings, effects })?;
        }
        text.extend_from_slice(b"},\"entries\":[");
        let mut hits = hits.iter().peekable();
        for (i, (cidr, entry)) in self.set.entries.iter().enumerate() {
            separate(&mut text, i);
            while hits.peek().is_some_and(|(other, _)| *other < cidr) {
                hits.next();
            }
            let counted = hits.peek().filter(|(other, _)| *other == cidr);
            let counted = counted.map_or(0, |(_, count)| *count);
            put(&mut text, &self.listed(cidr, entry, counted))?;
            if text.len() >= PIECE {
                let piece = std::mem::replace(&mut text, Vec::with_capacity(2 * PIECE));
                if !take(piece) {
                    return Ok(());
                }
            }
        }
        text.extend_from_slice(b"],\"masked\":");
        let masked = self.manual.masked().iter();
        let masked: Vec<&Cidr> = masked.filter(|c| self.files.contains_key(c)).collect();
        put(&mut text, &masked)?;
        text.push(b'}');
        take(text);
        Ok(())
    }

    fn view(&self, entry: EntryView) -> LookupEntry {
        let policy = self.set.policies.get(&entry.policy);
        let effects = self.effects.get(&entry.policy).cloned();
        LookupEntry {
            sets: PolicyView {
                settings: policy.map(|p| p.settings.clone()).unwrap_or_default(),
                effects: effects.unwrap_or_default(),
            },
            entry,
        }
    }

    fn listed(&self, cidr: Cidr, entry: EntryRef<'_>, hits: u32) -> EntryView {
        let (source, overrides) = match (self.manual.get(&cidr), file(entry)) {
            (Some(manual), _) => {
                let left = |end: u64| end.saturating_sub(boottime_ms()).div_ceil(1000);
                let expires_in_s = manual.expires_ms.map(left);
                (
                    SourceView::Runtime {
                        by: manual.by,
                        expires_in_s,
                    },
                    self.files.get(&cidr).and_then(file),
                )
            }
            (None, Some(source)) => (source, None),
            // Neither by hand nor from a file: cannot be, and must not hide the entry if it is.
            (None, None) => (
                SourceView::File {
                    path: self.config_path.clone(),
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
    use std::time::Duration;

    use super::*;
    use crate::{
        policy::{Entry, Policy, PolicyName, Settings},
        wire::types::ListAnswer,
    };

    fn reading(count: u32) -> Reading {
        let name: PolicyName = "near".parse().unwrap();
        let mut set = PolicySet::default();
        let settings = Settings {
            initial_rto: Some(Duration::from_millis(100)),
            ..Settings::default()
        };
        let location = None;
        set.policies
            .insert(name.clone(), Policy { settings, location });
        for i in 0..count {
            let cidr = Cidr::containing(std::net::Ipv4Addr::from(i << 8).into(), 24).unwrap();
            let policy = name.clone();
            set.entries.insert(
                cidr,
                Entry {
                    policy,
                    location: None,
                },
            );
        }
        Reading {
            files: set.entries.clone(),
            set,
            effects: Effects::new(),
            manual: Manual::default(),
            detached_by: None,
            config_path: "/etc/rto-agent/config.toml".into(),
            hits: None,
        }
    }

    #[test]
    fn the_pieces_are_a_list() {
        for count in [0, 1, 5000] {
            let reading = reading(count);
            let third: Cidr = "0.0.3.0/24".parse().unwrap();
            let hits = [("0.0.0.0/8".parse().unwrap(), 9), (third, 7)];
            let (mut text, mut pieces) = (Vec::new(), 0);
            reading
                .list(&hits, |piece| {
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
    fn who_has_enough_gets_no_more() {
        let mut pieces = 0;
        let take = |_| {
            pieces += 1;
            false
        };
        reading(20_000).list(&[], take).unwrap();
        assert_eq!(pieces, 1);
    }
}
