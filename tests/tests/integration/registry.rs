//! Registers tests at their definition: name, requirements and body in one place.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::{kernel, limited, needs::Need};

/// A test, registered by [`test!`].
pub(crate) struct Test {
    /// Path of the test's module in this crate.
    pub(crate) module: &'static str,
    pub(crate) line: u32,
    pub(crate) name: &'static str,
    /// The test's requirements besides root and the programs that all tests use.
    pub(crate) needs: &'static [Need],
    pub(crate) body: fn() -> anyhow::Result<()>,
}

inventory::collect!(Test);

/// `test!(name)` registers the function with this name, `test!(name, body)` another function or a closure; `needs =
/// [...]` may precede the body. The full name of the test consists of the top module and its own name.
macro_rules! test {
    ($name:ident, needs = [$($need:expr),+], $body:expr) => {
        inventory::submit! {
            $crate::registry::Test {
                module: module_path!(),
                line: line!(),
                name: stringify!($name),
                needs: &[$($need),+],
                body: $body,
            }
        }
    };
    ($name:ident, needs = [$($need:expr),+]) => {
        test!($name, needs = [$($need),+], $name);
    };
    ($name:ident, $body:expr) => {
        inventory::submit! {
            $crate::registry::Test {
                module: module_path!(),
                line: line!(),
                name: stringify!($name),
                needs: &[],
                body: $body,
            }
        }
    };
    ($name:ident) => {
        test!($name, $name);
    };
}

/// The longest tests run first; the others follow in alphabetical order.
const FIRST: [&str; 10] = [
    "syn_schedule",
    "syn_retries",
    "fallback",
    "tuning",
    "holdout",
    "established",
    "faults",
    "open_sockets",
    "never_worse",
    "syn",
];

impl Test {
    fn group(&self) -> &'static str {
        self.module.split("::").nth(1).unwrap_or_default()
    }

    fn full_name(&self) -> String {
        format!("{}::{}", self.group(), self.name)
    }

    fn rank(&self) -> impl Ord + use<> {
        let first = FIRST.iter().position(|group| *group == self.group());
        (first.unwrap_or(FIRST.len()), self.module, self.line)
    }
}

/// The number of tests in a group.
pub(crate) fn count(group: &str) -> usize {
    let all = inventory::iter::<Test>.into_iter();
    all.filter(|test| test.group() == group).count()
}

/// All tests, to be run as far as possible; `refusal` is the reason if none can.
pub(crate) fn trials(arguments: &Arguments, refusal: Option<&str>) -> Vec<Trial> {
    let mut tests: Vec<&Test> = inventory::iter::<Test>.into_iter().collect();
    tests.sort_by_key(|test| test.rank());
    tests
        .into_iter()
        .map(|test| trial(test, arguments, refusal))
        .collect()
}

fn trial(test: &'static Test, arguments: &Arguments, refusal: Option<&str>) -> Trial {
    let name = test.full_name();
    if let Some(reason) = refusal {
        // If it is run nevertheless (--include-ignored), it fails.
        return failing(name, reason.to_owned()).with_ignored_flag(true);
    }
    if arguments.list {
        return failing(name, "only listed".to_owned());
    }
    match test.needs.iter().find(|need| need.is_missing()) {
        None => Trial::test(name.clone(), || timed(name, test.body)),
        Some(need @ Need::Feature(_)) => {
            let absent = || kernel::assert_absent(*need);
            Trial::test(name.clone(), move || timed(name, absent)).with_kind(need.why_not())
        }
        Some(need) => {
            let why = need.why_not();
            failing(name, why.clone())
                .with_kind(why)
                .with_ignored_flag(true)
        }
    }
}

/// The duration of each test that has ended.
static TOOK: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

fn timed(
    name: String,
    test: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
) -> Result<(), Failed> {
    let begun = Instant::now();
    let result = limited(&name, test);
    let mut took = TOOK.lock().unwrap_or_else(PoisonError::into_inner);
    took.push((begun.elapsed(), name));
    result
}

/// Prints the slowest tests, which limit the duration of a run.
pub(crate) fn print_slowest() {
    const SHOWN: usize = 20;
    let mut took = TOOK.lock().unwrap_or_else(PoisonError::into_inner);
    took.sort_unstable_by(|a, b| b.cmp(a));
    if took.len() > SHOWN {
        let all: Duration = took.iter().map(|(took, _)| *took).sum();
        eprintln!(
            "{} tests, {:.0} s in all; the longest:",
            took.len(),
            all.as_secs_f64()
        );
        for (took, name) in took.iter().take(SHOWN) {
            eprintln!("{:6.1} s {name}", took.as_secs_f64());
        }
    }
}

fn failing(name: String, why: String) -> Trial {
    Trial::test(name, move || Err(Failed::from(why)))
}
