//! Shares of the connections there are: whoever may use the socket can take what is theirs, and never root's.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tracing::warn;

use super::limit::Limits;

/// Who has how many connections.
#[derive(Clone, Debug)]
pub(super) struct Shares {
    limits: Limits,
    held: Arc<Mutex<Held>>,
}

#[derive(Debug, Default)]
struct Held {
    by_uid: BTreeMap<u32, usize>,
    /// Who was refused, and has had connections ever since.
    refused: BTreeSet<u32>,
}

/// A connection of a user's; given back when dropped.
#[derive(Debug)]
pub(super) struct Share {
    uid: u32,
    held: Arc<Mutex<Held>>,
}

impl Shares {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            held: Arc::default(),
        }
    }

    /// One more connection of a user's.
    ///
    /// # Errors
    ///
    /// If it has as many as one may have, or others leave none; in words.
    pub(super) fn take(&self, uid: u32) -> Result<Share, String> {
        let mut held = lock(&self.held);
        let own = held.by_uid.get(&uid).copied().unwrap_or(0);
        let others = held.by_uid.iter().filter(|(uid, _)| **uid != 0);
        let others: usize = others.map(|(_, count)| count).sum();
        let Limits {
            connections,
            for_root,
            each,
            ..
        } = self.limits;
        let refusal = if uid == 0 {
            None
        } else if own >= each {
            Some(format!(
                "uid {uid} has {own} connections to this socket, the most that a user other than root may have; close \
                 some"
            ))
        } else if others >= connections.saturating_sub(for_root) {
            Some(format!(
                "users other than root have {others} connections to this socket, all that they may have; try again"
            ))
        } else {
            None
        };
        if let Some(refusal) = refusal {
            if held.refused.insert(uid) {
                warn!(audit = true, uid, "connections are refused: {refusal}");
            }
            return Err(refusal);
        }
        *held.by_uid.entry(uid).or_default() += 1;
        Ok(Share {
            uid,
            held: self.held.clone(),
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = lock(&self.held);
        if let Some(count) = held.by_uid.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                held.by_uid.remove(&self.uid);
                held.refused.remove(&self.uid);
            }
        }
    }
}

/// Numbers are right whoever panicked.
fn lock(held: &Mutex<Held>) -> MutexGuard<'_, Held> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn nobody_takes_what_is_roots() {
        let shares = Shares::new(Limits {
            connections: 8,
            for_root: 2,
            each: 4,
            idle_timeout: Duration::ZERO,
            lifetime: Duration::ZERO,
        });
        let mut own: Vec<_> = (0..4).map(|_| shares.take(1).unwrap()).collect();
        let refusal = shares.take(1).unwrap_err();
        assert!(refusal.starts_with("uid 1 has 4 connections"), "{refusal}");
        let _two = [shares.take(2).unwrap(), shares.take(2).unwrap()];
        let refusal = shares.take(3).unwrap_err();
        assert!(
            refusal.starts_with("users other than root have 6"),
            "{refusal}"
        );
        // How many there are in all is another's concern.
        let _roots: Vec<_> = (0..8).map(|_| shares.take(0).unwrap()).collect();
        own.pop();
        drop(shares.take(1).unwrap());
        shares.take(3).unwrap();
    }

    #[test]
    fn a_refusal_is_logged_once_for_each_time() {
        let shares = Shares::new(Limits {
            connections: 8,
            for_root: 2,
            each: 1,
            idle_timeout: Duration::ZERO,
            lifetime: Duration::ZERO,
        });
        let held = shares.take(1).unwrap();
        for _ in 0..2 {
            shares.take(1).unwrap_err();
            assert_eq!(lock(&shares.held).refused.len(), 1);
        }
        drop(held);
        assert!(lock(&shares.held).refused.is_empty());
    }
}
