//! LPM tries that are filled with the plain system call, as a baseline for the agent.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
};

use crate::bpf::{call, create_map};

const BPF_MAP_UPDATE_BATCH: i32 = 26;
const BPF_MAP_DELETE_BATCH: i32 = 27;
const BPF_MAP_TYPE_LPM_TRIE: u32 = 11;
const BPF_F_NO_PREALLOC: u32 = 1;
/// Elements per system call, the same number as the agent uses.
const CHUNK: usize = 4096;
/// Bytes of a value.
pub const VALUE_SIZE: u32 = 8;

/// One trie per address family.
pub struct Tries {
    v4: OwnedFd,
    v6: OwnedFd,
}

#[repr(C)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// Keys of both families in the kernel's format.
pub struct Keys {
    v4: Vec<[u8; 8]>,
    v6: Vec<[u8; 20]>,
}

impl Keys {
    /// Keeps the order of the prefixes, separately for each family.
    pub fn of(prefixes: impl Iterator<Item = (IpAddr, u8)>) -> Self {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for (address, length) in prefixes {
            let length = u32::from(length).to_ne_bytes();
            match address {
                IpAddr::V4(a) => v4.push(joined(length, &a.octets())),
                IpAddr::V6(a) => v6.push(joined(length, &a.octets())),
            }
        }
        Self { v4, v6 }
    }
}

fn joined<const N: usize>(length: [u8; 4], address: &[u8]) -> [u8; N] {
    let mut key = [0; N];
    key[..4].copy_from_slice(&length);
    key[4..].copy_from_slice(address);
    key
}

impl Tries {
    /// The IPv4 trie: keys of a length (u32) and four bytes, values of [`VALUE_SIZE`].
    #[must_use]
    pub fn v4(&self) -> BorrowedFd<'_> {
        self.v4.as_fd()
    }

    /// Creates empty tries with room for `entries` each.
    pub fn new(entries: u32) -> io::Result<Self> {
        Ok(Self {
            v4: create(8, entries)?,
            v6: create(20, entries)?,
        })
    }

    /// Inserts these keys in batches.
    pub fn fill(&self, keys: &Keys) -> io::Result<()> {
        batches(BPF_MAP_UPDATE_BATCH, &self.v4, &keys.v4)?;
        batches(BPF_MAP_UPDATE_BATCH, &self.v6, &keys.v6)
    }

    /// Removes the keys before the tries are freed: the kernel frees a full trie without yielding the processor.
    pub fn empty(&self, keys: &Keys) -> io::Result<()> {
        batches(BPF_MAP_DELETE_BATCH, &self.v4, &keys.v4)?;
        batches(BPF_MAP_DELETE_BATCH, &self.v6, &keys.v6)
    }
}

fn create(key_size: u32, entries: u32) -> io::Result<OwnedFd> {
    create_map([
        BPF_MAP_TYPE_LPM_TRIE,
        key_size,
        VALUE_SIZE,
        entries,
        BPF_F_NO_PREALLOC,
    ])
}

fn batches<const N: usize>(command: i32, map: &OwnedFd, keys: &[[u8; N]]) -> io::Result<()> {
    let values = [[1u8; VALUE_SIZE as usize]; CHUNK];
    for chunk in keys.chunks(CHUNK) {
        let mut attr = BatchAttr {
            in_batch: 0,
            out_batch: 0,
            keys: chunk.as_ptr() as u64,
            values: values.as_ptr() as u64,
            count: u32::try_from(chunk.len()).map_err(io::Error::other)?,
            map_fd: u32::try_from(map.as_raw_fd()).map_err(io::Error::other)?,
            elem_flags: 0,
            flags: 0,
        };
        call(command, &mut attr)?;
    }
    Ok(())
}
