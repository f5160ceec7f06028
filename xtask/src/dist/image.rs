//! The container image: an OCI archive with all architectures, written without a container tool.
//!
//! An image FROM scratch is one layer with the program, and four kinds of JSON documents that name each other by digest
//! (OCI image specification 1.1: layer, configuration, manifest, index).

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::Release;
use crate::{
    arch::Arch,
    ebpf::sha256,
    vm::image::{add, copy, needed},
};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Not compressed here: tools compress layers when they push them.
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// An image of one program.
pub(crate) struct Image<'a> {
    /// The program for each architecture.
    pub(crate) programs: &'a [(Arch, PathBuf)],
    /// The program's path in the image.
    pub(crate) path: &'a str,
    /// The `config` of the image: its entry point, and labels.
    pub(crate) config: Value,
}

/// Makes the image of these binaries of the agent.
pub(crate) fn make(
    release: &Release,
    programs: &[(Arch, PathBuf)],
    dist: &Path,
) -> anyhow::Result<()> {
    let image = Image {
        programs,
        path: "usr/bin/rto-agent",
        config: json!({
            "Entrypoint": ["/usr/bin/rto-agent"],
            "Cmd": ["run"],
            "Env": ["PATH=/usr/bin"],
            "Labels": {
                "org.opencontainers.image.title": "rto-agent",
                "org.opencontainers.image.description": env!("CARGO_PKG_DESCRIPTION"),
                "org.opencontainers.image.licenses": env!("CARGO_PKG_LICENSE"),
                "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
                "org.opencontainers.image.version": release.tag(),
            },
        }),
    };
    image.make(
        release,
        &dist.join(format!("rto-agent-{}.oci.tar", release.tag())),
    )
}

impl Image<'_> {
    /// Makes the archive.
    pub(crate) fn make(&self, release: &Release, archive: &Path) -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let layout = Layout(dir.path().join("layout"));
        let mut manifests = Vec::new();
        for (arch, program) in self.programs {
            let top = dir.path().join(arch.deb());
            copy(program, &top.join(self.path))?;
            // Of a static program none.
            add(&top, needed(program)?)?;
            let tar = dir.path().join("layer.tar");
            release.tar(&top, ".", &[], &tar)?;
            let layer = layout.blob(LAYER, &fs::read(tar)?)?;
            let created = release.time()?;
            let config = layout.json(
                CONFIG,
                &json!({
                    "architecture": arch.deb(),
                    "os": "linux",
                    "created": created,
                    "config": self.config,
                    "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
                    "history": [{"created": created, "created_by": "cargo xtask dist"}],
                }),
            )?;
            let mut manifest = layout.json(
                MANIFEST,
                &json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]}),
            )?;
            manifest["platform"] = json!({"architecture": arch.deb(), "os": "linux"});
            manifests.push(manifest);
        }
        let index =
            |manifests| json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
        let mut all = layout.json(INDEX, &index(manifests))?;
        all["annotations"] = json!({"org.opencontainers.image.ref.name": release.tag()});
        fs::write(layout.0.join("index.json"), index(vec![all]).to_string())?;
        fs::write(
            layout.0.join("oci-layout"),
            r#"{"imageLayoutVersion": "1.0.0"}"#,
        )?;
        release.tar(&layout.0, ".", &[], archive)
    }
}

/// The directory of an image.
struct Layout(PathBuf);

impl Layout {
    /// Adds a document; returns its descriptor.
    fn json(&self, kind: &str, document: &Value) -> anyhow::Result<Value> {
        self.blob(kind, document.to_string().as_bytes())
    }

    fn blob(&self, kind: &str, bytes: &[u8]) -> anyhow::Result<Value> {
        let blobs = self.0.join("blobs/sha256");
        fs::create_dir_all(&blobs)?;
        let hash = sha256(bytes);
        fs::write(blobs.join(&hash), bytes)?;
        Ok(json!({"mediaType": kind, "digest": format!("sha256:{hash}"), "size": bytes.len()}))
    }
}
