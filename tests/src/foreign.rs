//! A sock_ops program of somebody else's: it answers every TIMEOUT_INIT with a value of its own.
//!
//! Assembled by hand and loaded by bpf(2), so that no compiler and no library of the agent is
//! involved.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    time::Duration,
};

use nix::libc;

use crate::kernel::call_for_fd;

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_PROG_TYPE_SOCK_OPS: u32 = 13;
const BPF_CGROUP_SOCK_OPS: u32 = 3;

/// One instruction (Documentation/bpf/standardization/instruction-set.rst).
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction {
        code,
        registers: src << 4 | dst,
        offset,
        immediate,
    }
}

#[repr(C)]
#[derive(Default)]
struct LoadAttr {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkAttr {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

/// The program at a cgroup, by a link; detached when dropped.
#[derive(Debug)]
pub struct Foreign {
    _program: OwnedFd,
    _link: OwnedFd,
}

impl Foreign {
    /// Attaches a program that sets `reply` to so many jiffies at every TIMEOUT_INIT.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub fn attach(cgroup: &Path, jiffies: i32) -> io::Result<Self> {
        Self::load_and_attach(
            cgroup,
            &[
                // r2 = ctx->op
                instruction(0x61, 2, 1, 0, 0),
                // if r2 != BPF_SOCK_OPS_TIMEOUT_INIT goto +2
                instruction(0x55, 2, 0, 2, 1),
                // r3 = jiffies; ctx->reply = r3
                instruction(0xb7, 3, 0, 0, jiffies),
                instruction(0x63, 1, 3, 4, 0),
                // return 1
                instruction(0xb7, 0, 0, 0, 1),
                instruction(0x95, 0, 0, 0, 0),
            ],
        )
    }

    /// Attaches a program that returns 0, as several public ones do: it turns the initial RTO of
    /// every program off.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub fn attach_rejecting(cgroup: &Path) -> io::Result<Self> {
        Self::load_and_attach(
            cgroup,
            &[instruction(0xb7, 0, 0, 0, 0), instruction(0x95, 0, 0, 0, 0)],
        )
    }

    fn load_and_attach(cgroup: &Path, instructions: &[Instruction]) -> io::Result<Self> {
        let program = load(instructions)?;
        let cgroup = File::open(cgroup)?;
        let mut attr = LinkAttr {
            prog_fd: program.as_raw_fd().unsigned_abs(),
            target_fd: cgroup.as_raw_fd().unsigned_abs(),
            attach_type: BPF_CGROUP_SOCK_OPS,
            flags: 0,
        };
        let link = call_for_fd(BPF_LINK_CREATE, &mut attr)?;
        Ok(Self {
            _program: program,
            _link: link,
        })
    }
}

/// How often a program has run since runs are counted, and how long that took in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// How often.
    pub count: u64,
    /// How long.
    pub time: Duration,
}

/// Has the kernel count how often and how long each program runs, as long as the descriptor is open.
///
/// # Errors
///
/// If the kernel refuses (before Linux 5.8).
pub fn count_runs() -> io::Result<OwnedFd> {
    const BPF_ENABLE_STATS: libc::c_int = 32;
    const BPF_STATS_RUN_TIME: u32 = 0;
    let mut attr = BPF_STATS_RUN_TIME;
    call_for_fd(BPF_ENABLE_STATS, &mut attr)
}

/// The runs of a program so far.
///
/// # Errors
///
/// If bpftool does not say.
pub fn runs_of(program_id: u64) -> anyhow::Result<Runs> {
    let text = crate::process::run(&format!("bpftool --json prog show id {program_id}"))?;
    let shown: serde_json::Value = serde_json::from_str(&text)?;
    // Left out as long as they are 0.
    let number = |key: &str| shown[key].as_u64().unwrap_or(0);
    Ok(Runs {
        count: number("run_cnt"),
        time: Duration::from_nanos(number("run_time_ns")),
    })
}

fn load(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let mut attr = LoadAttr {
        prog_type: BPF_PROG_TYPE_SOCK_OPS,
        insn_cnt: u32::try_from(instructions.len()).unwrap_or(0),
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        prog_name: *b"rtot_foreign\0\0\0\0",
        expected_attach_type: BPF_CGROUP_SOCK_OPS,
        ..LoadAttr::default()
    };
    call_for_fd(BPF_PROG_LOAD, &mut attr)
}
