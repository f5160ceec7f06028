//! The environment of a run of the sock_ops program: the object as the loader leaves it, a context, maps and helpers.

use std::collections::{BTreeMap, HashMap, HashSet};

use anyhow::{Context as _, bail};
use aya::Pod;
use aya_obj::{Object, generated::bpf_insn};
use rto_agent_common::{
    Counters, EntryValue, FAST_COUNTERS, FIRST_SLOT, FastStatistics, HostDefaults, PROGRAM, Policy,
    PolicySlot, SocketState, Statistics, address::Peer, arm, direction, event::EventControl,
    globals, lasting, maps, statistics, statistics_key,
};
use rto_agent_kernel::{datapath::OBJECT, kernel::kfuncs};

use super::interpreter::{self, Helpers, Memory};
use crate::pinned::{self, bytes_of};

/// Jiffies per second.
pub(super) const HZ: u32 = 250;
/// The reply of an earlier program at the cgroup.
pub(super) const EARLIER_REPLY: u32 = 77;
/// The slot of the policy.
const SLOT: u32 = FIRST_SLOT;
/// The kernel's default of both options, microseconds (`TCP_RTO_MIN`, `TCP_DELACK_MAX`).
const KERNELS_US: u32 = 200_000;

// include/uapi/linux/bpf.h
const TCP_BPF_DELACK_MAX: u64 = 1003;
const TCP_BPF_RTO_MIN: u64 = 1004;
const BPF_SK_STORAGE_GET_F_CREATE: u64 = 1;

/// The implemented helpers, by number (`enum bpf_func_id`).
const HELPERS: [(i32, &str); 6] = [
    (1, "map_lookup_elem"),
    (5, "ktime_get_ns"),
    (49, "setsockopt"),
    (57, "getsockopt"),
    (59, "sock_ops_cb_flags_set"),
    (107, "sk_storage_get"),
];

/// The program as the loader leaves it: relocated, with its constants, and configured for a kernel without BTF, where
/// it cannot read kernel structs.
pub(super) struct Program {
    instructions: Vec<bpf_insn>,
    /// Number and name of each map.
    maps: Vec<(i32, String)>,
    constants: Vec<u8>,
}

impl Program {
    /// Default settings except `sampling`.
    pub(super) fn load(sampling: u32) -> anyhow::Result<Self> {
        let mut object = Object::parse(&kfuncs::resolved(OBJECT, None))?;
        let mode = statistics::ON | statistics::RTT_AT_END;
        object.patch_map_data(HashMap::from([
            (globals::HZ, (bytes_of(&HZ), true)),
            (globals::STATISTICS_MODE, (bytes_of(&mode), true)),
            (globals::SAMPLING, (bytes_of(&sampling), true)),
            (globals::SHAPES_SYNS, (bytes_of(&1u8), true)),
        ]))?;
        let text = HashSet::from_iter(object.functions.keys().map(|(section, _)| *section));
        let all: Vec<_> = (1..).zip(object.maps.clone()).collect();
        let numbered = all
            .iter()
            .map(|(number, (name, map))| (name.as_str(), *number, map));
        object.relocate_maps(numbered, &text)?;
        object.relocate_calls(&text)?;
        let key = object.programs.get(PROGRAM).context(PROGRAM)?;
        let function = object.functions.remove(&key.function_key());
        let constants = object.maps.get(".rodata").context(".rodata")?;
        Ok(Self {
            instructions: function.context("no instructions")?.instructions,
            maps: all.into_iter().map(|(n, (name, _))| (n, name)).collect(),
            constants: constants.data().to_vec(),
        })
    }
}

/// `struct bpf_sock_ops`, restricted to the fields that the program reads for a loss-free connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context {
    pub(super) op: u32,
    pub(super) peer: Peer,
    /// Whether there is a full socket, and not just a request; the fields below belong to that socket.
    pub(super) is_full: bool,
    pub(super) state: u32,
    pub(super) callbacks: u32,
    pub(super) segs_out: u32,
    pub(super) srtt_us: u32,
}

impl Context {
    const BYTES: usize = 224;
    const REPLY: usize = 4;
    const CALLBACKS: usize = 84;

    fn bytes(self, sk: u64) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let mut word = |at: usize, word: u32| {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        };
        word(0, self.op);
        word(Self::REPLY, EARLIER_REPLY);
        word(72, self.is_full.into());
        word(80, self.srtt_us << 3);
        word(Self::CALLBACKS, self.callbacks);
        word(88, self.state);
        // rtt_min has no sample yet; then snd_una.
        word(92, u32::MAX);
        word(108, u32::from(self.is_full));
        word(148, self.segs_out);
        let (family, at, address): (u32, usize, &[u8]) = match &self.peer {
            Peer::V4(address) => (2, 24, address),
            Peer::V6(address) => (10, 32, address),
        };
        word(20, family);
        bytes[at..at + address.len()].copy_from_slice(address);
        bytes[184..192].copy_from_slice(&sk.to_le_bytes());
        bytes
    }
}

