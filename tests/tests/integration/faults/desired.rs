//! The desired state, tracked by the test itself: files, saved entries, runtime entries.

use std::{fmt::Write as _, net::IpAddr};

use rand::{
    RngExt as _,
    rngs::ChaCha8Rng,
    seq::{IteratorRandom as _, SliceRandom as _},
};
use rto_agent_common::{EntryValue, FIRST_SLOT, Policy};
use rto_tests::pinned::{self, map, read};

use crate::prelude::*;

/// Entries of every configuration; these are probed.
pub(super) const ALWAYS: [&str; 2] = ["10.88.0.0/24", "fd88::/64"];
/// The initial RTOs that they may have.
pub(super) const ALWAYS_MS: [u32; 2] = [100, 120];

/// Names of policies; the first two have the initial RTOs of [`ALWAYS_MS`].
const NAMES: [&str; 3] = ["p0", "p1", "p2"];
/// Most entries of the files.
const OF_FILES: u32 = 60;
/// Most entries of one request.
const AT_ONCE: usize = 40;

/// From CIDR to initial RTO in milliseconds.
pub(super) type Entries = BTreeMap<String, u32>;

/// The settings of a runtime entry.
#[derive(Clone, Debug)]
enum Wanted {
    Policy(&'static str),
    Milliseconds(u32),
}

/// One configuration file.
#[derive(Clone, Debug, Default)]
pub(super) struct File {
    policies: BTreeMap<&'static str, u32>,
    entries: BTreeMap<String, &'static str>,
    /// Lines of `[agent]`.
    agent: String,
}

impl File {
    pub(super) fn random(rng: &mut ChaCha8Rng, on_exit: &str) -> Self {
        let mut policies = BTreeMap::from([("p0", ALWAYS_MS[0]), ("p1", ALWAYS_MS[1])]);
        if rng.random_bool(0.6) {
            policies.insert(NAMES[2], [140, 160, 180][rng.random_range(0..3)]);
        }
        let mut entries = BTreeMap::new();
        for cidr in ALWAYS {
            entries.insert(cidr.to_owned(), NAMES[rng.random_range(0..2)]);
        }
        for i in 0..OF_FILES {
            if rng.random_bool(0.5)
                && let Some(name) = policies.keys().choose(rng)
            {
                let cidr = if i % 3 == 0 {
                    format!("fd10:{:x}::/48", i + 1)
                } else {
                    format!("10.10.{i}.0/24")
                };
                entries.insert(cidr, *name);
            }
        }
        // Each combination needs another program or other maps; the smallest maps have to grow.
        let statistics = rng.random_bool(0.8);
        let max_entries = if rng.random_bool(0.6) { 5000 } else { 16 };
        Self {
            policies,
            entries,
            agent: format!(
                "on_exit = \"{on_exit}\"\nstatistics = {statistics}\nmax_entries = {max_entries}\n"
            ),
        }
    }

    pub(super) fn text(&self) -> String {
        let mut text = self.agent.clone();
        for (name, ms) in &self.policies {
            let of_policy = self.entries.iter().filter(|(_, n)| *n == name);
            let cidrs: Vec<_> = of_policy.map(|(cidr, _)| format!("\"{cidr}\"")).collect();
            let _infallible = write!(
                text,
                "[policy.{name}]\ninitial_rto = \"{ms}ms\"\ncidrs = [{}]\n",
                cidrs.join(", ")
            );
        }
        text
    }
}

/// The sources of entries. Entries alone do not show them: a runtime entry may equal one of the files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sources {
    /// Runtime entries, with the name of their policy if it is one of the files.
    runtime: BTreeMap<String, Option<&'static str>>,
    /// Entries of the files that are switched off.
    masked: BTreeSet<String>,
}

/// A request to the daemon.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) path: &'static str,
    pub(super) body: String,
}

/// Everything that determines the active entries.
#[derive(Clone, Debug, Default)]
pub(super) struct Desired {
    pub(super) file: File,
    saved: BTreeMap<String, u32>,
    runtime: BTreeMap<String, Wanted>,
    masked: BTreeSet<String>,
    /// Last seen settings of the policies that runtime entries name.
    seen: BTreeMap<&'static str, u32>,
}

impl Desired {
    /// The state after another file is loaded.
    pub(super) fn with(&self, file: &File) -> Self {
        let mut next = self.clone();
        next.file = file.clone();
        for (name, ms) in &mut next.seen {
            if let Some(now) = file.policies.get(name) {
                *ms = *now;
            }
        }
        next
    }

