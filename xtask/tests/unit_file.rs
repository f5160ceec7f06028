//! The systemd unit: systemd accepts it, and it is hardened.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests, outside of #[test] functions"
)]

use std::{fs, path::Path, process::Command};

/// systemd's own scale says "OK" up to 4.9; a daemon of this kind can reach a lower value.
const MOST_EXPOSURE: f64 = 3.0;

fn unit() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd/rto-agent.service");
    fs::read_to_string(path).unwrap()
}

/// The unit in a separate directory, with its program replaced by one that exists here.
fn staged() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rto-agent.service");
    fs::write(
        &path,
        unit().replace("/usr/local/bin/rto-agent", "/bin/true"),
    )
    .unwrap();
    (dir, path)
}

fn analyze(args: &[&str], unit: &Path) -> (bool, String) {
    let output = Command::new("systemd-analyze")
        .args(args)
        .arg(unit)
        .env("SYSTEMD_PAGER", "cat")
        .output()
        .expect("systemd-analyze is missing; cargo xtask setup installs it");
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[test]
fn systemd_understands_it() {
    let (_dir, path) = staged();
    let (good, said) = analyze(&["verify", "--man=no"], &path);
    let about_us: Vec<&str> = said
        .lines()
        .filter(|l| l.contains("rto-agent.service"))
        .collect();
    assert!(good && about_us.is_empty(), "{said}");
}

#[test]
fn systemd_understands_the_drop_in() {
    let (dir, path) = staged();
    let drop_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd/open-sockets.conf");
    let place = dir.path().join("rto-agent.service.d");
    fs::create_dir(&place).unwrap();
    fs::copy(&drop_in, place.join("open-sockets.conf")).unwrap();
    let (good, said) = analyze(&["verify", "--man=no"], &path);
    assert!(good && !said.contains("open-sockets.conf"), "{said}");
    // The control: systemd-analyze would report a mistake.
    let text = fs::read_to_string(&drop_in).unwrap();
    let wrong = text.replace("RestrictNamespaces=net", "RestrictNamespaces=nonsense");
    fs::write(place.join("open-sockets.conf"), wrong).unwrap();
    let (good, said) = analyze(&["verify", "--man=no"], &path);
    assert!(!good || said.contains("open-sockets.conf"), "{said}");
}

#[test]
fn a_mistake_would_be_noticed() {
    let (_dir, path) = staged();
    fs::write(&path, unit().replace("Type=notify", "Type=nonsense")).unwrap();
    let (good, said) = analyze(&["verify", "--man=no"], &path);
    assert!(!good || said.contains("rto-agent.service"), "{said}");
}

/// The daemon calls membarrier(2) to wait for an RCU grace period.
#[test]
fn membarrier_is_allowed() {
    let unit = unit();
    let allowed = unit
        .lines()
        .filter_map(|line| line.strip_prefix("SystemCallFilter="))
        .filter(|list| !list.starts_with('~'))
        .any(|list| list.split_whitespace().any(|call| call == "membarrier"));
    assert!(allowed, "{unit}");
    // systemd reads the lists in order, so a later one could remove the call.
    let last = unit.rfind("SystemCallFilter=").unwrap();
    assert!(!unit[last..].starts_with("SystemCallFilter=~"), "{unit}");
}

#[test]
fn exposure_is_low() {
    let (_dir, path) = staged();
    let (_, said) = analyze(&["security", "--offline=true", "--no-pager"], &path);
    let line = said
        .lines()
        .find(|l| l.contains("Overall exposure level"))
        .expect("no verdict");
    let exposure: f64 = line
        .split_whitespace()
        .find_map(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("{line}"));
    assert!(exposure <= MOST_EXPOSURE, "{said}");
}