/// The input of a run.
pub(super) struct Situation<'a> {
    pub(super) context: Context,
    /// The only entry; it covers this host.
    pub(super) entry: Peer,
    pub(super) policy: &'a Policy,
}

/// The cost of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) instructions: usize,
    /// Number of calls of each helper.
    pub(super) helpers: BTreeMap<&'static str, usize>,
}

impl Cost {
    pub(super) fn calls(&self) -> usize {
        self.helpers.values().sum()
    }
}

/// The effect of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Effect {
    pub(super) reply: u32,
    /// The callback flags after the run.
    pub(super) callbacks: u32,
    /// Hits of the entry.
    pub(super) hits: u32,
    /// Counters of the policy, for the active and the passive end.
    pub(super) counted: [Counters; 2],
    /// Number of samples in histograms.
    pub(super) samples: u64,
    /// TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX, microseconds.
    pub(super) options: [u32; 2],
    pub(super) is_stored: bool,
}

pub(super) fn run(program: &Program, situation: &Situation<'_>) -> anyhow::Result<(Cost, Effect)> {
    let mut memory = Memory::default();
    let mut kernel = Kernel::new(program, situation, &mut memory);
    let context = kernel.context;
    let instructions = interpreter::run(&program.instructions, context, &mut memory, &mut kernel)?;
    let effect = kernel.effect(&memory)?;
    let helpers = kernel.calls;
    Ok((
        Cost {
            instructions,
            helpers,
        },
        effect,
    ))
}

struct Kernel {
    context: u64,
    maps: BTreeMap<i32, Map>,
    /// TCP_BPF_RTO_MIN and TCP_BPF_DELACK_MAX.
    options: [u32; 2],
    storage: Option<u64>,
    calls: BTreeMap<&'static str, usize>,
}

/// A map; its values are contiguous.
struct Map {
    name: String,
    keys: Keys,
    value_bytes: usize,
    values: u64,
}

enum Keys {
    /// An array with this many elements.
    Indices(u32),
    Listed(Vec<Vec<u8>>),
}

impl Kernel {
    fn new(program: &Program, situation: &Situation<'_>, memory: &mut Memory) -> Self {
        // The program reads the socket's mark; 0 is not the mark of a probe.
        let sk = if situation.context.is_full {
            memory.add(vec![0; 80])
        } else {
            0
        };
        let context = memory.add(situation.context.bytes(sk).to_vec());
        let maps = program.maps.iter().filter_map(|(number, name)| {
            let (keys, value_bytes, values) = contents(name, program, situation)?;
            let map = Map {
                name: name.clone(),
                keys,
                value_bytes,
                values: memory.add(values),
            };
            Some((*number, map))
        });
        Self {
            context,
            maps: maps.collect(),
            options: [KERNELS_US; 2],
            storage: None,
            calls: BTreeMap::new(),
        }
    }

    fn effect(&self, memory: &Memory) -> anyhow::Result<Effect> {
        let word = |at: usize| -> anyhow::Result<u32> {
            Ok(u32::try_from(memory.load(self.context + at as u64, 4)?)?)
        };
        let hits = [maps::ENTRIES_V4, maps::ENTRIES_V6]
            .into_iter()
            .map(|name| Ok(self.value::<EntryValue>(memory, name, 0)?.hits))
            .sum::<anyhow::Result<u32>>()?;
        let counters = |direction| {
            let index = statistics_key(arm::treated(SLOT), direction) as usize;
            self.value::<FastStatistics>(memory, maps::COUNTERS, index)
        };
        let [active, passive] = [counters(direction::ACTIVE)?, counters(direction::PASSIVE)?];
        let mut samples = [active, passive]
            .iter()
            .flat_map(|fast| fast.path_rtt.buckets)
            .sum::<u64>();
        for index in 0..2 {
            let sheet: Statistics = self.value(memory, maps::STATISTICS, index)?;
            samples += sheet.path_rtt.buckets.iter().sum::<u64>();
            samples += sheet.srtt.buckets.iter().sum::<u64>();
        }
        Ok(Effect {
            reply: word(Context::REPLY)?,
            callbacks: word(Context::CALLBACKS)?,
            hits,
            counted: [active.counters, passive.counters],
            samples,
            options: self.options,
            is_stored: self.storage.is_some(),
        })
    }

    fn value<T: Pod>(&self, memory: &Memory, name: &str, index: usize) -> anyhow::Result<T> {
        let map = self.maps.values().find(|map| map.name == name);
        let map = map.with_context(|| format!("no map {name}"))?;
        let at = map.values + (index * map.value_bytes) as u64;
        pinned::read(memory.bytes(at, size_of::<T>())?)
    }

    /// The index of an option in `options`.
    fn option(level: u64, option: u64) -> anyhow::Result<usize> {
        const SOL_TCP: u64 = 6;
        match (level, option) {
            (SOL_TCP, TCP_BPF_RTO_MIN) => Ok(0),
            (SOL_TCP, TCP_BPF_DELACK_MAX) => Ok(1),
            other => bail!("socket option {other:?}"),
        }
    }
}

