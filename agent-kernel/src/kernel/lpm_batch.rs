//! Reads and writes elements of a BPF map, one by one or in batches.
//!
//! aya does not support batches. The kernel supports them for LPM tries since Linux 5.13
//! (f56387c534c1), as loops over the single-element operations, so a batch only saves system calls.
//! Since 5.6, which has batches for other maps, it returns ENOTSUPP.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use nix::libc;

use super::bpf::bpf;

const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_MAP_UPDATE_BATCH: libc::c_int = 26;
const BPF_MAP_DELETE_BATCH: libc::c_int = 27;

/// Key of an LPM trie (`struct bpf_lpm_trie_key_u8`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LpmKey<const N: usize> {
    /// Prefix length: the number of significant bits in `data`.
    pub length: u32,
    /// The address, most significant byte first.
    pub data: [u8; N],
}

impl<const N: usize> LpmKey<N> {
    /// The shortest prefix.
    pub const ZERO: Self = Self {
        length: 0,
        data: [0; N],
    };
}

/// An LPM trie with values of type `V`.
#[derive(Clone, Copy)]
pub struct Trie<'fd, const N: usize, V> {
    fd: BorrowedFd<'fd>,
    value: std::marker::PhantomData<V>,
}

#[repr(C)]
#[derive(Default)]
struct ElementAttr {
    map_fd: u32,
    padding: u32,
    key: u64,
    /// A pointer to the value, or to the next key.
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
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

impl<'fd, const N: usize, V: Copy + Default> Trie<'fd, N, V> {
    /// Wraps a map's descriptor.
    ///
    /// # Safety
    ///
    /// The map's keys must be [`LpmKey<N>`] and its values `V`, to the byte (the kernel reads and
    /// writes as many bytes as the map's definition says), and any bytes must be a valid `V`.
    pub unsafe fn new(fd: BorrowedFd<'fd>) -> Self {
        Self {
            fd,
            value: std::marker::PhantomData,
        }
    }

    fn element(
        &self,
        command: libc::c_int,
        key: *const LpmKey<N>,
        value: u64,
    ) -> io::Result<libc::c_int> {
        let mut attr = ElementAttr {
            map_fd: self.number(),
            key: key as u64,
            value,
            ..ElementAttr::default()
        };
        bpf(command, &mut attr)
    }

    fn number(&self) -> u32 {
        u32::try_from(self.fd.as_raw_fd()).unwrap_or(u32::MAX)
    }

    /// The value of the longest prefix that matches the key's address and is not longer than the
    /// key.
    pub fn lookup(&self, key: &LpmKey<N>) -> io::Result<Option<V>> {
        let mut value = V::default();
        found(self.element(BPF_MAP_LOOKUP_ELEM, key, (&raw mut value) as u64))
            .map(|found| found.then_some(value))
    }

    /// Whether the map has exactly this key. After a missing key the kernel starts again at the
    /// first key, which follows no other key (`trie_get_next_key()`, Linux 6.13 and the stable
    /// releases of November 2024; a kernel without that fix may accept another key of the same
    /// length).
    pub fn contains(&self, key: &LpmKey<N>) -> io::Result<bool> {
        let first = self.next_key(None)?;
        Ok(first.is_some() && self.next_key(Some(key))? != first)
    }

    /// Writes an element.
    pub fn update(&self, key: &LpmKey<N>, value: &V) -> io::Result<()> {
        self.element(BPF_MAP_UPDATE_ELEM, key, std::ptr::from_ref(value) as u64)
            .map(drop)
    }

    /// Removes an element; returns whether it existed.
    pub fn delete(&self, key: &LpmKey<N>) -> io::Result<bool> {
        found(self.element(BPF_MAP_DELETE_ELEM, key, 0))
    }

