//! The systemd unit: systemd accepts it, and it is hardened.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests, outside of #[test] functions"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Systemd's own scale, times ten, says "OK" up to 49; a daemon of this kind can reach a lower value.
const MOST_EXPOSURE: &str = "--threshold=30";

fn source(name: &str) -> String {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../systemd");
    fs::read_to_string(dir.join(name)).unwrap()
}

/// The unit in a separate directory, with a program that exists here, and with this change.
fn staged(from: &str, to: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rto-agent.service");
    let unit = source("rto-agent.service").replace("/usr/local/bin/rto-agent", "/bin/true");
    fs::write(&path, unit.replace(from, to)).unwrap();
    (dir, path)
}

/// Fails with the output of systemd-analyze if that refuses the unit, or says something about rto-agent's files.
fn analyze(args: &[&str], unit: &Path) -> Result<(), String> {
    let output = Command::new("systemd-analyze")
        .args(args)
        .arg(unit)
        .env("SYSTEMD_PAGER", "cat")
        .output()
        .expect("systemd-analyze is missing; cargo xtask setup installs it");
    let message = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let is_named = args[0] == "verify" && message.contains("rto-agent.service");
    if output.status.success() && !is_named {
        Ok(())
    } else {
        Err(message)
    }
}

fn verify(unit: &Path) -> Result<(), String> {
    analyze(&["verify", "--man=no"], unit)
}

#[test]
fn systemd_understands_the_unit() {
    let (_dir, path) = staged("", "");
    assert_eq!(verify(&path), Ok(()));
    // The control: systemd-analyze would report a mistake.
    let (_dir, path) = staged("Type=notify", "Type=nonsense");
    assert_ne!(verify(&path), Ok(()));
}

#[test]
fn systemd_understands_the_drop_in() {
    let (dir, path) = staged("", "");
    let drop_in = dir.path().join("rto-agent.service.d/open-sockets.conf");
    fs::create_dir(drop_in.parent().unwrap()).unwrap();
    let text = source("open-sockets.conf");
    fs::write(&drop_in, &text).unwrap();
    assert_eq!(verify(&path), Ok(()));
    let wrong = text.replace("RestrictNamespaces=net", "RestrictNamespaces=nonsense");
    fs::write(&drop_in, wrong).unwrap();
    assert_ne!(verify(&path), Ok(()));
}

/// The daemon calls membarrier(2) to wait for an RCU grace period.
#[test]
fn unit_allows_membarrier() {
    let unit = source("rto-agent.service");
    let mut lists = unit
        .lines()
        .filter_map(|line| line.strip_prefix("SystemCallFilter="));
    // systemd reads the lists in order, so a later one could remove the call.
    let last = lists.next_back().unwrap();
    assert!(
        last.split_whitespace().any(|call| call == "membarrier"),
        "{last}"
    );
}

#[test]
fn unit_exposure_is_low() {
    let (_dir, path) = staged("", "");
    let options = ["security", "--offline=true", MOST_EXPOSURE, "--no-pager"];
    assert_eq!(analyze(&options, &path), Ok(()));
}
