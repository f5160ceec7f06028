//! Checks of the files in which the daemon keeps state across restarts.

use std::{
    io,
    path::{Path, PathBuf},
};

use rto_agent_core::{config::regular_file, printable};
use rto_agent_daemon::engine::{MAX_STATE_FILE, state_file_aside};
use serde::de::IgnoredAny;

use super::{Check, Finding};

/// Files that could not be parsed and were moved aside, and files that cannot be read now.
pub(super) fn files(files: &[(PathBuf, &'static str)]) -> Vec<Finding> {
    const ID: &str = "state-files";
    let lost_data = Check(ID, "the daemon no longer has the data of this file");
    let mut findings = Vec::new();
    for (path, lost) in files {
        let aside = state_file_aside(path);
        let (file, at) = (printable::path(path), printable::path(&aside));
        if aside.exists() {
            findings.push(lost_data.warning(
                format!("{at} was damaged and has been moved aside: {lost}"),
                format!(
                    "restore {file} from a backup while the daemon is stopped, if there is one; \
                     then rm {at}"
                ),
            ));
        }
        if let Err(e) = read(path) {
            let check = Check(
                ID,
                "the daemon ignores a damaged file when it starts, or does not start",
            );
            findings.push(check.problem(
                format!("{file}: {e}"),
                "restore it from a backup while the daemon is stopped, or remove it",
            ));
        }
    }
    if findings.is_empty() {
        findings.push(lost_data.ok("none of the readable files is damaged"));
    }
    findings
}

/// Checks that a file contains JSON, if it exists and may be read.
fn read(path: &Path) -> io::Result<()> {
    use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    match regular_file::read(path, MAX_STATE_FILE) {
        Ok(text) => match serde_json::from_str::<IgnoredAny>(&text) {
            Ok(_) => Ok(()),
            Err(e) => Err(io::Error::other(format!("cannot be understood: {e}"))),
        },
        Err(e) if matches!(e.kind(), NotFound | NotADirectory | PermissionDenied) => Ok(()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{super::Severity, *};

    #[test]
    fn damaged_state_files_are_found_with_their_fix() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tuning.json");
        let looked_at = || files(&[(path.clone(), "timers start learning again")]);
        assert_eq!(looked_at()[0].severity, Severity::Ok);
        fs::write(&path, "{}").unwrap();
        assert_eq!(looked_at()[0].severity, Severity::Ok);
        fs::write(&path, "{").unwrap();
        let [damaged] = &looked_at()[..] else {
            panic!("{:?}", looked_at());
        };
        assert_eq!(damaged.severity, Severity::Problem);
        assert!(damaged.found.contains(&path.display().to_string()));
        fs::rename(&path, dir.path().join("tuning.json.unreadable")).unwrap();
        let [aside] = &looked_at()[..] else {
            panic!("{:?}", looked_at());
        };
        assert_eq!(aside.severity, Severity::Warning);
        assert!(aside.found.ends_with("timers start learning again"));
        let fix = aside.fix.as_deref().unwrap();
        assert!(fix.contains("tuning.json.unreadable"), "{fix}");
        fs::create_dir(&path).unwrap();
        assert_eq!(looked_at().len(), 2);
    }
}
