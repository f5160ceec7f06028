//! What is still to happen, in the order of time.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, binary_heap::PeekMut},
};

/// Things that are due, each at a time.
#[derive(Debug)]
pub(super) struct Agenda<T>(BinaryHeap<Due<T>>);

impl<T> Agenda<T> {
    /// Nothing is due.
    pub(super) fn new() -> Self {
        Self(BinaryHeap::new())
    }

    /// Adds what is due at a time.
    pub(super) fn add(&mut self, at: f64, what: T) {
        self.0.push(Due { at, what });
    }

    /// Takes the earliest that is due by a time, and when it was.
    pub(super) fn take_until(&mut self, until: f64) -> Option<(f64, T)> {
        let earliest = self.0.peek_mut()?;
        if earliest.at > until {
            return None;
        }
        let Due { at, what } = PeekMut::pop(earliest);
        Some((at, what))
    }
}

#[derive(Debug)]
struct Due<T> {
    at: f64,
    what: T,
}

impl<T> PartialEq for Due<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Due<T> {}

impl<T> PartialOrd for Due<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Due<T> {
    /// The earliest is the greatest, as a heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_comes_first_and_what_is_not_due_stays() {
        let mut agenda = Agenda::new();
        for at in [3.0, 1.0, 2.0] {
            agenda.add(at, format!("{at}"));
        }
        assert_eq!(agenda.take_until(0.5), None);
        assert_eq!(agenda.take_until(2.0), Some((1.0, "1".to_owned())));
        assert_eq!(agenda.take_until(2.0), Some((2.0, "2".to_owned())));
        assert_eq!(agenda.take_until(2.0), None);
        assert_eq!(agenda.take_until(9.0), Some((3.0, "3".to_owned())));
    }
}
