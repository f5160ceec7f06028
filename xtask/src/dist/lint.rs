//! Checks the packages with Debian's and rpm's own linters.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::bail;

use crate::{
    process::{apt_install, have},
    root,
};

/// Fails if lintian reports an error or a warning.
pub(crate) fn lintian(deb: &Path) -> anyhow::Result<()> {
    if !have("lintian") {
        apt_install(&["lintian"], "to check the deb")?;
    }
    judge(
        Command::new("lintian")
            .args(["--fail-on=error,warning", "--tag-display-limit=0"])
            .args(["--allow-root", "--no-cfg"])
            .arg(deb),
    )
}

/// Fails if rpmlint reports an error.
pub(crate) fn rpmlint(rpm: &Path) -> anyhow::Result<()> {
    if !have("rpmlint") {
        apt_install(&["rpmlint"], "to check the rpm")?;
    }
    judge(
        Command::new("rpmlint")
            .arg("--config")
            .arg(root().join("packaging/rpm/rpmlint.toml"))
            .arg(rpm),
    )
}

/// Runs a command; if it fails, its output is the error.
fn judge(command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        bail!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
