//! What most tests use.

pub(crate) use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read as _, Write as _},
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

pub(crate) use anyhow::{Context as _, bail, ensure};
pub(crate) use nix::sys::signal::Signal;
pub(crate) use rto_agent_common::maps;
pub(crate) use rto_testbed::{
    agent::find,
    capture::{Capture, Segment, gaps, syns},
    emulated::scaled,
    env::TestEnv,
    foreign::Foreign,
    http,
    json::assert_has,
    kernel::{Map, SOCK_OPS, links_at, programs_at},
    link::rule::{DropPattern, PacketFilter, Rule},
    netns::{CLIENT_LINK, SERVER_LINK, SERVER_V4, SERVER_V4_OTHER, SERVER_V6, netstat, sysctl},
    process::{KillOnDrop, beside, refusal, run, stdout_of},
    tcp::option,
    timing::{assert_gaps, jiffy, latest},
    wait::{TIMEOUT, eventually, eventually_seen},
    workload::{
        conversation::{self, Conversation},
        traffic::{Connect, Traffic},
    },
};
pub(crate) use rto_tests::{
    assert_says,
    features::lacks,
    lab::{cell, measured, quick},
    relay::{RELAY_SERVER_V4, RELAY_SERVER_V6, relay},
};
pub(crate) use serde_json::{Value, json};

pub(crate) use crate::{
    KERNEL_RTO, KERNEL_RTO_MIN, NOBODY, POLICY_RTO, PORT, configured, expect, near, needs::*,
    silent, to,
};
