//! Checks whether a user other than root may change the configuration, and with it the timers of every connection.

use std::{
    io,
    path::{self, Path, PathBuf},
};

use crate::{path_security, printable};

/// Problems with owners and modes of the files and their directories, with the fix, one line each.
pub(super) fn exposed<'a>(dir: &Path, files: impl Iterator<Item = &'a PathBuf>) -> Vec<String> {
    let dir = refusal(dir, path_security::check_source_dir);
    let files = files.filter_map(|file| refusal(file, path_security::check_source_file));
    let mut exposed: Vec<String> = dir.into_iter().chain(files).collect();
    // A problem of a directory is found once for each of its files.
    exposed.sort_unstable();
    exposed.dedup();
    exposed
}

fn refusal(path: &Path, check: fn(&Path) -> io::Result<()>) -> Option<String> {
    let checked = path::absolute(path).and_then(|path| check(&path));
    // A file that cannot be inspected cannot be read either, which is reported as an error.
    let refusal = checked.err().filter(|e| e.kind() == io::ErrorKind::Other)?;
    let refusal = refusal.to_string();
    Some(format!(
        "users other than root can change the configuration: {}",
        printable::text(&refusal)
    ))
}
