//! A foreign sock_ops program, which answers every TIMEOUT_INIT with its own value.
//!
//! It is assembled by hand and loaded with bpf(2), so that neither a compiler nor code of the agent is involved.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    time::Duration,
};

use anyhow::Context as _;

use crate::{
    bpf::{Instruction, ProgramAttr, call, instruction, load, made, pin, pinned},
    names,
};

const BPF_LINK_CREATE: i32 = 28;
const BPF_PROG_TYPE_SOCK_OPS: u32 = 13;
const BPF_CGROUP_SOCK_OPS: u32 = 3;

#[repr(C)]
#[derive(Default)]
struct LinkAttr {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

/// The program, attached to a cgroup by a link; detached when dropped.
#[derive(Debug)]
pub struct Foreign {
    program: OwnedFd,
    link: OwnedFd,
}

impl Foreign {
    /// Attaches a program that sets `reply` to this number of jiffies at every TIMEOUT_INIT.
    pub fn attach(cgroup: &Path, jiffies: i32) -> io::Result<Self> {
        Self::attach_at_timeout_init(cgroup, &reply(jiffies))
    }

    /// Attaches a program that sets the callback flags (`BPF_SOCK_OPS_*_CB_FLAG`) of a socket at every TIMEOUT_INIT,
    /// which clears the flags that other programs have set.
    pub fn attach_setting_callbacks(cgroup: &Path, flags: i32) -> io::Result<Self> {
        Self::attach_at_timeout_init(cgroup, &set_callbacks(flags))
    }

    /// Attaches a program that does both of the above, for a connection of its own.
    pub fn attach_with_own_connections(
        cgroup: &Path,
        jiffies: i32,
        flags: i32,
    ) -> io::Result<Self> {
        let both = [reply(jiffies), set_callbacks(flags)].concat();
        Self::attach_at_timeout_init(cgroup, &both)
    }

    /// Attaches a program that sets the callback flags of a socket whose connection is established, without reading
    /// them, as bpftune's tuner of connections does.
    pub fn attach_overwriting_established(cgroup: &Path, flags: i32) -> io::Result<Self> {
        const ACTIVE_ESTABLISHED_CB: i32 = 4;
        const PASSIVE_ESTABLISHED_CB: i32 = 5;
        let set = [set_callbacks(flags), returns(1)].concat();
        let either = [
            at(ACTIVE_ESTABLISHED_CB, &set),
            at(PASSIVE_ESTABLISHED_CB, &set),
            returns(1).into(),
        ];
        Self::load_and_attach(cgroup, &either.concat())
    }

    fn attach_at_timeout_init(cgroup: &Path, then: &[Instruction]) -> io::Result<Self> {
        const TIMEOUT_INIT: i32 = 1;
        Self::load_and_attach(
            cgroup,
            &[at(TIMEOUT_INIT, then), returns(1).into()].concat(),
        )
    }

    /// Attaches a program that sets `reply` at every operation, as one of the kernel's samples does with -1. Later
    /// programs read it instead of the operation's first argument, because both are in the same union.
    pub fn attach_replying_always(cgroup: &Path, value: i32) -> io::Result<Self> {
        Self::load_and_attach(cgroup, &[reply(value), returns(1)].concat())
    }

    /// Attaches a program that returns 0, as several public ones do. The kernel then ignores the initial RTO of every
    /// program at the cgroup.
    pub fn attach_rejecting(cgroup: &Path) -> io::Result<Self> {
        Self::load_and_attach(cgroup, &returns(0))
    }

    /// Attaches a program that does nothing.
    pub fn attach_empty(cgroup: &Path) -> io::Result<Self> {
        Self::load_and_attach(cgroup, &returns(1))
    }

    /// Attaches the program of an ELF object, which bpftool loads.
    pub fn attach_object(cgroup: &Path, object: &Path) -> anyhow::Result<Self> {
        let path = Path::new("/sys/fs/bpf").join(names::unique());
        let (object, at) = (object.display(), path.display());
        crate::process::run(&format!("bpftool prog load {object} {at} type sockops"))?;
        let program = pinned(&path);
        fs::remove_file(&path)?;
        Ok(Self::attach_program(cgroup, program?)?)
    }

