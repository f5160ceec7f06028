//! A file that is either replaced completely or not changed.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// A draft of a file's new content, beside the file. Removed when dropped.
///
/// A draft is always named `.<name>.new`, so that one left by a killed daemon can be found. There
/// must be only one draft of a file at a time.
#[derive(Debug)]
#[must_use]
pub struct AtomicFile {
    path: PathBuf,
    target: PathBuf,
}

impl AtomicFile {
    /// Writes a draft and syncs it, so that [`AtomicFile::commit`] cannot fail for lack of space.
    ///
    /// # Errors
    ///
    /// If the draft cannot be written; nothing is left of it.
    pub fn write(target: &Path, mode: u32, contents: &[u8]) -> io::Result<Self> {
        Self::write_with(target, mode, |file| file.write_all(contents))
    }

    /// As [`AtomicFile::write`], with a function that writes the content.
    pub fn write_with(
        target: &Path,
        mode: u32,
        write: impl FnOnce(&mut fs::File) -> io::Result<()>,
    ) -> io::Result<Self> {
        Self::remove_stale(target)?;
        let draft = Self {
            path: beside(target),
            target: target.to_owned(),
        };
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&draft.path)?;
        write(&mut file)?;
        file.sync_all()?;
        Ok(draft)
    }

    /// The path of the draft.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the draft into place.
    ///
    /// # Errors
    ///
    /// If the directory can no longer be changed. The file is unchanged then.
    pub fn commit(self) -> io::Result<()> {
        fs::rename(&self.path, &self.target)
    }

    /// Overwrites the existing file with the draft's content, for a file whose owner a new one
    /// cannot have. [`AtomicFile::finish`] completes that after a kill.
    ///
    /// # Errors
    ///
    /// If the file cannot be written: it has `former` again, as far as that can be written.
    pub fn commit_in_place(self, former: &[u8]) -> io::Result<()> {
        let whole = named(&self.target, "whole");
        fs::rename(&self.path, &whole)?;
        overwrite(&self.target, &fs::read(&whole)?).or_else(|e| {
            overwrite(&self.target, former)?;
            fs::remove_file(&whole)?;
            Err(e)
        })?;
        fs::remove_file(&whole)
    }

    /// Completes [`AtomicFile::commit_in_place`] of a killed daemon, and removes its draft.
    pub fn finish(target: &Path) -> io::Result<()> {
        let whole = named(target, "whole");
        match fs::read(&whole) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            text => {
                overwrite(target, &text?)?;
                fs::remove_file(&whole)?;
            }
        }
        Self::remove_stale(target)
    }

    /// Removes a draft of this file that a killed daemon has left.
    pub fn remove_stale(target: &Path) -> io::Result<()> {
        let left = beside(target);
        // Checks first: on a read-only file system, removing a missing file fails as well.
        match fs::symlink_metadata(&left) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
            Ok(_) => fs::remove_file(&left),
        }
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // After a commit there is no draft any more.
        let _ = fs::remove_file(&self.path);
    }
}

fn overwrite(target: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(target)?;
    file.write_all(text)?;
    file.set_len(text.len() as u64)?;
    file.sync_all()
}

fn beside(target: &Path) -> PathBuf {
    named(target, "new")
}

fn named(target: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(".");
    name.push(suffix);
    target.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<OsString> {
        let all = fs::read_dir(dir).unwrap();
        all.map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn interrupted_write_leaves_no_second_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f.toml");
        // As after a kill.
        std::mem::forget(AtomicFile::write(&file, 0o600, b"half").unwrap());
        assert_eq!(names(dir.path()), [".f.toml.new"]);
        AtomicFile::write(&file, 0o600, b"whole")
            .unwrap()
            .commit()
            .unwrap();
        assert_eq!(names(dir.path()), ["f.toml"]);
        assert_eq!(fs::read(&file).unwrap(), b"whole");
        drop(AtomicFile::write(&file, 0o600, b"another").unwrap());
        assert_eq!(names(dir.path()), ["f.toml"]);
        assert_eq!(fs::read(&file).unwrap(), b"whole");
    }

    #[test]
    fn overwriting_is_completed_after_a_kill() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f.toml");
        let draft = |text: &[u8]| AtomicFile::write(&file, 0o600, text).unwrap();
        fs::write(&file, "a former text").unwrap();
        draft(b"new").commit_in_place(b"a former text").unwrap();
        assert_eq!(names(dir.path()), ["f.toml"]);
        assert_eq!(fs::read(&file).unwrap(), b"new");
        // As after a kill, half way.
        fs::write(dir.path().join(".f.toml.whole"), "whole").unwrap();
        fs::write(&file, "wh").unwrap();
        std::mem::forget(draft(b"half"));
        AtomicFile::finish(&file).unwrap();
        assert_eq!(names(dir.path()), ["f.toml"]);
        assert_eq!(fs::read(&file).unwrap(), b"whole");
    }
}
