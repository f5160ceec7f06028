//! Which commit this is: RTO_AGENT_COMMIT, or what `git archive` wrote into `commit`, or the checkout's. The same sources
//! give the same answer, wherever they lie and whenever they are built.

use std::{env, fs, path::Path, process::Command};

const UNKNOWN: &str = "unknown";
/// Characters of a commit that are shown.
const LENGTH: usize = 12;

fn main() {
    for variable in ["RTO_AGENT_COMMIT", "TARGET"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=commit");
    let given = env::var("RTO_AGENT_COMMIT").ok();
    let archived = || fs::read_to_string("commit").ok();
    let commit = given
        .and_then(|text| clean(&text))
        .or_else(|| archived().and_then(|text| clean(&text)))
        .or_else(of_checkout)
        .unwrap_or_else(|| UNKNOWN.to_owned());
    println!("cargo::rustc-env=RTO_AGENT_COMMIT={commit}");
    let target = env::var("TARGET").unwrap_or_else(|_| UNKNOWN.to_owned());
    println!("cargo::rustc-env=RTO_AGENT_TARGET={target}");
}

/// The beginning of a commit's hexadecimal name, and "-dirty" if that is behind it.
fn clean(text: &str) -> Option<String> {
    let text = text.trim();
    let (hash, dirty) = match text.strip_suffix("-dirty") {
        Some(hash) => (hash, "-dirty"),
        None => (text, ""),
    };
    let is_hash = hash.len() >= LENGTH && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| format!("{}{dirty}", &hash[..LENGTH]))
}

/// Only for a release build: others would be recompiled with each commit.
fn of_checkout() -> Option<String> {
    if env::var("PROFILE").ok()? != "release" {
        return None;
    }
    let workspace = Path::new("..").canonicalize().ok()?;
    // Not that of a checkout into which a tarball was unpacked.
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != workspace {
        return None;
    }
    for path in ["HEAD", "packed-refs"] {
        watch(&git(&["rev-parse", "--git-path", path])?);
    }
    if let Some(branch) = git(&["symbolic-ref", "--quiet", "HEAD"]) {
        watch(&git(&["rev-parse", "--git-path", &branch])?);
    }
    for path in [
        "src",
        "Cargo.toml",
        "../advice/src",
        "../agent/src",
        "../agent-common/src",
        "../agent-core/src",
        "../agent-kernel/src",
        "../model/src",
        "../Cargo.lock",
    ] {
        watch(path);
    }
    let commit = git(&["rev-parse", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no", ".."])?;
    let dirty = if changed.is_empty() { "" } else { "-dirty" };
    clean(&format!("{commit}{dirty}"))
}

fn watch(path: &str) {
    // One that is not there would have every build run this again.
    if Path::new(path).exists() {
        println!("cargo::rerun-if-changed={path}");
    }
}

/// What git prints; `None` without git, or outside a checkout.
fn git(args: &[&str]) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "git, while this is built")]
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
