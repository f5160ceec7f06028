//! A file that is replaced completely or not changed.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// What a file is to become, written beside it; removed when dropped.
///
/// Its name is always the same, `.<name>.new`: what a killed daemon has left is found again. There must
/// not be two at once for one file.
#[derive(Debug)]
#[must_use]
pub struct AtomicFile {
    path: PathBuf,
    target: PathBuf,
}

impl AtomicFile {
    /// Writes it to the disk, so that [`AtomicFile::commit`] has nothing left to do that can run out of space.
    ///
    /// # Errors
    ///
    /// If it cannot be written; nothing is left of it then.
    pub fn write(target: &Path, mode: u32, contents: &[u8]) -> io::Result<Self> {
        Self::write_with(target, mode, |file| file.write_all(contents))
    }

    /// The same with a function that writes to the file.
    ///
    /// # Errors
    ///
    /// As [`AtomicFile::write`].
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

    /// Where it is until then.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames it into place.
    ///
    /// # Errors
    ///
    /// If the directory no longer takes it; the file is as before then.
    pub fn commit(self) -> io::Result<()> {
        fs::rename(&self.path, &self.target)
    }

    /// Removes what a killed daemon has left of one.
    pub fn remove_stale(target: &Path) -> io::Result<()> {
        let left = beside(target);
        // Looked for first: where nothing may be written, to remove what is not there is refused too.
        match fs::symlink_metadata(&left) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
            Ok(_) => fs::remove_file(&left),
        }
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // Of one that was committed there is nothing left.
        let _gone = fs::remove_file(&self.path);
    }
}

fn beside(target: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(".new");
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
    fn nothing_but_the_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f.toml");
        // As a killed daemon leaves it.
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
}