    pub(super) fn entries(&self) -> Entries {
        let file = &self.file;
        let of_files = file.entries.iter().filter_map(|(cidr, name)| {
            let ms = file.policies.get(name)?;
            Some((cidr.clone(), *ms))
        });
        let mut all: Entries = of_files.chain(self.saved.clone()).collect();
        all.retain(|cidr, _| !self.masked.contains(cidr));
        for (cidr, wanted) in &self.runtime {
            let ms = match wanted {
                Wanted::Milliseconds(ms) => *ms,
                Wanted::Policy(name) => self.seen[name],
            };
            all.insert(cidr.clone(), ms);
        }
        all
    }

    /// The sources that `list` should report.
    pub(super) fn sources(&self) -> Sources {
        let runtime = self.runtime.iter().map(|(cidr, wanted)| {
            let policy = match wanted {
                Wanted::Policy(name) => Some(*name),
                Wanted::Milliseconds(_) => None,
            };
            (cidr.clone(), policy)
        });
        let masked = self.masked.iter();
        Sources {
            runtime: runtime.collect(),
            masked: masked
                .filter(|cidr| self.is_in_files(cidr))
                .cloned()
                .collect(),
        }
    }

    /// A random `add`, and the state after it.
    pub(super) fn add(&self, rng: &mut ChaCha8Rng) -> (Request, Self) {
        let mut next = self.clone();
        let cidrs: BTreeSet<String> = (0..rng.random_range(1..AT_ONCE))
            .map(|_| {
                // Some override entries of the files, and some saved entries.
                let i = rng.random_range(1..OF_FILES * 2);
                format!("10.{}.{i}.0/24", [30, 10, 10, 20][i as usize % 4])
            })
            .collect();
        // The last policy comes and goes with the files.
        let named = self.file.policies.iter().next_back();
        let (wanted, mut body) = match named.filter(|_| rng.random_bool(0.6)) {
            Some((name, ms)) => {
                next.seen.insert(name, *ms);
                (Wanted::Policy(name), json!({ "policy": name }))
            }
            None => {
                let ms = 200 + 20 * rng.random_range(0..4);
                (Wanted::Milliseconds(ms), inline(ms))
            }
        };
        for cidr in &cidrs {
            next.runtime.insert(cidr.clone(), wanted.clone());
            next.masked.remove(cidr);
        }
        next.forget();
        body["cidrs"] = json!(cidrs);
        (Request::of("/v1/entries", body), next)
    }

    /// A random `add --save`, and the state after it.
    pub(super) fn save(&self, rng: &mut ChaCha8Rng) -> (Request, Self) {
        let mut next = self.clone();
        let ms = 300 + 20 * rng.random_range(0..4);
        let cidrs: BTreeSet<String> = (0..rng.random_range(1..8))
            .map(|_| format!("10.20.{}.0/24", rng.random_range(0..30)))
            .collect();
        for cidr in &cidrs {
            next.saved.insert(cidr.clone(), ms);
            next.runtime.remove(cidr);
            next.masked.remove(cidr);
        }
        next.forget();
        let mut body = inline(ms);
        body["cidrs"] = json!(cidrs);
        body["save"] = json!(true);
        (Request::of("/v1/entries", body), next)
    }

    /// A random `remove --save`, and the state after it; `None` if there is nothing to remove.
    pub(super) fn unsave(&self, rng: &mut ChaCha8Rng) -> Option<(Request, Self)> {
        let mut next = self.clone();
        let mut cidrs: Vec<String> = self.saved.keys().cloned().collect();
        cidrs.shuffle(rng);
        cidrs.truncate(rng.random_range(1..8).min(cidrs.len().saturating_sub(1)));
        if cidrs.is_empty() {
            return None;
        }
        for cidr in &cidrs {
            next.saved.remove(cidr);
            next.runtime.remove(cidr);
            next.masked.remove(cidr);
        }
        next.forget();
        let body = json!({ "cidrs": cidrs, "save": true });
        Some((Request::of("/v1/entries/remove", body), next))
    }

    /// The state if only the file of saved entries was written, of two that must be.
    pub(super) fn half_saved(&self, after: &Self) -> Self {
        Self {
            saved: after.saved.clone(),
            ..self.clone()
        }
    }

