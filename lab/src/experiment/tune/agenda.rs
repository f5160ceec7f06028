//! The pending events of a simulation, ordered by time.

use std::collections::BTreeMap;

/// Pending items, each with a time, which must not be negative. Items with the same time are in the order in which they
/// were added.
#[derive(Debug)]
pub(super) struct Agenda<T> {
    /// The bits of non-negative floating-point numbers have the same order as the numbers.
    due: BTreeMap<(u64, u64), T>,
    added: u64,
}

impl<T> Agenda<T> {
    /// An empty agenda.
    pub(super) const fn new() -> Self {
        Self {
            due: BTreeMap::new(),
            added: 0,
        }
    }

    /// Adds an item at a time.
    pub(super) fn add(&mut self, at: f64, what: T) {
        self.due.insert((at.to_bits(), self.added), what);
        self.added += 1;
    }

    /// Takes the earliest item that is due by a time; returns its time as well.
    pub(super) fn take_until(&mut self, until: f64) -> Option<(f64, T)> {
        let earliest = self.due.first_entry()?;
        let at = f64::from_bits(earliest.key().0);
        (at <= until).then(|| (at, earliest.remove()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earliest_item_comes_first_and_later_ones_stay() {
        let mut agenda = Agenda::new();
        for (at, what) in [(3.0, "c"), (1.0, "a"), (2.0, "b"), (2.0, "also b")] {
            agenda.add(at, what);
        }
        assert_eq!(agenda.take_until(0.5), None);
        assert_eq!(agenda.take_until(2.0), Some((1.0, "a")));
        assert_eq!(agenda.take_until(2.0), Some((2.0, "b")));
        assert_eq!(agenda.take_until(2.0), Some((2.0, "also b")));
        assert_eq!(agenda.take_until(2.0), None);
        assert_eq!(agenda.take_until(9.0), Some((3.0, "c")));
    }
}
