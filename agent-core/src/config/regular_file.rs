//! Regular files; no other kind is read. Opening a FIFO waits for a writer, a device may never end,
//! and opening some (a watchdog, a tape) has side effects.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    path::Path,
};

use nix::libc::{O_NOCTTY, O_NONBLOCK};

use crate::progress::Stepwise;

/// With these flags (and O_CLOEXEC, which std sets) opening any kind of file does not block.
pub const FLAGS: i32 = O_NONBLOCK | O_NOCTTY;

/// Opens a regular file for reading.
///
/// # Errors
///
/// The file system's error, or the kind of a file that is not regular.
pub fn open(path: &Path) -> io::Result<File> {
    check(&fs::metadata(path)?)?;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(FLAGS)
        .open(path)?;
    // The file may have been replaced since.
    check(&file.metadata()?)?;
    Ok(file)
}

/// Reads a file of up to `limit` bytes.
///
/// # Errors
///
/// As [`open`]; `InvalidData` if the file is not UTF-8, `FileTooLarge` if it is longer.
pub fn read(path: &Path, limit: u64) -> io::Result<String> {
    let file = open(path)?;
    // Allocated at once: growing a string copies it, and takes twice the memory.
    let size = file.metadata()?.len().min(limit) + 1;
    let mut text = String::new();
    text.try_reserve_exact(usize::try_from(size).map_err(io::Error::other)?)?;
    let pieces = Stepwise(file);
    pieces.take(limit + 1).read_to_string(&mut text)?;
    if text.len() as u64 > limit {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it is larger than {limit} bytes"),
        ));
    }
    Ok(text)
}

/// # Errors
///
/// If the file is not a regular file: its kind.
pub fn check(meta: &Metadata) -> io::Result<()> {
    let kind = meta.file_type();
    let found = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO (named pipe)"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() {
        "a character device"
    } else if kind.is_block_device() {
        "a block device"
    } else {
        "a symbolic link"
    };
    Err(io::Error::other(format!(
        "this is {found}; replace it with a regular file"
    )))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn special_file_is_named_and_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        mkfifo(&at("fifo"), Mode::from_bits_truncate(0o600)).unwrap();
        let _listener = UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink(at("fifo"), at("link")).unwrap();
        for (path, found) in [
            (at("fifo"), "a FIFO"),
            (at("link"), "a FIFO"),
            (at("socket"), "a socket"),
            (dir.path().to_owned(), "a directory"),
            ("/dev/zero".into(), "a character device"),
        ] {
            let error = read(&path, 10).unwrap_err().to_string();
            assert!(error.contains(found), "{}: {error}", path.display());
        }
    }

    #[test]
    fn file_is_read_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), "12345");
        let error = read(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        fs::write(&path, b"\xff").unwrap();
        let error = read(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
