//! Invariants that are checked after each round.

use rto_testbed::kernel::programs_using;

use super::{
    super::desired::{Desired, Sources, difference, held, names_in},
    Run,
};
use crate::prelude::*;

impl Run {
    /// Asserts that the kernel holds one of these states, and nothing else; returns its index.
    pub(super) fn check(&self, candidates: &[Desired]) -> anyhow::Result<usize> {
        let pins = self.pins()?;
        let (held, names) = held(&self.env)?;
        let sources = Sources::of(&self.env.json(&["list"])?)?;
        let which = candidates
            .iter()
            .position(|c| c.entries() == held && c.sources() == sources);
        let Some(which) = which else {
            let differs: Vec<String> = candidates
                .iter()
                .map(|candidate| difference(&candidate.entries(), &held))
                .collect();
            let wanted: Vec<Sources> = candidates.iter().map(Desired::sources).collect();
            bail!(
                "the maps hold something else: {differs:#?}\n\
                 sources listed {sources:?}, wanted one of {wanted:#?}"
            );
        };
        // The daemon knows every policy in the kernel.
        let status = self.env.socket_request("GET", "/v1/status", "")?;
        let known: BTreeSet<String> = serde_json::from_value(status["policies"].clone())?;
        ensure!(names == known, "policies held {names:?}, known {known:?}");
        ensure!(status["in_sync"] == true, "{status:#}");
        self.check_kernel(&pins)?;
        self.check_files()?;
        Ok(which)
    }

    /// The directory of the pins; asserts that nothing is missing and nothing else is there.
    fn pins(&self) -> anyhow::Result<PathBuf> {
        let dir = self.env.pins()?;
        let mut found = names_in(&dir)?;
        // Only with BPF LSM.
        if found.remove("clone_link") {
            ensure!(found.remove("clone_program"), "pins: {found:?}");
        }
        let expected: BTreeSet<String> = maps::ALL
            .into_iter()
            .chain(["link", "program"])
            .map(str::to_owned)
            .collect();
        ensure!(found == expected, "pins: {found:?}");
        Ok(dir)
    }

    fn check_kernel(&self, pins: &Path) -> anyhow::Result<()> {
        let cgroup = self.env.cgroup.path();
        let own: Vec<u32> = maps::ALL
            .iter()
            .map(|name| Ok(Map::open(&pins.join(name))?.id))
            .collect::<anyhow::Result<_>>()?;
        // All other maps are shared with the programs before and after.
        let tries = [maps::ENTRIES_V4, maps::ENTRIES_V6];
        let tries = tries.map(|name| Map::open(&pins.join(name)).map(|map| map.id));
        let uses_tries = |program: u32| -> anyhow::Result<bool> {
            for trie in &tries {
                let trie = trie.as_ref().map_err(|e| anyhow::anyhow!("{e}"))?;
                if !programs_using(&[*trie])?.contains(&program) {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        // Objects are freed after a grace period, and the daemon itself tests programs.
        let look = || {
            let attached = programs_at(cgroup, SOCK_OPS)?;
            let uses_tries = match attached[..] {
                [program] => uses_tries(program)?,
                _ => false,
            };
            Ok((
                attached,
                links_at(cgroup)?,
                programs_using(&own)?,
                uses_tries,
            ))
        };
        let what = "one program attached, linked and with our maps";
        eventually_seen(
            what,
            TIMEOUT,
            look,
            |(attached, linked, using, uses_tries)| {
                let hook = usize::from(pins.join("clone_link").exists());
                attached.len() == 1
                    && linked.len() == 1 + hook
                    && linked.contains(&attached[0])
                    && using.len() == 1 + hook
                    && using.contains(&attached[0])
                    && *uses_tries
            },
        )
        .map(drop)
    }

    /// Asserts that no temporary files are left.
    fn check_files(&self) -> anyhow::Result<()> {
        let dir = self.env.dir();
        for (sub, allowed) in [
            (
                "",
                &["control.sock", "etc", "lasting", "log", "notify", "state"][..],
            ),
            ("etc", &["config.toml", "policies.d"]),
            ("etc/policies.d", &["50-cli.toml"]),
            ("state", &["lock", "manual.json"]),
            ("lasting", &["last-good.json"]),
        ] {
            let found = names_in(&dir.join(sub))?;
            let stray: Vec<_> = found
                .iter()
                .filter(|name| !allowed.contains(&name.as_str()))
                .collect();
            ensure!(stray.is_empty(), "left in {sub:?}: {stray:?}");
        }
        Ok(())
    }
}
