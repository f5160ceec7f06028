//! The test harness itself: a test that could not run is not reported as passed.

use std::{
    os::unix::process::CommandExt as _,
    process::{Output, Stdio},
};

use crate::prelude::*;

/// Runs some of these tests as an unprivileged user. The path works without access to the directory of the binary.
fn run(args: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new("/proc/self/exe");
    command.args(args).args(["--color", "never", "syn::"]);
    command.env_remove("RTO_TESTS_REQUIRE_ROOT");
    command.env_remove(super::REPORT);
    command.uid(NOBODY).gid(NOBODY).stdin(Stdio::null());
    Ok(command.current_dir("/").output()?)
}

test!(without_root_no_test_passes);
fn without_root_no_test_passes() -> anyhow::Result<()> {
    let count = super::registry::count("syn");
    for (args, outcome) in [
        (&[][..], format!("ok. 0 passed; 0 failed; {count} ignored")),
        (
            &["--include-ignored"],
            format!("FAILED. 0 passed; {count} failed; 0 ignored"),
        ),
        (
            &["--ignored"],
            format!("FAILED. 0 passed; {count} failed; 0 ignored"),
        ),
    ] {
        let output = run(args)?;
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        ensure!(stdout.contains(&outcome), "{args:?}: {stdout}{stderr}");
        ensure!(!stdout.contains("... ok"), "{args:?}: {stdout}");
        ensure!(stderr.contains("need root"), "{args:?}: {stderr}");
        assert_eq!(
            output.status.success(),
            args.is_empty(),
            "{args:?}: {stdout}"
        );
    }
    Ok(())
}
