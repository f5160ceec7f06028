//! The cost of the programs for the kernel's verifier.

use std::{collections::BTreeMap, process::Command};

use anyhow::{Context as _, ensure};
use aya::{
    Btf, EbpfLoader,
    programs::{BtfTracePoint, Iter, LsmCgroup, Program, ProgramInfo, SockOps},
};
use rto_agent_common::{features, globals, maps, statistics};
use rto_agent_kernel::{
    datapath::OBJECT,
    kernel::{btf, kfuncs},
};

pub use crate::declared::VERIFIER_LIMITS as LIMITS;

/// The result for one program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verified {
    /// Instructions processed.
    Instructions(u32),
    /// The program loads, but this kernel does not report the number (`bpf_prog_info.verified_insns` was added in Linux
    /// 5.16).
    Uncounted,
    /// The program does not load on this kernel.
    Refused(String),
}

/// Loads each program into the kernel with all its optional parts switched on.
pub fn verified() -> anyhow::Result<BTreeMap<&'static str, Verified>> {
    let mut mode = statistics::ON | statistics::UNMATCHED | statistics::RTT_AT_END;
    if rto_agent_kernel::datapath::probe::tells_process() {
        mode |= statistics::PROCESS;
    }
    let interval = 1_000_000_000_u64;
    let btf = btf::Btf::vmlinux()?;
    let (offsets, types) = (btf.request_offsets()?.values(), btf.socket_types().values());
    let mut loader = EbpfLoader::new();
    for (name, offset) in globals::OFFSETS.into_iter().zip(&offsets) {
        loader.override_global(name, offset, true);
    }
    for (name, value) in globals::SOCKET_TYPES.into_iter().zip(&types) {
        loader.override_global(name, value, true);
    }
    let mut ebpf = loader
        .override_global(globals::STATISTICS_MODE, &mode, true)
        .override_global(globals::RTT_INTERVAL_NS, &interval, true)
        .override_global(globals::SHAPES_SYNS, &1u8, true)
        .override_global(globals::FEATURES, &features::ALL, true)
        .map_max_entries(maps::POLICIES, 1)
        .map_max_entries(maps::STATISTICS, 1)
        .load(&kfuncs::resolved(OBJECT, btf.kfuncs()))?;
    let types = Btf::from_sys_fs()?;
    let mut results = BTreeMap::new();
    for (name, program) in ebpf.programs_mut() {
        let known = LIMITS.iter().find(|(known, _)| *known == name);
        let (name, _) = known.with_context(|| format!("{name} has no limit"))?;
        let loaded = match program {
            Program::SockOps(program) => load(program, SockOps::load, SockOps::info),
            Program::LsmCgroup(program) => load(
                program,
                |p| p.load("inet_csk_clone", &types),
                LsmCgroup::info,
            ),
            Program::Iter(program) => load(program, |p| p.load("tcp", &types), Iter::info),
            Program::BtfTracePoint(program) => load(
                program,
                |p| p.load("tcp_retransmit_synack", &types),
                BtfTracePoint::info,
            ),
            other => anyhow::bail!("{name}: {:?}", other.prog_type()),
        };
        results.insert(*name, loaded);
    }
    ensure!(results.len() == LIMITS.len(), "only {results:?}");
    if results
        .values()
        .any(|verified| *verified == Verified::Uncounted)
    {
        from_log(&mut results)?;
    }
    Ok(results)
}

fn load<P>(
    program: &mut P,
    load: impl FnOnce(&mut P) -> Result<(), aya::programs::ProgramError>,
    info: impl FnOnce(&P) -> Result<ProgramInfo, aya::programs::ProgramError>,
) -> Verified {
    if let Err(e) = load(program) {
        let text = e.to_string();
        // The first line says what failed, the last ones of the verifier's log why.
        let lines: Vec<_> = text.lines().collect();
        let tail = lines.len().saturating_sub(15).max(1);
        let shown = lines.iter().take(1).chain(lines.iter().skip(tail));
        return Verified::Refused(shown.copied().collect::<Vec<_>>().join("\n"));
    }
    info(program)
        .ok()
        .and_then(|info| info.verified_instruction_count())
        .map_or(Verified::Uncounted, Verified::Instructions)
}

/// Reads the numbers from the verifier's log, which bpftool prints; needed for older kernels. bpftool loads the
/// programs in the order of the object and stops at the first that this kernel refuses.
fn from_log(results: &mut BTreeMap<&'static str, Verified>) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let object = dir.path().join("object.o");
    std::fs::write(&object, kfuncs::resolved(OBJECT, None))?;
    let pins = format!("/sys/fs/bpf/rto-verifier-{}", std::process::id());
    let output = Command::new("bpftool")
        .args(["-d", "prog", "loadall"])
        .args([object.as_os_str(), pins.as_ref()])
        .output()?;
    // bpftool pins the programs only if all of them loaded.
    let _none = std::fs::remove_dir_all(&pins);
    let log =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    for (name, instructions) in processed(&log.join("\n")) {
        // The log has a number for a refused program, too: the instructions processed before the error.
        let missing = results.get_mut(name.as_str());
        if let Some(verified) = missing.filter(|verified| **verified == Verified::Uncounted) {
            *verified = Verified::Instructions(instructions);
        }
    }
    Ok(())
}

/// Program and number of instructions of each log in bpftool's output.
fn processed(log: &str) -> Vec<(String, u32)> {
    let mut all = Vec::new();
    let mut name = None;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("prog '") {
            name = rest.split('\'').next().map(str::to_owned);
        } else if let Some(rest) = line.strip_prefix("processed ") {
            let number = rest.split(' ').next().and_then(|n| n.parse().ok());
            all.extend(name.take().zip(number));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verifier_log_is_split_by_program() {
        let log = "libbpf: prog 'rto_agent': -- BEGIN PROG LOAD LOG --\n\
                   processed 10289 insns (limit 1000000) max_states_per_insn 6\n\
                   libbpf: prog 'rto_probe': -- BEGIN PROG LOAD LOG --\n\
                   processed 191 insns (limit 1000000)\n\
                   libbpf: prog 'rto_clone': BPF program load failed: Operation not permitted\n";
        assert_eq!(
            processed(log),
            [
                ("rto_agent".to_owned(), 10289),
                ("rto_probe".to_owned(), 191)
            ]
        );
    }
}
