//! What was acknowledged is in force: an entry with the settings of the last `add`, or none after a
//! `remove`, saved or not.

use std::collections::BTreeMap;

use proptest::prelude::*;
use rto_agent_core::policy::Settings;

use super::*;

const CIDRS: [&str; 3] = ["10.1.0.0/16", "10.9.0.0/16", "10.10.0.0/16"];

#[derive(Clone, Copy, Debug)]
enum Operation {
    Add { ms: u64, save: bool },
    Remove { save: bool },
    Undo,
    Restart,
}

/// What is made to fail during an operation.
#[derive(Clone, Copy, Debug)]
enum Failure {
    None,
    /// This write to the kernel, counted from 1.
    Kernel(usize),
    /// The runtime entries cannot be saved.
    Store,
    /// The saved entries cannot be written.
    File,
}

fn own(cidr: &str, ms: u64, save: bool) -> AddRequest {
    AddRequest {
        cidrs: vec![cidr.to_owned()],
        settings: Some(Settings {
            initial_rto: Some(Duration::from_millis(ms).into()),
            ..Settings::default()
        }),
        save,
        ..AddRequest::default()
    }
}

/// The initial RTO that the kernel has for a CIDR, in milliseconds.
fn in_force(bed: &Bed, cidr: &str) -> Option<u64> {
    let hz = host_facts(&[]).unwrap().hz;
    let state = bed.kernel.state();
    let name = state.maps.entries.get(&cidr.parse().unwrap())?.policy;
    let jiffies = state.maps.policies[name].initial_rto_jiffies;
    Some(u64::from(jiffies) * 1000 / u64::from(hz))
}

fn remove(bed: &Bed, cidr: &str, save: bool, undo: bool) -> Result<ChangeAnswer, EngineError> {
    let request = RemoveRequest {
        cidrs: vec![cidr.to_owned()],
        save,
        undo,
    };
    bed.call(|reply| Message::Remove(request, BY, reply))
}

/// Makes a rename onto this path fail, as long as it exists.
struct Blocked {
    path: PathBuf,
    former: PathBuf,
}

impl Blocked {
    fn new(path: PathBuf) -> Self {
        let former = path.with_extension("former");
        let _ = fs::rename(&path, &former); // There may be none.
        fs::create_dir_all(path.join("full")).unwrap();
        Self { path, former }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        if self.path.is_dir() {
            fs::remove_dir_all(&self.path).unwrap();
            let _ = fs::rename(&self.former, &self.path); // As above.
        }
    }
}

#[test]
fn saved_entry_replaces_runtime_entry_and_mask() {
    let bed = Bed::ready();
    let cidr = CIDRS[1];
    bed.add(own(cidr, 40, false)).unwrap();
    let answer = bed.add(own(cidr, 200, true)).unwrap();
    assert_eq!(in_force(&bed, cidr), Some(200));
    let ended = format!("{cidr}: the runtime entry has ended; the saved entry replaces it");
    assert!(answer.notes.contains(&ended), "{answer:?}");
    let bed = bed.restart();
    assert_eq!(in_force(&bed, cidr), Some(200));

    remove(&bed, cidr, false, false).unwrap();
    assert_eq!(in_force(&bed, cidr), None);
    let answer = bed.add(own(cidr, 200, true)).unwrap();
    let on = format!("{cidr} is no longer switched off");
    assert!(answer.notes.contains(&on), "{answer:?}");
    assert_eq!(in_force(&bed, cidr), Some(200));

    bed.add(own(cidr, 40, false)).unwrap();
    let answer = remove(&bed, cidr, true, false).unwrap();
    assert_eq!((in_force(&bed, cidr), answer.changed.removed), (None, 1));
    let bed = bed.restart();
    assert_eq!(in_force(&bed, cidr), None);

    bed.add(own(cidr, 40, false)).unwrap();
    let error = remove(&bed, cidr, true, false).unwrap_err().to_string();
    assert!(error.contains("remove it without --save"), "{error}");
    assert_eq!(in_force(&bed, cidr), Some(40));
}

/// Runs the operations, and compares the kernel with the acknowledged answers.
fn follows_model(steps: Vec<(usize, Operation, Failure)>) {
    let mut bed = Bed::ready();
    let mut wanted = BTreeMap::from([(CIDRS[0], 100)]);
    let mut saved = wanted.clone();
    for (index, operation, failure) in steps {
        let cidr = CIDRS[index];
        let dir = bed.dir.path();
        let before = fs::read(dir.join("policies.d/50-cli.toml")).ok();
        let blocked = match failure {
            Failure::None => None,
            Failure::Kernel(write) => {
                bed.kernel.fail(write);
                None
            }
            Failure::Store => Some(Blocked::new(dir.join("state/manual.json"))),
            Failure::File => Some(Blocked::new(dir.join("policies.d/50-cli.toml"))),
        };
        let answer = match operation {
            Operation::Add { ms, save } => bed.add(own(cidr, ms, save)),
            Operation::Remove { save } => remove(&bed, cidr, save, false),
            Operation::Undo => remove(&bed, cidr, false, true),
            Operation::Restart => Ok(ChangeAnswer::default()),
        };
        bed.kernel.state().failing.clear();
        drop(blocked);
        match (&answer, operation) {
            (Err(error), _) => {
                let text = error.to_string();
                if matches!(
                    error,
                    EngineError::OutOfSync { .. } | EngineError::NotBack { .. }
                ) {
                    assert!(!bed.status().healthy, "{text}");
                    bed.verify();
                }
                let now = fs::read(bed.dir.path().join("policies.d/50-cli.toml")).ok();
                assert_eq!(now, before, "{text}");
            }
            (Ok(_), Operation::Add { ms, save }) => {
                wanted.insert(cidr, ms);
                save.then(|| saved.insert(cidr, ms));
            }
            (Ok(_), Operation::Remove { save }) => {
                wanted.remove(cidr);
                save.then(|| saved.remove(cidr));
            }
            (Ok(_), Operation::Undo) => match saved.get(cidr) {
                Some(ms) => drop(wanted.insert(cidr, *ms)),
                None => drop(wanted.remove(cidr)),
            },
            // A change that could not be saved is reported until it is.
            (Ok(_), Operation::Restart) if bed.status().warnings.is_empty() => bed = bed.restart(),
            (Ok(_), Operation::Restart) => {}
        }
        for cidr in CIDRS {
            let (now, wanted) = (in_force(&bed, cidr), wanted.get(cidr).copied());
            assert_eq!(
                now, wanted,
                "{cidr} after {operation:?} ({failure:?}): {answer:?}"
            );
        }
        assert!(bed.status().healthy, "{:?}", bed.status().problems);
    }
}

fn operation() -> impl Strategy<Value = Operation> {
    let ms = prop_oneof![Just(40_u64), Just(200)];
    prop_oneof![
        4 => (ms, any::<bool>()).prop_map(|(ms, save)| Operation::Add { ms, save }),
        4 => any::<bool>().prop_map(|save| Operation::Remove { save }),
        1 => Just(Operation::Undo),
        1 => Just(Operation::Restart),
    ]
}

fn failure() -> impl Strategy<Value = Failure> {
    prop_oneof![
        6 => Just(Failure::None),
        2 => (1_usize..4).prop_map(Failure::Kernel),
        1 => Just(Failure::Store),
        1 => Just(Failure::File),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn acknowledged_answers_are_in_force(
        steps in prop::collection::vec((0..CIDRS.len(), operation(), failure()), 1..40)
    ) {
        follows_model(steps);
    }
}
