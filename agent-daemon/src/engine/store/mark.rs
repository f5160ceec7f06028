//! Whether the daemon is detached: a detachment lasts over restarts, upgrades and reboots.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::Path,
};

use rto_agent_core::{
    config::AgentConfig,
    path_security,
    wire::types::{Caller, Lasts, NotLasting},
};
use tracing::warn;

use super::{DETACHED, document::Document};
use crate::{lock, problem::Problem};

/// Why a request that needs an attached program is refused.
pub(in crate::engine) const NOT_ACTIVE: &str =
    "no policy is active; run rto-agent attach to activate them";

/// By pin directory, with its links followed: the users that have detached its program. Daemons
/// that share a `persistent_dir` share the file.
type Marks = BTreeMap<String, Caller>;

/// Remembers which user has detached the program of a pin directory, however that is spelt: in
/// `persistent_dir`, and for this boot in `state_dir`.
pub struct DetachMark {
    pins: String,
    lasting: Document,
    of_boot: Document,
    /// In the `persistent_dir` of changed files, which the next start reads.
    next: Option<Document>,
    /// Why it is not kept, or not known.
    problem: Problem,
}

impl DetachMark {
    /// The mark of a daemon with this configuration.
    #[must_use]
    pub fn new(agent: &AgentConfig) -> Self {
        Self {
            pins: path_security::resolved(&agent.pin_dir)
                .to_string_lossy()
                .into_owned(),
            lasting: document(&agent.persistent_dir),
            of_boot: document(&agent.state_dir),
            next: None,
            problem: Problem::default(),
        }
    }

    /// The user that has detached the program, if any. A mark that cannot be read is one.
    pub(in crate::engine) fn load(&mut self) -> Option<Caller> {
        let (mut by, mut unreadable) = (None, Vec::new());
        for document in [&self.lasting, &self.of_boot] {
            match marks(document) {
                Ok(marks) => by = by.or_else(|| marks.get(&self.pins).copied()),
                Err(why) => unreadable.push(why.to_string()),
            }
        }
        let problem = (!unreadable.is_empty()).then(|| {
            format!(
                "it is unknown whether the program was detached: {}",
                unreadable.join("; ")
            )
        });
        let is_unreadable = problem.is_some();
        self.problem.becomes(problem, |text| warn!("{text}"));
        by.or(is_unreadable.then_some(Caller::UNREADABLE_MARK))
    }

    /// Stores which user has detached the program, and answers how long that lasts, if not until
    /// `rto-agent attach`.
    pub fn set(&mut self, by: Caller) -> Option<NotLasting> {
        if by == Caller::CONFIGURATION {
            // The next start reads it from the configuration again.
            return None;
        }
        let mark = |document: &Document| {
            update(document, |marks| {
                marks.insert(self.pins.clone(), by);
            })
        };
        let next = self.next.as_ref().map_or(Ok(()), mark);
        let of_boot = mark(&self.of_boot);
        let lasting = mark(&self.lasting).and(next).err();
        let not_lasting = lasting.map(|why| NotLasting {
            until: match of_boot {
                Ok(()) => Lasts::UntilReboot,
                Err(_) => Lasts::UntilStart,
            },
            why: why.to_string(),
        });
        let problem = not_lasting.as_ref().map(|NotLasting { until, why }| {
            format!("the detachment lasts until {until} only: {why}; the daemon tries again")
        });
        self.problem.becomes(problem, |text| warn!("{text}"));
        not_lasting
    }

    /// Removes the mark.
    ///
    /// # Errors
    ///
    /// If it cannot be removed: the next start would be detached.
    pub fn clear(&mut self) -> io::Result<()> {
        let all = [Some(&self.lasting), self.next.as_ref(), Some(&self.of_boot)];
        for document in all.into_iter().flatten() {
            if fs::symlink_metadata(document.path()).is_ok() {
                update(document, |marks| {
                    marks.remove(&self.pins);
                })?;
            }
        }
        self.problem = Problem::default();
        Ok(())
    }

    /// The files have another `persistent_dir`: a detachment must be known there as well.
    pub(in crate::engine) fn follow(&mut self, persistent_dir: &Path, by: Option<Caller>) {
        let next = document(persistent_dir);
        self.next = (next.path() != self.lasting.path()).then_some(next);
        self.retry(by);
    }

    /// Stores the mark again if that failed or a file was removed.
    pub(in crate::engine) fn retry(&mut self, by: Option<Caller>) {
        let Some(by) = by.filter(|by| !by.is_no_user()) else {
            return;
        };
        let lacks = |document: &Document| {
            !marks(document).is_ok_and(|marks| marks.get(&self.pins) == Some(&by))
        };
        let documents = [Some(&self.lasting), self.next.as_ref(), Some(&self.of_boot)];
        if self.problem().is_some() || documents.into_iter().flatten().any(lacks) {
            let _ = self.set(by); // The problem says how it went.
        }
    }

    /// Why it is not kept, or not known.
    pub(in crate::engine) fn problem(&self) -> Option<&String> {
        self.problem.text()
    }
}

fn document(dir: &Path) -> Document {
    Document::new(dir, &DETACHED, String::new())
}

fn marks(document: &Document) -> io::Result<Marks> {
    match document.peek()? {
        Ok(marks) => Ok(marks.unwrap_or_default()),
        Err(unusable) => Err(io::Error::other(document.text_of(&unusable))),
    }
}

