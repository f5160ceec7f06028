//! `cargo xtask ebpf`: builds the eBPF object that is kept next to its loader.
//!
//! The build is reproducible: the versions of compiler and linker are exact; the paths of sources, cargo home and
//! sysroot are remapped; debug sections are removed, BTF is kept. `--check` builds again and compares byte for byte.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use object::{Object as _, ObjectSection as _};
use sha2::{Digest as _, Sha256};

use crate::{
    process::{apt_install, command, output, run as run_command},
    root, tools,
};

const RUST: &str = "1.98.0";
const BPF_LINKER: &str = "0.13.0";
/// The LLVM that this rustc was built with; bpf-linker must read its bitcode.
const LLVM: &str = "22";
/// Where it is built.
const BUILD: &str = "target/ebpf";
const TARGET: &str = "bpfel-unknown-none";
pub(crate) const OBJECT: &str = "agent-kernel/src/datapath/rto-agent.bpf.o";

/// `cargo xtask ebpf`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fail if the object in the tree is not byte for byte what the sources give
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let linker = install_tools()?;
    run_command(cargo(&linker)?.args(["build", "--release"]).args(PACKAGE))?;
    let program = root().join(format!("{BUILD}/{TARGET}/release/rto-agent-ebpf"));
    let built = strip(&program)?;
    let path = root().join(OBJECT);
    if !args.check {
        fs::write(&path, &built)?;
        println!("{OBJECT}: {} bytes, sha256 {}", built.len(), sha256(&built));
        println!(
            "without line information: sha256 {}",
            executed_sha256(&built)?
        );
        return Ok(());
    }
    let mut clippy = cargo(&linker)?;
    clippy.args(["clippy", "--release"]).args(PACKAGE);
    run_command(clippy.args(["--", "-Dwarnings"]))?;
    check_loads(&path)?;
    let kept = fs::read(&path).with_context(|| path.display().to_string())?;
    for (what, bytes) in [("in the tree", &kept), ("built now", &built)] {
        println!("{what}: {} bytes, sha256 {}", bytes.len(), sha256(bytes));
    }
    if kept != built {
        bail!("{OBJECT} does not come from these sources; run cargo xtask ebpf and commit it");
    }
    println!("{OBJECT} comes from these sources");
    Ok(())
}

