//! What the program holds of a policy's brakes and of the lease, read through the pins as the kernel has it.

use std::{mem::offset_of, os::fd::OwnedFd, path::Path};

use anyhow::{Context as _, ensure};
use nix::time::{ClockId, clock_gettime};
use rto_agent_common::{
    POLICY_SLOTS, PolicySlot,
    brake::{Brake, key},
    maps::{BRAKES, LEASE, POLICIES},
    policy::Policy,
};
use rto_testbed::{
    bpf::{lookup, pinned, update},
    env::TestEnv,
};