    /// A random `remove`, and the state after it; `None` if there is nothing to remove.
    pub(super) fn remove(&self, rng: &mut ChaCha8Rng) -> Option<(Request, Self)> {
        let mut next = self.clone();
        let in_force = self.entries();
        let candidates = in_force
            .keys()
            .filter(|cidr| !ALWAYS.contains(&cidr.as_str()));
        let count = rng.random_range(1..AT_ONCE);
        let mut cidrs: Vec<String> = candidates.cloned().collect();
        cidrs.shuffle(rng);
        cidrs.truncate(count);
        if cidrs.is_empty() {
            return None;
        }
        for cidr in &cidrs {
            next.runtime.remove(cidr);
            if self.is_in_files(cidr) {
                next.masked.insert(cidr.clone());
            }
        }
        next.forget();
        let body = json!({ "cidrs": cidrs });
        Some((Request::of("/v1/entries/remove", body), next))
    }

    fn is_in_files(&self, cidr: &str) -> bool {
        self.file.entries.contains_key(cidr) || self.saved.contains_key(cidr)
    }

    fn forget(&mut self) {
        let runtime = &self.runtime;
        let names = |name: &str| {
            let mut all = runtime.values();
            all.any(|wanted| matches!(wanted, Wanted::Policy(n) if *n == name))
        };
        self.seen.retain(|name, _| names(name));
    }
}

impl Sources {
    /// The sources in the output of `list --json`.
    pub(super) fn of(list: &Value) -> anyhow::Result<Self> {
        let text = |value: &Value| value.as_str().map(str::to_owned).context("no text");
        let entries = list["entries"].as_array().context("no entries")?;
        let runtime = entries
            .iter()
            .filter(|entry| entry["source"]["kind"] == "runtime")
            .map(|entry| {
                let policy = text(&entry["policy"])?;
                let named = NAMES.into_iter().find(|name| *name == policy);
                Ok((text(&entry["cidr"])?, named))
            });
        let masked = list["masked"].as_array().context("no masked")?;
        Ok(Self {
            runtime: runtime.collect::<anyhow::Result<_>>()?,
            masked: masked.iter().map(text).collect::<anyhow::Result<_>>()?,
        })
    }
}

impl Request {
    fn of(path: &'static str, body: Value) -> Self {
        let body = body.to_string();
        Self { path, body }
    }
}

fn inline(ms: u32) -> Value {
    json!({ "settings": { "initial_rto": format!("{ms}ms") } })
}

/// The entries in the maps with their initial RTOs, and the names of the policies.
pub(super) fn held(env: &TestEnv) -> anyhow::Result<(Entries, BTreeSet<String>)> {
    let policies: BTreeMap<u32, Policy> = pinned::policies(env)?
        .into_iter()
        .filter(|(slot, policy)| *slot >= FIRST_SLOT && policy.name().is_some())
        .collect();
    let mut entries = Entries::new();
    for name in [maps::ENTRIES_V4, maps::ENTRIES_V6] {
        for (key, value) in map(env, name)?.dump()? {
            let (prefix, address) = key.split_at(4);
            let prefix = u32::from_ne_bytes(prefix.try_into()?);
            let address: IpAddr = match <[u8; 4]>::try_from(address) {
                Ok(v4) => v4.into(),
                Err(_) => <[u8; 16]>::try_from(address)?.into(),
            };
            let (cidr, slot) = (
                format!("{address}/{prefix}"),
                read::<EntryValue>(&value)?.slot(),
            );
            let policy = policies
                .get(&slot)
                .with_context(|| format!("{cidr} points at slot {slot}, which no policy has"))?;
            entries.insert(cidr, policy.initial_rto_us / 1000);
        }
    }
    let names = policies.values().filter_map(Policy::name);
    let names = names.map(ToOwned::to_owned).collect();
    Ok((entries, names))
}

pub(super) fn difference(desired: &Entries, held: &Entries) -> String {
    let missing = desired
        .iter()
        .filter(|(cidr, ms)| held.get(*cidr) != Some(*ms));
    let strange = held
        .iter()
        .filter(|(cidr, ms)| desired.get(*cidr) != Some(*ms));
    let missing: Vec<_> = missing.take(5).collect();
    let strange: Vec<_> = strange.take(5).collect();
    format!(
        "{} desired, {} held; not held {missing:?}; not desired {strange:?}",
        desired.len(),
        held.len()
    )
}

pub(super) fn names_in(dir: &Path) -> anyhow::Result<BTreeSet<String>> {
    fs::read_dir(dir)
        .with_context(|| dir.display().to_string())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}
