//! The agent's maps in the kernel, opened by their pins.

use std::net::IpAddr;

use anyhow::{Context as _, ensure};
use aya::Pod;
use rto_agent_common::{Policy, PolicySlot, maps::POLICIES};
use rto_testbed::{agent::Agent, kernel::Map};

/// Opens the map with this name.
pub fn map(agent: &Agent, name: &str) -> anyhow::Result<Map> {
    Map::open(&agent.pins()?.join(name)).context(name.to_owned())
}

/// An element of an array.
pub fn get<T: Pod>(agent: &Agent, name: &str, index: u32) -> anyhow::Result<T> {
    let value = map(agent, name)?.get(&index.to_ne_bytes())?;
    read(&value.context("no such element")?)
}

/// Writes an element of an array.
pub fn set<T: Pod>(agent: &Agent, name: &str, index: u32, value: &T) -> anyhow::Result<()> {
    Ok(map(agent, name)?.set(&index.to_ne_bytes(), bytes_of(value))?)
}

/// The policies in use, by slot.
pub fn policies(agent: &Agent) -> anyhow::Result<Vec<(u32, Policy)>> {
    let mut policies = Vec::new();
    for (slot, value) in map(agent, POLICIES)?.dump()? {
        let policy = *read::<PolicySlot>(&value)?.policy();
        if policy != Policy::EMPTY {
            policies.push((read(&slot)?, policy));
        }
    }
    Ok(policies)
}

/// The key of a prefix in a trie.
#[must_use]
pub fn trie_key(address: IpAddr, length: u32) -> Vec<u8> {
    let length = length.to_ne_bytes();
    match address {
        IpAddr::V4(address) => [&length[..], &address.octets()].concat(),
        IpAddr::V6(address) => [&length[..], &address.octets()].concat(),
    }
}

/// The value that these bytes begin with.
pub fn read<T: Pod>(bytes: &[u8]) -> anyhow::Result<T> {
    ensure!(bytes.len() >= size_of::<T>(), "{} bytes", bytes.len());
    // SAFETY: there are enough bytes, any bytes are a valid value of the type, and the copy need not be aligned.
    Ok(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// The bytes of a value.
pub fn bytes_of<T: Pod>(value: &T) -> &[u8] {
    // SAFETY: the trait guarantees that all bytes of the value may be read.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}