/// Changes the marks in a document. One that cannot be understood is moved aside; an empty one is
/// removed.
fn update(document: &Document, change: impl FnOnce(&mut Marks)) -> io::Result<()> {
    let path = document.path();
    let dir = path.parent().unwrap_or(Path::new("/"));
    path_security::make_private(dir).map_err(|e| document.named(&e))?;
    let _lock = lock::lock_shared(&path.with_extension("lock"))?;
    let mut marks = match document.peek()? {
        Ok(marks) => marks.unwrap_or_default(),
        Err(damaged) => {
            warn!("{}", document.move_aside(&damaged));
            Marks::new()
        }
    };
    change(&mut marks);
    if marks.is_empty() {
        document.remove()?;
    } else {
        document.write(&marks)?;
    }
    // A decision must outlive a power failure.
    File::open(dir).and_then(|dir| dir.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BY: Caller = Caller { uid: 0, pid: 7 };

    struct Bed(tempfile::TempDir);

    impl Bed {
        fn new() -> Self {
            let bed = Self(tempfile::tempdir().unwrap());
            fs::create_dir(bed.0.path().join("pins")).unwrap();
            bed
        }

        fn agent(&self, pins: &str) -> AgentConfig {
            AgentConfig {
                pin_dir: self.0.path().join(pins),
                persistent_dir: self.0.path().join("lasting"),
                state_dir: self.0.path().join("state"),
                ..AgentConfig::default()
            }
        }

        fn mark(&self, pins: &str) -> DetachMark {
            DetachMark::new(&self.agent(pins))
        }

        /// Makes a directory that cannot be written.
        fn block(&self, dir: &str) {
            let dir = self.0.path().join(dir);
            let _ = fs::remove_dir_all(&dir); // There may be none.
            fs::write(dir, "").unwrap();
        }
    }

    #[test]
    fn pins_are_the_same_however_they_are_spelt() {
        let bed = Bed::new();
        std::os::unix::fs::symlink("pins", bed.0.path().join("link")).unwrap();
        let spellings = ["pins", "pins/", "./pins", "pins/../pins", "link", "link/."];
        for (set, read) in spellings.iter().zip(spellings.iter().rev()) {
            assert_eq!(bed.mark(set).set(BY), None);
            assert_eq!(bed.mark(read).load(), Some(BY), "{set} {read}");
            bed.mark(read).clear().unwrap();
            assert_eq!(bed.mark(set).load(), None, "{set} {read}");
        }
        // The directory is missing while detached.
        fs::remove_dir(bed.0.path().join("pins")).unwrap();
        bed.mark("link").set(BY);
        assert_eq!(bed.mark("pins").load(), Some(BY));
    }

    #[test]
    fn each_daemon_has_its_own_detachment_mark() {
        let bed = Bed::new();
        let other = Caller { uid: 0, pid: 8 };
        bed.mark("a").set(BY);
        bed.mark("b").set(other);
        assert_eq!(bed.mark("a").load(), Some(BY));
        bed.mark("a").clear().unwrap();
        assert_eq!(bed.mark("a").load(), None);
        assert_eq!(bed.mark("b").load(), Some(other));
    }

    #[test]
    fn unreadable_mark_means_detached() {
        let bed = Bed::new();
        for dir in ["lasting", "state"] {
            let path = bed.0.path().join(dir).join(DETACHED.file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            for text in [
                "",
                "{",
                "{\"format\":3,\"owner\":\"\",\"content\":{}}",
                "\u{0}",
            ] {
                fs::write(&path, text).unwrap();
                let mut mark = bed.mark("pins");
                assert_eq!(mark.load(), Some(Caller::UNREADABLE_MARK), "{text:?}");
                let problem = mark.problem().unwrap();
                assert!(problem.contains(DETACHED.file), "{problem}");
                // It is not replaced before a user decides.
                mark.retry(Some(Caller::UNREADABLE_MARK));
                assert_eq!(fs::read_to_string(&path).unwrap(), text);
                mark.clear().unwrap();
                assert!(mark.problem().is_none());
                assert_eq!(bed.mark("pins").load(), None);
            }
        }
    }

    #[test]
    fn unsaved_mark_says_how_long_it_lasts() {
        let bed = Bed::new();
        bed.block("lasting");
        let mut mark = bed.mark("pins");
        let until = |kept: Option<NotLasting>| kept.map(|kept| kept.until);
        assert_eq!(until(mark.set(BY)), Some(Lasts::UntilReboot));
        assert!(mark.problem().is_some());
        assert_eq!(bed.mark("pins").load(), Some(BY));
        bed.block("state");
        assert_eq!(until(mark.set(BY)), Some(Lasts::UntilStart));
        fs::remove_file(bed.0.path().join("lasting")).unwrap();
        mark.retry(Some(BY));
        assert_eq!(mark.problem(), None);
        assert_eq!(bed.mark("pins").load(), Some(BY));
    }

    #[test]
    fn changed_persistent_dir_keeps_mark() {
        let bed = Bed::new();
        let moved = AgentConfig {
            persistent_dir: bed.0.path().join("moved"),
            ..bed.agent("pins")
        };
        let mut mark = bed.mark("pins");
        mark.set(BY);
        // At once by the state directory, later by the changed files.
        assert_eq!(DetachMark::new(&moved).load(), Some(BY));
        mark.follow(&moved.persistent_dir, Some(BY));
        fs::remove_dir_all(bed.0.path().join("state")).unwrap();
        assert_eq!(DetachMark::new(&moved).load(), Some(BY));
        mark.clear().unwrap();
        assert_eq!(DetachMark::new(&moved).load(), None);
        assert_eq!(bed.mark("pins").load(), None);
    }
}