    /// Pins the link.
    pub fn pin_link(&self, path: &Path) -> io::Result<()> {
        pin(&self.link, path)
    }

    /// The kernel's id of the program.
    pub fn program_id(&self) -> anyhow::Result<u64> {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", self.program.as_raw_fd()))?;
        let id = info
            .lines()
            .find_map(|line| line.strip_prefix("prog_id:"))
            .context("no prog_id")?;
        Ok(id.trim().parse()?)
    }

    pub(crate) fn load_and_attach(cgroup: &Path, instructions: &[Instruction]) -> io::Result<Self> {
        let kind = ProgramAttr {
            prog_type: BPF_PROG_TYPE_SOCK_OPS,
            prog_name: *b"rtot_foreign\0\0\0\0",
            expected_attach_type: BPF_CGROUP_SOCK_OPS,
            ..ProgramAttr::default()
        };
        Self::attach_program(cgroup, load(instructions, kind)?)
    }

    fn attach_program(cgroup: &Path, program: OwnedFd) -> io::Result<Self> {
        let cgroup = File::open(cgroup)?;
        let mut attr = LinkAttr {
            prog_fd: program.as_raw_fd().unsigned_abs(),
            target_fd: cgroup.as_raw_fd().unsigned_abs(),
            attach_type: BPF_CGROUP_SOCK_OPS,
            flags: 0,
        };
        let link = made(call(BPF_LINK_CREATE, &mut attr)?);
        Ok(Self { program, link })
    }
}

/// if ctx->op == op { then }
fn at(op: i32, then: &[Instruction]) -> Vec<Instruction> {
    let skipped = i16::try_from(then.len()).unwrap_or(i16::MAX);
    let begin = [
        // r2 = ctx->op
        instruction(0x61, 2, 1, 0, 0),
        // if r2 != op goto +skipped
        instruction(0x55, 2, 0, skipped, op),
    ];
    [&begin, then].concat()
}

/// bpf_sock_ops_cb_flags_set(ctx, flags)
const fn set_callbacks(flags: i32) -> [Instruction; 2] {
    const SOCK_OPS_CB_FLAGS_SET: i32 = 59;
    [
        instruction(0xb7, 2, 0, 0, flags),
        instruction(0x85, 0, 0, 0, SOCK_OPS_CB_FLAGS_SET),
    ]
}

/// r3 = value; ctx->reply = r3
const fn reply(value: i32) -> [Instruction; 2] {
    [
        instruction(0xb7, 3, 0, 0, value),
        instruction(0x63, 1, 3, 4, 0),
    ]
}

/// return value
pub(crate) const fn returns(value: i32) -> [Instruction; 2] {
    [
        instruction(0xb7, 0, 0, 0, value),
        instruction(0x95, 0, 0, 0, 0),
    ]
}

/// The number of runs of a program since statistics were switched on, and their total duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Number of runs.
    pub count: u64,
    /// Total duration.
    pub time: Duration,
}

/// Makes the kernel count the runs of all programs and their duration, as long as the descriptor is open.
pub fn count_runs() -> io::Result<OwnedFd> {
    const BPF_ENABLE_STATS: i32 = 32;
    const BPF_STATS_RUN_TIME: u32 = 0;
    let mut attr = BPF_STATS_RUN_TIME;
    Ok(made(call(BPF_ENABLE_STATS, &mut attr)?))
}

/// The runs of a program so far.
pub fn runs_of(program_id: u64) -> anyhow::Result<Runs> {
    let text = crate::process::run(&format!("bpftool --json prog show id {program_id}"))?;
    let shown: serde_json::Value = serde_json::from_str(&text)?;
    // bpftool omits them while they are 0.
    let number = |key: &str| shown[key].as_u64().unwrap_or(0);
    Ok(Runs {
        count: number("run_cnt"),
        time: Duration::from_nanos(number("run_time_ns")),
    })
}
