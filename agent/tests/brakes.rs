//! The program's brakes do on one processor what `rto_model::tune::brake` does, which `rto-lab tune` simulates.

use proptest::prelude::*;
use rto_agent_common::brake::Brake;
use rto_model::tune::brake::{Budget, Fuse};

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Whether it took copies.
    Established(bool),
    Copies(u32),
    Spurious(u32),
    /// Copies.
    Capacity(u32),
    /// The daemon has set another value.
    Epoch,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let count = || prop_oneof![9 => 0u32..12, 1 => any::<u32>()];
    let step = prop_oneof![
        60 => any::<bool>().prop_map(Step::Established),
        20 => count().prop_map(Step::Copies),
        15 => count().prop_map(Step::Spurious),
        1 => capacity().prop_map(Step::Capacity),
        1 => Just(Step::Epoch),
    ];
    prop::collection::vec(step, 0..600)
}

fn capacity() -> impl Strategy<Value = u32> {
    prop_oneof![9 => 0u32..100, 1 => 0..=Budget::LARGEST_CAPACITY]
}

proptest! {
    #[test]
    fn the_program_has_the_simulated_brakes(first in capacity(), steps in steps()) {
        // `Policy::budgets` and `Policy::epochs`.
        let (mut tenths, mut epoch) = (first * 10, 1);
        let mut brake = Brake { epoch, ..Brake::default() };
        let (mut budget, mut fuse) = (Budget::full(first), Fuse::default());
        for step in steps {
            match step {
                Step::Established(copied) => {
                    budget.established();
                    brake.budget -= i32::from(brake.budget > 0);
                    if !copied {
                        fuse.established();
                        brake.fuse -= i32::from(brake.fuse > 0);
                    }
                }
                Step::Copies(copies) => {
                    budget.copies(copies);
                    brake.budget += brake.budget_cost(tenths, copies);
                }
                Step::Spurious(copies) => {
                    fuse.spurious(copies);
                    brake.fuse += brake.fuse_cost(copies);
                }
                Step::Capacity(capacity) => {
                    budget.resize(capacity);
                    tenths = capacity * 10;
                }
                Step::Epoch => {
                    fuse = Fuse::default();
                    epoch += 1;
                    brake = Brake { epoch, fuse: 0, spurious: 0, ..brake };
                }
            }
            prop_assert_eq!(brake.is_throttled(tenths), budget.is_throttled(), "{:?}", step);
            prop_assert_eq!(brake.is_blown(epoch), fuse.is_blown(), "{:?}", step);
            let left = i64::from(tenths).saturating_sub(i64::from(brake.budget)).max(0);
            let percent = (left * 100).checked_div(i64::from(tenths)).unwrap_or(0);
            prop_assert_eq!(i64::from(budget.percent_left()), percent, "{:?}", step);
        }
    }
}
