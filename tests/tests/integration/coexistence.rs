//! Another sock_ops program on the same host keeps working.

use std::time::Duration;

use rto_tests::{
    agent::World,
    foreign::Foreign,
    netns::{SERVER_V4, SERVER_V4_OTHER},
    timing::jiffy,
    traffic::Connect,
};

use super::{KERNEL, NEAR, Test, near, to};

pub(super) const TESTS: &[Test] = &[
    ("a_foreign_program_decides_where_no_entry_does", before_ours),
    (
        "a_foreign_program_attached_later_has_the_last_word",
        after_ours,
    ),
    ("other_cgroups_are_left_alone", other_cgroup),
];

const PORT: u16 = 4500;
const FOREIGN_JIFFIES: i32 = 60;

fn foreign_timer() -> Duration {
    jiffy() * FOREIGN_JIFFIES.unsigned_abs()
}

fn expect(world: &World, address: &str, timer: Duration) -> anyhow::Result<()> {
    world.assert_syn_gap(to(address, PORT), &Connect::default(), timer)
}

fn before_ours() -> anyhow::Result<()> {
    let mut world = World::new()?;
    world.net.black_hole(PORT)?;
    let foreign = Foreign::attach(world.cgroup.path(), FOREIGN_JIFFIES)?;
    // The control: it works.
    expect(&world, SERVER_V4, foreign_timer())?;
    world.configure(&near("\"10.88.0.0/24\""))?;
    world.start()?;
    // Ours runs after it and has the last word, but only where an entry says so.
    expect(&world, SERVER_V4, NEAR)?;
    expect(&world, SERVER_V4_OTHER, foreign_timer())?;
    world.cli(&["detach"])?;
    expect(&world, SERVER_V4, foreign_timer())?;
    drop(foreign);
    expect(&world, SERVER_V4, KERNEL)?;
    Ok(())
}

/// The kernel runs programs in the order they were attached: nothing an agent could change.
fn after_ours() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    world.net.black_hole(PORT)?;
    expect(&world, SERVER_V4, NEAR)?;
    let _foreign = Foreign::attach(world.cgroup.path(), FOREIGN_JIFFIES)?;
    expect(&world, SERVER_V4, foreign_timer())?;
    // But doctor tells.
    let report = world.json(&["doctor"])?;
    let told = report["findings"].as_array().is_some_and(|all| {
        all.iter().any(|f| {
            let found = f["found"].as_str().unwrap_or_default();
            f["id"] == "other-programs"
                && found.contains("rtot_foreign")
                && found.contains(&world.cgroup.path().display().to_string())
        })
    });
    assert!(told, "{report:#}");
    Ok(())
}

fn other_cgroup() -> anyhow::Result<()> {
    let world = World::with(&near("\"10.88.0.0/24\""))?;
    world.net.black_hole(PORT)?;
    expect(&world, SERVER_V4, NEAR)?;
    let other = World::new()?;
    other.net.black_hole(PORT)?;
    expect(&other, SERVER_V4, KERNEL)?;
    Ok(())
}
