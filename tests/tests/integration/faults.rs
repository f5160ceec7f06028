//! What goes wrong around the daemon: each fault has an outcome, as docs/internals/faults.md tells.

use std::fs;

use anyhow::Context as _;
use rto_tests::{agent::World, emulated::is_machine};

use super::Test;

mod clients;
mod clocks;
mod desired;
mod files;
mod kill;
mod lock;
mod writes;

/// Sets CLOCK_REALTIME, of which there is one for all.
const WALL_CLOCK: &str = "the_wall_clock_is_set";

pub(super) const TESTS: &[Test] = &[
    ("killed_at_random_moments", kill::rounds),
    (
        "killed_while_all_processors_are_busy",
        kill::rounds_on_busy_processors,
    ),
    ("a_child_has_the_lock_of_a_killed_daemon", lock::state),
    ("a_child_has_the_lock_on_the_pins", lock::pins),
    ("settings_last_seen_outlive_a_kill", kill::last_settings),
    ("silent_clients_hold_up_nobody", clients::silent),
    ("a_thousand_clients_at_once", clients::thousand),
    ("a_request_of_100_mb", clients::greedy),
    ("the_headers_of_the_events", clients::headers_of_events),
    ("the_sockets_directory_is_removed", clients::removed_socket),
    (
        "the_socket_of_a_group_is_removed",
        clients::removed_socket_of_a_group,
    ),
    ("no_bpf_file_system", files::no_bpffs),
    ("a_read_only_bpf_file_system", files::read_only_bpffs),
    (
        "the_bpf_file_system_is_unmounted_meanwhile",
        files::bpffs_unmounted,
    ),
    ("the_cgroup_is_removed", files::no_cgroup),
    ("a_full_disk", files::disk_full),
    (
        "the_end_of_an_entry_on_a_full_disk",
        files::expiry_with_a_full_disk,
    ),
    ("the_kernel_refuses_a_write", writes::undone),
    ("the_kernel_cannot_go_back", writes::not_undone),
    ("files_that_cannot_be_written", files::read_only_files),
    ("another_state_dir", files::another_state_dir),
    ("pins_of_others_and_of_other_layouts", files::foreign_pins),
    ("two_daemons_and_one_set_of_pins", files::shared_pins),
    ("a_file_replaced_a_thousand_times", files::replaced_often),
    ("the_end_of_an_entry_by_boottime", clocks::boottime),
    (WALL_CLOCK, clocks::wall_clock),
];

/// Why a test does not run on a machine that is somebody's.
pub(super) fn only_elsewhere(test: &str) -> Option<&'static str> {
    let is_one = test.strip_prefix("faults::") == Some(WALL_CLOCK);
    (is_one && !is_machine()).then_some("only in cargo xtask vm")
}

/// Whether there is time for more rounds: `cargo xtask test --long`.
pub(super) fn is_long() -> bool {
    std::env::var_os("RTO_TESTS_LONG").is_some()
}

/// How many descriptors the daemon has open.
fn descriptors(world: &World) -> anyhow::Result<usize> {
    Ok(fs::read_dir(format!("/proc/{}/fd", world.pid()?))?.count())
}

/// The daemon's resident memory.
fn memory_kb(world: &World) -> anyhow::Result<u64> {
    of_status(world, "VmRSS:")
}

/// The most it ever was.
pub(super) fn peak_memory_kb(world: &World) -> anyhow::Result<u64> {
    of_status(world, "VmHWM:")
}

fn of_status(world: &World, key: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{}/status", world.pid()?))?;
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.with_context(|| key.to_owned())?.parse()?)
}
