//! A JSON document in `persistent_dir` or `state_dir`: replaced atomically, with a format version and
//! an owner.

use std::{
    fs,
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
};

use rto_agent_core::{
    config::{atomic_file::AtomicFile, regular_file},
    path_security, printable,
    progress::Stepwise,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tracing::warn;

/// Longest file, bytes.
pub const MAX_FILE: u64 = 1 << 30;
/// Bytes per write.
const PIECE: usize = 64 << 10;

/// A kind of document.
#[derive(Debug)]
pub(in crate::engine) struct Kind {
    pub(in crate::engine) file: &'static str,
    /// Another structure of the content gets another number.
    pub(super) format: u32,
}

/// The file.
#[derive(Serialize, Deserialize)]
struct Versioned<O, T> {
    format: u32,
    /// Identifies this daemon among several.
    owner: O,
    content: T,
}

/// The part that every format has.
#[derive(Deserialize)]
struct Head {
    format: u32,
    #[serde(default)]
    owner: String,
}

/// Why an existing document is not used.
#[derive(Debug)]
pub(super) enum Unusable {
    /// It belongs to another daemon.
    Taken,
    /// It cannot be parsed or has another format: the reason, in words.
    Damaged(String),
}

/// A document of one daemon, which is its only writer.
#[derive(Debug)]
pub(super) struct Document {
    dir: PathBuf,
    kind: &'static Kind,
    /// Identifies the daemon, or is empty where the directory does.
    owner: String,
    /// The file belongs to another daemon.
    is_taken: bool,
}

impl Document {
    pub(super) fn new(dir: &Path, kind: &'static Kind, owner: String) -> Self {
        Self {
            dir: dir.to_owned(),
            kind,
            owner,
            is_taken: false,
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.dir.join(self.kind.file)
    }

    /// Reads what an earlier run left, with a warning if that is lost. Moves a file that cannot be
    /// parsed aside, and does not touch a file of another daemon.
    pub(super) fn load<T: DeserializeOwned>(&mut self) -> io::Result<(Option<T>, Option<String>)> {
        let path = self.path();
        if let Err(e) = AtomicFile::remove_stale(&path) {
            let path = printable::path(&path);
            warn!("a temporary file of {path} cannot be removed: {e}");
        }
        match self.peek()? {
            Ok(content) => Ok((content, None)),
            Err(Unusable::Taken) => {
                self.is_taken = true;
                Ok((None, Some(self.text_of(&Unusable::Taken))))
            }
            Err(damaged) => Ok((None, Some(self.move_aside(&damaged)))),
        }
    }

    /// Moves a file that cannot be used aside, and says why and where to.
    pub(super) fn move_aside(&self, damaged: &Unusable) -> String {
        let (path, reason) = (self.path(), self.text_of(damaged));
        let aside = aside(&path);
        match fs::rename(&path, &aside) {
            Ok(()) => format!(
                "{reason}; it was moved to {}: restore it from a backup while the daemon is stopped, or remove it",
                printable::path(&aside)
            ),
            Err(e) => format!("{reason}; it cannot be moved aside: {e}; remove it"),
        }
    }

    /// As [`Self::load`], for callers that may not be this directory's daemon: changes nothing.
    pub(super) fn peek<T: DeserializeOwned>(&self) -> io::Result<Result<Option<T>, Unusable>> {
        let text = match regular_file::read(&self.path(), MAX_FILE) {
            Ok(text) => text,
            // Without a directory nothing was ever saved.
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return Ok(Ok(None));
            }
            Err(e) if e.kind() == io::ErrorKind::InvalidData => String::new(),
            Err(e) => return Err(self.named(&e)),
        };
        let damaged = |e| Unusable::Damaged(format!("cannot be understood: {e}"));
        let read = serde_json::from_str::<Versioned<String, T>>(&text);
        let head = match &read {
            Ok(read) => Ok(Head {
                format: read.format,
                owner: read.owner.clone(),
            }),
            // Another format may have another structure.
            Err(_) => serde_json::from_str(&text).map_err(damaged),
        };
        let head = match head {
            Ok(head) => head,
            Err(damaged) => return Ok(Err(damaged)),
        };
        Ok(if head.format != self.kind.format {
            Err(Unusable::Damaged(format!(
                "has format {}, this version reads {}",
                head.format, self.kind.format
            )))
        } else if head.owner != self.owner {
            Err(Unusable::Taken)
        } else {
            read.map(|read| Some(read.content)).map_err(damaged)
        })
    }

    /// Why the file is not used, with its path.
    pub(super) fn text_of(&self, unusable: &Unusable) -> String {
        match unusable {
            Unusable::Taken => self.named(&taken()).to_string(),
            Unusable::Damaged(reason) => format!("{} {reason}", printable::path(&self.path())),
        }
    }

    /// Writes the document.
    ///
    /// # Errors
    ///
    /// If the file cannot be written. It is unchanged then.
    pub(super) fn write<T: Serialize>(&self, content: &T) -> io::Result<()> {
        let draft = self.stage(content)?;
        self.commit(draft)
    }

    /// Writes a draft beside the file.
    pub(super) fn stage<T: Serialize>(&self, content: &T) -> io::Result<AtomicFile> {
        let stage = || {
            if self.is_taken {
                return Err(taken());
            }
            path_security::make_private(&self.dir)?;
            AtomicFile::write_with(&self.path(), 0o600, |to| {
                let mut to = BufWriter::with_capacity(PIECE, Stepwise(to));
                let versioned = Versioned {
                    format: self.kind.format,
                    owner: &*self.owner,
                    content,
                };
                serde_json::to_writer(&mut to, &versioned)?;
                to.flush()
            })
        };
        stage().map_err(|e| self.named(&e))
    }

    /// Moves a draft into place.
    pub(super) fn commit(&self, draft: AtomicFile) -> io::Result<()> {
        draft.commit().map_err(|e| self.named(&e))
    }

    /// Removes the file, if there is one.
    pub(super) fn remove(&self) -> io::Result<()> {
        match fs::remove_file(self.path()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(self.named(&e)),
            _ => Ok(()),
        }
    }

    /// Whether the file belongs to another daemon, and is not written.
    pub(super) const fn is_taken(&self) -> bool {
        self.is_taken
    }

    pub(super) fn named(&self, error: &io::Error) -> io::Error {
        let path = self.path();
        io::Error::new(error.kind(), format!("{}: {error}", printable::path(&path)))
    }
}

/// Identifies the current boot.
pub(in crate::engine) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

fn taken() -> io::Error {
    io::Error::other("it belongs to another daemon: give this one its own persistent_dir")
}

/// The path that an unreadable file is moved to.
pub fn aside(path: &Path) -> PathBuf {
    path.with_extension("json.unreadable")
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Kind = Kind {
        file: "d.json",
        format: 1,
    };
    const SECOND: Kind = Kind {
        file: "d.json",
        format: 2,
    };

    #[test]
    fn saved_document_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("made");
        let mut document = Document::new(&dir, &FIRST, "a".to_owned());
        assert_eq!(document.load::<Vec<u64>>().unwrap(), (None, None));
        document.write(&[1, 2]).unwrap();
        assert_eq!(document.load().unwrap(), (Some(vec![1, 2]), None));
        let mut other = Document::new(&dir, &FIRST, "b".to_owned());
        let (content, warning) = other.load::<Vec<u64>>().unwrap();
        assert_eq!(content, None);
        assert!(warning.unwrap().contains("belongs to another daemon"));
        assert!(other.write(&[3]).is_err());
        assert_eq!(document.load().unwrap(), (Some(vec![1, 2]), None));
    }

    #[test]
    fn unparsable_document_is_moved_aside() {
        let dir = tempfile::tempdir().unwrap();
        let mut document = Document::new(dir.path(), &SECOND, "a".to_owned());
        let path = dir.path().join("d.json");
        for (text, expected) in [
            (
                "{\"format\":1,\"owner\":\"a\",\"content\":[]}",
                "has format 1, this version reads 2",
            ),
            // Another format may have another structure.
            (
                "{\"format\":3,\"all\":{}}",
                "has format 3, this version reads 2",
            ),
            ("{\"format\":2,\"own", "cannot be understood"),
            ("", "cannot be understood"),
        ] {
            fs::write(&path, text).unwrap();
            let (content, warning) = document.load::<Vec<u64>>().unwrap();
            assert_eq!(content, None);
            assert!(warning.unwrap().contains(expected), "{text}");
            assert_eq!(document.load::<Vec<u64>>().unwrap(), (None, None));
        }
        assert!(dir.path().join("d.json.unreadable").exists());
    }
}
