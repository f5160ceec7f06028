//! Measures how long each operation of a sock_ops program takes, with two programs at the same cgroup: one runs before
//! it and one after it, and the second adds up the time between them by operation. The kernel runs the programs of a
//! cgroup in the order in which they were attached.
//!
//! The result includes the time from one program to the next: subtract the result for an empty program.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    time::Duration,
};

use anyhow::Context as _;

use crate::{
    bpf::{Instruction, create_map, instruction, lookup},
    foreign::{Foreign, Runs, returns},
};

const BPF_MAP_TYPE_PERCPU_ARRAY: u32 = 6;

/// Number of operations: full sockets use the slots below [`REQUESTS`], connection requests the others.
pub const SLOTS: usize = 64;
/// The first slot for connection requests, which are not full sockets.
pub const REQUESTS: usize = 32;

/// `op` and `is_fullsock` of `struct bpf_sock_ops` (include/uapi/linux/bpf.h).
const OP: i16 = 0;
const IS_FULLSOCK: i16 = 72;

/// Words of a slot: the start of the current callback, the total in nanoseconds, and the number of callbacks.
const WORDS: usize = 3;

/// The first of the two programs.
#[derive(Debug)]
pub struct Before {
    times: OwnedFd,
    program: Foreign,
}

impl Before {
    /// Attaches the first program. Must happen before the measured program is attached.
    pub fn at(cgroup: &Path) -> io::Result<Self> {
        let times = make_map()?;
        let program = Foreign::load_and_attach(cgroup, &at_begin(times.as_raw_fd()))?;
        Ok(Self { times, program })
    }

    /// Attaches the second program, after the measured one.
    pub fn behind(self, cgroup: &Path) -> io::Result<Stopwatch> {
        let behind = Foreign::load_and_attach(cgroup, &at_end(self.times.as_raw_fd()))?;
        Ok(Stopwatch {
            times: self.times,
            _programs: [self.program, behind],
        })
    }
}

/// Both programs; detached when dropped.
#[derive(Debug)]
pub struct Stopwatch {
    times: OwnedFd,
    _programs: [Foreign; 2],
}

impl Stopwatch {
    /// The total of each operation so far, by slot.
    pub fn so_far(&self) -> anyhow::Result<Vec<Runs>> {
        let possible = possible_cpus()?;
        (0..SLOTS)
            .map(|slot| {
                let mut words = vec![0; WORDS * possible];
                let key = u32::try_from(slot)?.to_ne_bytes();
                lookup(&self.times, &key, &mut words)?;
                let cpus = || words.as_chunks::<WORDS>().0.iter();
                Ok(Runs {
                    count: cpus().map(|cpu| cpu[2]).sum(),
                    time: Duration::from_nanos(cpus().map(|cpu| cpu[1]).sum()),
                })
            })
            .collect()
    }
}

fn make_map() -> io::Result<OwnedFd> {
    let value = u32::try_from(WORDS * size_of::<u64>()).unwrap_or(0);
    let slots = u32::try_from(SLOTS).unwrap_or(0);
    create_map([BPF_MAP_TYPE_PERCPU_ARRAY, 4, value, slots, 0])
}

/// The number of CPUs that the kernel keeps a value for: "0-3" is four.
fn possible_cpus() -> anyhow::Result<usize> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = text.trim().rsplit(['-', ',']).next().context("no CPU")?;
    Ok(last.parse::<usize>()? + 1)
}

/// r0: the clock; r6: the slot. The first program reads the clock last, the second reads it first.
fn at_begin(map: i32) -> Vec<Instruction> {
    let end = [
        instruction(0xbf, 6, 0, 0, 0),
        // *r6 = bpf_ktime_get_ns()
        instruction(0x85, 0, 0, 0, 5),
        instruction(0x7b, 6, 0, 0, 0),
    ];
    [&find_slot(map, 3)[..], &end, &returns(1)].concat()
}

fn at_end(map: i32) -> Vec<Instruction> {
    let begin = [
        // r7 = bpf_ktime_get_ns(); r1 is kept over the call
        instruction(0xbf, 6, 1, 0, 0),
        instruction(0x85, 0, 0, 0, 5),
        instruction(0xbf, 7, 0, 0, 0),
        instruction(0xbf, 1, 6, 0, 0),
    ];
    let end = [
        // r7 -= r0[0]; r0[1] += r7; r0[2] += 1
        instruction(0x79, 1, 0, 0, 0),
        instruction(0x1f, 7, 1, 0, 0),
        instruction(0x79, 1, 0, 8, 0),
        instruction(0x0f, 1, 7, 0, 0),
        instruction(0x7b, 0, 1, 8, 0),
        instruction(0x79, 1, 0, 16, 0),
        instruction(0x07, 1, 0, 0, 1),
        instruction(0x7b, 0, 1, 16, 0),
    ];
    [&begin[..], &find_slot(map, 8), &end, &returns(1)].concat()
}

/// r0 = the slot of the context that r1 points to. If there is no slot, `skip` instructions are skipped.
fn find_slot(map: i32, skip: i16) -> [Instruction; 12] {
    [
        // r3 = op, r4 = is_fullsock
        instruction(0x61, 3, 1, OP, 0),
        instruction(0x61, 4, 1, IS_FULLSOCK, 0),
        // r3 |= (r4 ^ 1) << 5
        instruction(0xa7, 4, 0, 0, 1),
        instruction(0x67, 4, 0, 0, 5),
        instruction(0x4f, 3, 4, 0, 0),
        // r0 = bpf_map_lookup_elem(map, &r3)
        instruction(0x63, 10, 3, -4, 0),
        instruction(0xbf, 2, 10, 0, 0),
        instruction(0x07, 2, 0, 0, -4),
        instruction(0x18, 1, 1, 0, map),
        instruction(0, 0, 0, 0, 0),
        instruction(0x85, 0, 0, 0, 1),
        instruction(0x15, 0, 0, skip, 0),
    ]
}