impl Helpers for Kernel {
    fn call(&mut self, number: i32, args: [u64; 5], memory: &mut Memory) -> anyhow::Result<u64> {
        let name = HELPERS.iter().find(|(known, _)| *known == number);
        let (_, name) = *name.with_context(|| format!("helper {number}"))?;
        *self.calls.entry(name).or_default() += 1;
        Ok(match (name, args) {
            ("map_lookup_elem", [map, key, ..]) => {
                let map = self.maps.get(&i32::try_from(map)?);
                map.context("a map without values")?.find(key, memory)?
            }
            ("ktime_get_ns", _) => 1_000_000_000,
            ("setsockopt", [_, level, option, value, len]) => {
                let value = memory.load(value, usize::try_from(len)?)?;
                self.options[Self::option(level, option)?] = u32::try_from(value)?;
                0
            }
            ("getsockopt", [_, level, option, value, len]) => {
                let in_force = self.options[Self::option(level, option)?];
                memory.store(value, usize::try_from(len)?, in_force.into())?;
                0
            }
            ("sock_ops_cb_flags_set", [context, callbacks, ..]) => {
                memory.store(context + Context::CALLBACKS as u64, 4, callbacks)?;
                0
            }
            ("sk_storage_get", [_, _, _, BPF_SK_STORAGE_GET_F_CREATE, _]) => *self
                .storage
                .get_or_insert_with(|| memory.add(vec![0; size_of::<SocketState>()])),
            ("sk_storage_get", _) => self.storage.unwrap_or(0),
            (other, _) => bail!("{other}"),
        })
    }

    fn map_value(&self, map: i32) -> anyhow::Result<u64> {
        Ok(self.maps.get(&map).context("a map without values")?.values)
    }
}

impl Map {
    /// The address of a key's value; 0 if the key does not exist.
    fn find(&self, key: u64, memory: &Memory) -> anyhow::Result<u64> {
        let index = match &self.keys {
            Keys::Indices(count) => {
                let index = u32::try_from(memory.load(key, 4)?)?;
                (index < *count).then_some(index as usize)
            }
            Keys::Listed(keys) => {
                let len = keys.first().map_or(0, Vec::len);
                let key = memory.bytes(key, len)?;
                keys.iter().position(|known| known == key)
            }
        };
        Ok(index.map_or(0, |index| self.values + (index * self.value_bytes) as u64))
    }
}

/// Keys, value size and values of a map; `None` for maps that the clean path does not use.
fn contents(
    name: &str,
    program: &Program,
    situation: &Situation<'_>,
) -> Option<(Keys, usize, Vec<u8>)> {
    let entry = EntryValue::new(SLOT, 0);
    let (v4, v6) = match situation.entry {
        Peer::V4(address) => (vec![host(&address)], Vec::new()),
        Peer::V6(address) => (Vec::new(), vec![host(&address)]),
    };
    Some(match name {
        maps::ENTRIES_V4 => listed(v4, entry),
        maps::ENTRIES_V6 => listed(v6, entry),
        maps::POLICIES => {
            let [_, slot] = PolicySlot::default().replaced(situation.policy);
            let mut slots = [PolicySlot::default(); SLOT as usize + 1];
            slots[SLOT as usize] = slot;
            array(&slots)
        }
        maps::HOST_DEFAULTS => array(&[HostDefaults {
            syn_retries: 6,
            syn_linear_timeouts: 4,
            syn_ack_retries: 5,
        }]),
        maps::LASTING => array(&[0_u32; lasting::LEN as usize]),
        maps::COUNTERS => array(&[FastStatistics::default(); FAST_COUNTERS as usize]),
        maps::STATISTICS => {
            let key = |direction| bytes_of(&statistics_key(arm::treated(SLOT), direction)).to_vec();
            let keys = [direction::ACTIVE, direction::PASSIVE].map(key);
            listed(keys.to_vec(), Statistics::default())
        }
        maps::EVENT_CONTROL => array(&[EventControl::default(); 2]),
        ".rodata" => (Keys::Indices(1), 0, program.constants.clone()),
        _ => return None,
    })
}

/// The key of a trie for one host; the program looks up nothing shorter.
fn host(address: &[u8]) -> Vec<u8> {
    let prefix_len = 8 * address.len() as u64;
    [&prefix_len.to_le_bytes()[..4], address].concat()
}

fn listed<T: Pod>(keys: Vec<Vec<u8>>, value: T) -> (Keys, usize, Vec<u8>) {
    let values = bytes_of(&value).repeat(keys.len().max(1));
    (Keys::Listed(keys), size_of::<T>(), values)
}

fn array<T: Pod>(values: &[T]) -> (Keys, usize, Vec<u8>) {
    let len = u32::try_from(values.len()).unwrap_or(u32::MAX);
    let bytes = values.iter().flat_map(bytes_of).copied().collect();
    (Keys::Indices(len), size_of::<T>(), bytes)
}