    /// The key after this one, or the first key for `None`; `None` at the end.
    pub fn next_key(&self, key: Option<&LpmKey<N>>) -> io::Result<Option<LpmKey<N>>> {
        let mut next = LpmKey::ZERO;
        let key = key.map_or(std::ptr::null(), std::ptr::from_ref);
        found(self.element(BPF_MAP_GET_NEXT_KEY, key, (&raw mut next) as u64))
            .map(|found| found.then_some(next))
    }

    /// Writes many elements. After an error, some of them may have been written.
    ///
    /// # Errors
    ///
    /// The error of the system call; see [`is_unsupported`].
    pub fn update_batch(&self, keys: &[LpmKey<N>], values: &[V]) -> io::Result<()> {
        let count = keys.len().min(values.len());
        self.batch(BPF_MAP_UPDATE_BATCH, keys, values.as_ptr() as u64, count)
    }

    /// Removes many elements. A missing element is an error. After an error, some elements may be
    /// gone.
    ///
    /// # Errors
    ///
    /// The error of the system call; see [`is_unsupported`].
    pub fn delete_batch(&self, keys: &[LpmKey<N>]) -> io::Result<()> {
        self.batch(BPF_MAP_DELETE_BATCH, keys, 0, keys.len())
    }

    fn batch(
        &self,
        command: libc::c_int,
        keys: &[LpmKey<N>],
        values: u64,
        count: usize,
    ) -> io::Result<()> {
        let mut attr = BatchAttr {
            keys: keys.as_ptr() as u64,
            values,
            count: u32::try_from(count).map_err(io::Error::other)?,
            map_fd: self.number(),
            ..BatchAttr::default()
        };
        bpf(command, &mut attr).map(drop)
    }

    /// Reads elements from `cursor` (`None`: from the start) into the buffers, which have equal
    /// lengths. Returns the number of elements read, and the next cursor; `None` at the end.
    ///
    /// # Errors
    ///
    /// The error of the system call; see [`is_unsupported`].
    pub fn lookup_batch(
        &self,
        cursor: Option<LpmKey<N>>,
        keys: &mut [LpmKey<N>],
        values: &mut [V],
    ) -> io::Result<(usize, Option<LpmKey<N>>)> {
        let mut next = LpmKey::ZERO;
        let mut attr = BatchAttr {
            in_batch: cursor
                .as_ref()
                .map_or(0, |cursor| std::ptr::from_ref(cursor) as u64),
            out_batch: (&raw mut next) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: u32::try_from(keys.len().min(values.len())).map_err(io::Error::other)?,
            map_fd: self.number(),
            ..BatchAttr::default()
        };
        let more = found(bpf(BPF_MAP_LOOKUP_BATCH, &mut attr))?;
        Ok((attr.count as usize, more.then_some(next)))
    }
}

/// Reads the values that the possible CPUs have of a key; returns whether the map has the key.
///
/// # Safety
///
/// The map must be a per-CPU map with keys of type `u32` and values of type `V`, to the byte. The
/// size of `V` must be a multiple of 8, and any bytes a valid `V`. `values` must have an element for
/// each possible CPU.
pub unsafe fn lookup_per_cpu<V: Copy>(
    map: BorrowedFd<'_>,
    key: u32,
    values: &mut [V],
) -> io::Result<bool> {
    let mut attr = ElementAttr {
        map_fd: u32::try_from(map.as_raw_fd()).unwrap_or(u32::MAX),
        key: (&raw const key) as u64,
        value: values.as_mut_ptr() as u64,
        ..ElementAttr::default()
    };
    found(bpf(BPF_MAP_LOOKUP_ELEM, &mut attr))
}

/// Whether the kernel lacks this command for this type of map. (An invalid argument would be
/// EINVAL.)
pub fn is_unsupported(error: &io::Error) -> bool {
    /// An internal error of the kernel, unknown to the C library, which this call returns to user
    /// space.
    const ENOTSUPP: i32 = 524;
    matches!(error.raw_os_error(), Some(ENOTSUPP | libc::EOPNOTSUPP))
}

fn found(result: io::Result<libc::c_int>) -> io::Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(e) => Err(e),
    }
}