/// SHA-256 in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// SHA-256, in hexadecimal digits, of what the kernel executes: all sections but `.BTF.ext`, whose line information
/// changes with each comment and blank line of the sources. Its other part, the type of each function, follows from
/// the symbols and `.BTF`.
pub(crate) fn executed_sha256(object: &[u8]) -> anyhow::Result<String> {
    let file = object::File::parse(object)?;
    let mut hash = Sha256::new();
    for section in file.sections() {
        let (name, data) = (section.name()?, section.data()?);
        if ![".BTF.ext", ".rel.BTF.ext"].contains(&name) {
            hash.update(format!("{name} {}\n", data.len()));
            hash.update(data);
        }
    }
    Ok(hex(&hash.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Fields of `struct bpf_sock_ops` that only a full socket has, with their offsets (include/uapi/linux/bpf.h).
const OF_SOCKET: [(&str, u64); 25] = [
    ("snd_cwnd", 76),
    ("srtt_us", 80),
    ("bpf_sock_ops_cb_flags", 84),
    ("state", 88),
    ("rtt_min", 92),
    ("snd_ssthresh", 96),
    ("rcv_nxt", 100),
    ("snd_nxt", 104),
    ("snd_una", 108),
    ("mss_cache", 112),
    ("ecn_flags", 116),
    ("rate_delivered", 120),
    ("rate_interval_us", 124),
    ("packets_out", 128),
    ("retrans_out", 132),
    ("total_retrans", 136),
    ("segs_in", 140),
    ("data_segs_in", 144),
    ("segs_out", 148),
    ("data_segs_out", 152),
    ("lost_out", 156),
    ("sacked_out", 160),
    ("bytes_received", 168),
    ("bytes_acked", 176),
    ("__bindgen_anon_2", 184), // sk
];

/// Rejects loads of a socket's field from the context into the register that holds the context. On a request socket,
/// which has no such field, kernels before commit 10f86a2a5c91 (April 2026) leave the context's address there instead
/// of 0. A load from another struct looks the same, so only the fields that the sources name are looked for.
fn check_loads(object: &Path) -> anyhow::Result<()> {
    let sources = sources(&root().join("agent-ebpf/src"))?;
    let fields = named(&sources);
    let listing = output(
        Command::new(llvm_prefix().join("bin/llvm-objdump"))
            .args(["--disassemble", "--no-show-raw-insn"])
            .arg(object),
    )?;
    let mut is_sock_ops = false;
    let mut found = Vec::new();
    for line in listing.lines() {
        if let Some(section) = line.strip_prefix("Disassembly of section ") {
            // `.text` has the functions that the programs call.
            is_sock_ops = [".text:", "sockops:"].contains(&section);
        } else if is_sock_ops && clobbers(line, &fields).unwrap_or(false) {
            found.push(line);
        }
    }
    anyhow::ensure!(
        found.is_empty(),
        "{OBJECT}: these loads clobber their context on request sockets; read the field with an `out` register \
         (`word!`):\n{}",
        found.join("\n")
    );
    Ok(())
}

/// The text of all files of a directory.
fn sources(directory: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    for entry in fs::read_dir(directory)? {
        text += &fs::read_to_string(entry?.path())?;
    }
    Ok(text)
}

/// The offsets of the fields whose names are in the sources.
fn named(sources: &str) -> Vec<u64> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let names: HashSet<&str> = sources.split(|c| !is_part(c)).collect();
    let fields = OF_SOCKET.iter().filter(|(name, _)| names.contains(name));
    fields.map(|(_, offset)| *offset).collect()
}

/// Whether an instruction, as llvm-objdump prints it, loads one of these fields of `struct bpf_sock_ops` into its own
/// base register: "12: r1 = *(u64 *)(r1 + 0xb8)".
fn clobbers(line: &str, fields: &[u64]) -> Option<bool> {
    let (_, instruction) = line.split_once(':')?;
    let (to, from) = instruction.trim().split_once(" = *(u")?;
    let (_, address) = from.split_once(" *)(")?;
    let (from, offset) = address.trim_end_matches(')').split_once(" + 0x")?;
    let offset = u64::from_str_radix(offset, 16).ok()?;
    // A load of 32 bits may have half a register as its destination.
    let is_same = to.trim_start_matches(['r', 'w']) == from.trim_start_matches('r');
    Some(is_same && fields.contains(&offset))
}

const PACKAGE: [&str; 10] = [
    "--quiet",
    "--locked",
    "--package=rto-agent-ebpf",
    "--features=program",
    "--bin=rto-agent-ebpf",
    "--target",
    TARGET,
    "-Zbuild-std=core",
    "--config=profile.release.panic='abort'",
    "--config=profile.release.lto='fat'",
];

/// cargo, with all settings that determine the bytes of the object.
fn cargo(linker: &Path) -> anyhow::Result<Command> {
    let sysroot = output(&mut command(&format!(
        "rustup run {RUST} rustc --print=sysroot"
    )))?;
    let mut flags = vec![
        "--cfg=bpf_target_arch=\"x86_64\"".to_owned(),
        "-Cdebuginfo=2".to_owned(),
        format!("-Clinker={}", linker.display()),
        "-Clink-arg=--btf".to_owned(),
    ];
    flags.extend(tools::remap(&root(), Path::new(&sysroot)));
    let mut cargo = command(&format!("rustup run {RUST} cargo"));
    cargo
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TARGET_DIR", root().join(BUILD))
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_PROFILE_RELEASE_STRIP", "none")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "2")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_INCREMENTAL", "0");
    for leftover in ["RUSTFLAGS", "RUSTC", "RUSTUP_TOOLCHAIN", "CARGO"] {
        cargo.env_remove(leftover);
    }
    cargo.env_remove("CARGO_BUILD_TARGET");
    Ok(cargo)
}

/// Removes the debug sections, which are two thirds of the file.
fn strip(object: &Path) -> anyhow::Result<Vec<u8>> {
    let stripped = tempfile::NamedTempFile::new()?;
    run_command(
        Command::new(llvm_prefix().join("bin/llvm-objcopy"))
            .arg("--strip-debug")
            .arg(object)
            .arg(stripped.path()),
    )?;
    Ok(fs::read(stripped.path())?)
}

fn llvm_prefix() -> PathBuf {
    PathBuf::from(format!("/usr/lib/llvm-{LLVM}"))
}

/// Announces and installs the tools of the build; returns the linker.
fn install_tools() -> anyhow::Result<PathBuf> {
    let components = ["rust-src", "clippy", "rustfmt"];
    tools::toolchain(RUST, &components, "to rebuild the eBPF object")?;
    install_llvm()?;
    let bin = tools::installed(
        command(&format!(
            "rustup run {RUST} cargo install --no-default-features"
        ))
        .arg(format!("--features=llvm-{LLVM}"))
        .env("LLVM_PREFIX", llvm_prefix())
        .env_remove("RUSTUP_TOOLCHAIN"),
        "bpf-linker",
        BPF_LINKER,
        "about a minute",
    )?;
    Ok(bin.join("bpf-linker"))
}

fn install_llvm() -> anyhow::Result<()> {
    let needed = [
        "include/llvm-c/Core.h",
        "bin/llvm-objcopy",
        "bin/llvm-objdump",
    ];
    if needed.iter().all(|file| llvm_prefix().join(file).exists()) {
        return Ok(());
    }
    let of_llvm = ["llvm-VERSION", "llvm-VERSION-dev", "libpolly-VERSION-dev"];
    let of_llvm = of_llvm.map(|name| name.replace("VERSION", LLVM));
    let libraries = ["zlib1g-dev", "libzstd-dev", "libxml2-dev"];
    let packages = of_llvm.iter().map(String::as_str).chain(libraries);
    apt_install(&packages.collect::<Vec<_>>(), "to rebuild the eBPF object")
        .context("Debian and Ubuntu releases without these packages have them at apt.llvm.org")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executed_hash_ignores_line_information_only() {
        let object = fs::read(root().join(OBJECT)).unwrap();
        let ranges: Vec<_> = {
            let file = object::File::parse(&object[..]).unwrap();
            let range = |section: object::Section<'_, '_>| {
                let (begin, length) = section.file_range()?;
                Some((section.name().ok()?.to_owned(), begin + length / 2))
            };
            file.sections().filter_map(range).collect()
        };
        let hash = executed_sha256(&object).unwrap();
        for name in [
            ".text",
            ".rel.text",
            "sockops",
            ".maps",
            ".BTF",
            ".BTF.ext",
            ".rel.BTF.ext",
        ] {
            let (_, at) = ranges.iter().find(|(section, _)| section == name).unwrap();
            let mut changed = object.clone();
            changed[usize::try_from(*at).unwrap()] ^= 1;
            let is_equal = executed_sha256(&changed).unwrap() == hash;
            assert_eq!(is_equal, name.ends_with(".BTF.ext"), "{name}");
        }
    }

    #[test]
    fn load_into_its_own_register_is_refused() {
        let text = sources(&root().join("agent-ebpf/src")).unwrap();
        let fields = named(&text);
        // What the program reads: all must be found.
        for field in [80, 84, 88, 92, 104, 108, 128, 136, 148, 156, 176, 184] {
            assert!(fields.contains(&field), "{field}");
        }
        assert_eq!(named("let rate = ops.rate_delivered;"), [120]);
        for bad in [
            "     12:\tr1 = *(u64 *)(r1 + 0xb8)",
            "     12:\tr3 = *(u32 *)(r3 + 0x50)",
            "     12:\tw3 = *(u32 *)(r3 + 0x50)",
        ] {
            assert_eq!(clobbers(bad, &fields), Some(true), "{bad}");
        }
        for good in [
            "     12:  r2 = *(u64 *)(r1 + 0xb8)",
            "     12:  r1 = *(u64 *)(r1 + 0x8)",
            "     12:  r1 = *(u32 *)(r1 + 0x48)",
            "     12:  *(u64 *)(r1 + 0xb8) = r1",
            "     12:  r1 = r1",
        ] {
            assert_ne!(clobbers(good, &fields), Some(true), "{good}");
        }
    }
}
