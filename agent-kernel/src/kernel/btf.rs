//! Offsets of fields in the running kernel's structs, from its BTF (Documentation/bpf/btf.rst,
//! Linux 6.12). Reads only the parts of the format that this needs.

use std::{
    collections::HashMap,
    ffi::CStr,
    fs, io,
    path::Path,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use rto_agent_common::{Offsets, SocketTypes};

const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
/// `struct btf_type`: name, info, size or type.
const TYPE_LEN: usize = 12;
/// `struct btf_member`: name, type, offset.
const MEMBER_LEN: usize = 12;

const KIND_INT: u32 = 1;
const KIND_PTR: u32 = 2;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_FUNC: u32 = 12;
/// Types that only name or qualify another type: typedef, volatile, const, restrict, type_tag.
const MODIFIERS: [u32; 5] = [8, 9, 10, 11, 18];

/// Why a field cannot be found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BtfError {
    /// The kernel has no BTF, or it cannot be read.
    #[error("{VMLINUX}: {0}; the kernel must be built with CONFIG_DEBUG_INFO_BTF")]
    Unreadable(#[from] io::Error),
    /// The data does not have the format that this version knows.
    #[error("{VMLINUX} is not in a form this version can read: {0}")]
    Malformed(&'static str),
    /// The kernel does not have this struct or field.
    #[error("this kernel has no {0}")]
    Missing(String),
    /// The kernel's field has a different size or type than programs read.
    #[error("{0} of this kernel is not what programs expect: {1}")]
    Changed(String, String),
}

/// The location and type of a field.
struct Field {
    /// Offset from the start of the struct, bytes.
    offset: u32,
    /// Index of its type, with names and qualifiers resolved.
    at: usize,
    /// Size of a bit field, bytes; `None`: the size of its type.
    bit_field: Option<u32>,
}

/// A parsed index over the raw bytes.
pub struct Btf {
    data: Vec<u8>,
    strings: usize,
    /// Start of each type in the data; type ids start at 1.
    types: Vec<usize>,
    /// Structs by name.
    structs: HashMap<String, usize>,
}

impl Btf {
    /// Reads the running kernel's BTF.
    ///
    /// It is parsed once for all callers that hold it at the same time. It is not kept longer, because it has several
    /// megabytes.
    pub fn vmlinux() -> Result<Arc<Self>, BtfError> {
        static SHARED: Mutex<Weak<Btf>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(btf) = shared.upgrade() {
            return Ok(btf);
        }
        let btf = Arc::new(Self::parse(fs::read(Path::new(VMLINUX))?)?);
        *shared = Arc::downgrade(&btf);
        Ok(btf)
    }

    fn parse(data: Vec<u8>) -> Result<Self, BtfError> {
        let word = |at: usize| u32_at(&data, at).map(|w| w as usize);
        let magic = data.get(..2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
        if magic != Some(MAGIC) {
            return Err(BtfError::Malformed("magic number"));
        }
        let (header, types_at, types_len, strings_at) = (word(4)?, word(8)?, word(12)?, word(16)?);
        let mut btf = Self {
            strings: header + strings_at,
            types: Vec::new(),
            structs: HashMap::new(),
            data,
        };
        let mut at = header + types_at;
        let end = at + types_len;
        while at < end {
            let info = u32_at(&btf.data, at + 4)?;
            if kind(info) == KIND_STRUCT {
                let name = btf.string(u32_at(&btf.data, at)? as usize)?;
                // The first type of a name wins: others come from modules, or from files with a
                // different definition.
                btf.structs.entry(name).or_insert(btf.types.len());
            }
            btf.types.push(at);
            at += TYPE_LEN + trailer(info)?;
        }
        Ok(btf)
    }

    fn string(&self, offset: usize) -> Result<String, BtfError> {
        let rest = self.data.get(self.strings + offset..);
        let rest = rest.ok_or(BtfError::Malformed("string offset"))?;
        let string = CStr::from_bytes_until_nul(rest)
            .map_err(|_| BtfError::Malformed("a string without an end"))?;
        Ok(string.to_string_lossy().into_owned())
    }

    fn type_at(&self, id: u32) -> Result<usize, BtfError> {
        (id as usize)
            .checked_sub(1)
            .and_then(|index| self.types.get(index))
            .copied()
            .ok_or(BtfError::Malformed("type id"))
    }

    /// Resolves names and qualifiers of a type.
    fn plain(&self, mut id: u32) -> Result<usize, BtfError> {
        // Longer chains do not occur, and a cycle would not end.
        for _ in 0..32 {
            let at = self.type_at(id)?;
            if !MODIFIERS.contains(&kind(u32_at(&self.data, at + 4)?)) {
                return Ok(at);
            }
            id = u32_at(&self.data, at + 8)?;
        }
        Err(BtfError::Malformed("endless type"))
    }

    /// Finds a field, also within anonymous structs and unions.
    fn member(&self, at: usize, name: &str) -> Result<Option<Field>, BtfError> {
        let info = u32_at(&self.data, at + 4)?;
        if ![KIND_STRUCT, KIND_UNION].contains(&kind(info)) {
            return Ok(None);
        }
        for index in 0..(info & 0xffff) as usize {
            let member = at + TYPE_LEN + index * MEMBER_LEN;
            let own = self.string(u32_at(&self.data, member)? as usize)?;
            let id = u32_at(&self.data, member + 4)?;
            let raw = u32_at(&self.data, member + 8)?;
            // If the type's flag is set, the upper byte is the size of a bit field.
            let (bits, size) = if info >> 31 == 1 {
                (raw & 0x00ff_ffff, raw >> 24)
            } else {
                (raw, 0)
            };
            // A bit field that does not consist of whole bytes has no offset in bytes.
            if bits % 8 != 0 || size % 8 != 0 {
                continue;
            }
            if own == name {
                return Ok(Some(Field {
                    offset: bits / 8,
                    at: self.plain(id)?,
                    bit_field: (size != 0).then_some(size / 8),
                }));
            }
            if own.is_empty()
                && let Some(inner) = self.member(self.plain(id)?, name)?
            {
                return Ok(Some(Field {
                    offset: bits / 8 + inner.offset,
                    ..inner
                }));
            }
        }
        Ok(None)
    }

    fn find(&self, of: &str, path: &[&str]) -> Result<Field, BtfError> {
        let missing = || BtfError::Missing(format!("{of}.{}", path.join(".")));
        let index = self.structs.get(of).ok_or_else(missing)?;
        let mut found = Field {
            offset: 0,
            at: self.types[*index],
            bit_field: None,
        };
        for name in path {
            let inner = self.member(found.at, name)?.ok_or_else(missing)?;
            found = Field {
                offset: found.offset + inner.offset,
                ..inner
            };
        }
        Ok(found)
    }

    /// Size of a field, bytes; `None` for a type without a size.
    fn size(&self, field: &Field) -> Result<Option<u32>, BtfError> {
        let word = |at: usize| u32_at(&self.data, at);
        Ok(match kind(word(field.at + 4)?) {
            _ if field.bit_field.is_some() => field.bit_field,
            KIND_INT | KIND_STRUCT | KIND_UNION | KIND_ENUM => Some(word(field.at + 8)?),
            _ => None,
        })
    }

    /// Byte offset of a field of this size. If the size differs, the program would read only part
    /// of the field or its neighbour too, or the verifier would refuse the program.
    pub fn offset(&self, of: &str, path: &[&str], size: u32) -> Result<u32, BtfError> {
        let field = self.find(of, path)?;
        match self.size(&field)? {
            Some(found) if found == size => Ok(field.offset),
            found => {
                let found = found.map_or_else(|| "no number".to_owned(), |n| format!("{n} bytes"));
                let text = format!("{found} instead of {size}");
                Err(BtfError::Changed(format!("{of}.{}", path.join(".")), text))
            }
        }
    }

    /// Byte offset of a pointer.
    fn pointer(&self, of: &str, path: &[&str]) -> Result<u32, BtfError> {
        let field = self.find(of, path)?;
        if kind(u32_at(&self.data, field.at + 4)?) == KIND_PTR {
            Ok(field.offset)
        } else {
            let name = format!("{of}.{}", path.join("."));
            Err(BtfError::Changed(name, "no pointer".to_owned()))
        }
    }

    /// Whether the struct has this field, of any size.
    pub fn has(&self, of: &str, path: &[&str]) -> bool {
        self.find(of, path).is_ok()
    }

    /// Offsets for the programs at the LSM hook and the iterator.
    pub fn offsets(&self) -> Result<Offsets, BtfError> {
        Ok(Offsets {
            family: self.offset("sock_common", &["skc_family"], 2)?,
            state: self.offset("sock_common", &["skc_state"], 1)?,
            daddr: self.offset("sock_common", &["skc_daddr"], 4)?,
            v6_daddr: self.offset("sock_common", &["skc_v6_daddr"], 16)?,
            cgroup: self.pointer("sock", &["sk_cgrp_data", "cgroup"])?,
            cgroup_kn: self.pointer("cgroup", &["kn"])?,
            kn_id: self.offset("kernfs_node", &["id"], 8)?,
            css_parent: self.pointer("cgroup", &["self", "parent"])?,
            css_cgroup: self.pointer("cgroup_subsys_state", &["cgroup"])?,
            dport: self.offset("sock_common", &["skc_dport"], 2)?,
            num: self.offset("sock_common", &["skc_num"], 2)?,
            cb_flags: self.offset("tcp_sock", &["bpf_sock_ops_cb_flags"], 1)?,
            ..Offsets::default()
        })
    }

    /// Offsets for the program at the SYN-ACK tracepoint.
    pub fn request_offsets(&self) -> Result<Offsets, BtfError> {
        let timeout = self.offset("request_sock", &["timeout"], 4);
        Ok(Offsets {
            rcv_saddr: self.offset("sock_common", &["skc_rcv_saddr"], 4)?,
            v6_rcv_saddr: self.offset("sock_common", &["skc_v6_rcv_saddr"], 16)?,
            num_retrans: self.offset("request_sock", &["num_retrans"], 1)?,
            request_timeout: match timeout {
                // Absent before Linux 5.17.
                Err(BtfError::Missing(_)) => 0,
                timeout => timeout?,
            },
            ..self.offsets()?
        })
    }

    /// Offsets of the socket fields that the sock_ops program reads. A field that is missing or has
    /// a different size is 0, which disables only the feature that needs it. `listener` and
    /// `context_sk` are 0 without the kernel functions through which a program reaches them.
    pub fn socket_types(&self) -> SocketTypes {
        let offset = |of: &str, path: &[&str], size| self.offset(of, path, size).unwrap_or(0);
        let pointer = |of: &str, path: &[&str]| self.pointer(of, path).unwrap_or(0);
        let connection = "inet_connection_sock";
        let mut types = SocketTypes {
            is_mptcp: offset("tcp_sock", &["is_mptcp"], 1),
            fastopen_req: pointer("tcp_sock", &["fastopen_req"]),
            net: pointer("sock_common", &["skc_net", "net"]),
            fastopen_blackhole_timeout: offset(
                "net",
                &["ipv4", "sysctl_tcp_fastopen_blackhole_timeout"],
                4,
            ),
            // An int before Linux 5.15, but there no program can reach a listener.
            synack_retries: offset("net", &["ipv4", "sysctl_tcp_synack_retries"], 1),
            syn_retries: offset(connection, &["icsk_syn_retries"], 1),
            defer_accept: offset(connection, &["icsk_accept_queue", "rskq_defer_accept"], 1),
            listener: 0,
            context_sk: 0,
            rto: offset(connection, &["icsk_rto"], 4),
            rto_min: offset(connection, &["icsk_rto_min"], 4),
            delack_max: offset(connection, &["icsk_delack_max"], 4),
            user_timeout: offset(connection, &["icsk_user_timeout"], 4),
            retransmits: offset(connection, &["icsk_retransmits"], 1),
            // An int before Linux 5.15; then its first byte is read.
            net_syn_retries: [1, 4]
                .map(|size| offset("net", &["ipv4", "sysctl_tcp_syn_retries"], size))
                .into_iter()
                .max()
                .unwrap_or(0),
            net_syn_linear_timeouts: offset("net", &["ipv4", "sysctl_tcp_syn_linear_timeouts"], 1),
            net_rto_min: offset("net", &["ipv4", "sysctl_tcp_rto_min_us"], 4),
            net_thin_linear: offset("net", &["ipv4", "sysctl_tcp_thin_linear_timeouts"], 1),
            rto_max: offset(connection, &["icsk_rto_max"], 4),
            retrans_stamp: offset("tcp_sock", &["retrans_stamp"], 4),
            // The timer moved into `struct sock` after Linux 6.18.
            timer_expires: [
                (connection, ["icsk_retransmit_timer", "expires"]),
                ("sock", ["tcp_retransmit_timer", "expires"]),
            ]
            .map(|(of, path)| offset(of, &path, 8))
            .into_iter()
            .max()
            .unwrap_or(0),
            txrehash: offset("sock", &["sk_txrehash"], 1),
            connection_sock: self.struct_id(connection).unwrap_or(0),
            dst_cache: pointer("sock", &["sk_dst_cache"]),
            metrics: offset("dst_entry", &["_metrics"], 8),
            max_ack_backlog: offset("sock", &["sk_max_ack_backlog"], 4),
            total_rto_time: offset("tcp_sock", &["total_rto_time"], 4),
            tcp_sock: self.struct_id("tcp_sock").unwrap_or(0),
            dst_metrics: self.struct_id("dst_metrics").unwrap_or(0),
        };
        if types.net == 0 {
            // Unusable without the offset of the namespace, from which it is read.
            types.fastopen_blackhole_timeout = 0;
        }
        let listener = pointer("sock_common", &["skc_listener"]);
        let needed = [
            listener,
            types.net,
            types.synack_retries,
            types.syn_retries,
            types.defer_accept,
            types.connection_sock,
        ];
        if let Ok(context_sk) = self.pointer("bpf_sock_ops_kern", &["sk"])
            && self.kfuncs().is_some()
            && !needed.contains(&0)
        {
            types.listener = listener;
            types.context_sk = context_sk;
        }
        types
    }

    /// BTF ids of `bpf_cast_to_kern_ctx()` and `bpf_rdonly_cast()`, if the kernel has both (Linux 6.2).
    pub fn kfuncs(&self) -> Option<[u32; 2]> {
        Some([
            self.func("bpf_cast_to_kern_ctx")?,
            self.func("bpf_rdonly_cast")?,
        ])
    }

    /// The BTF id of a function.
    pub fn func(&self, name: &str) -> Option<u32> {
        let found = self.types.iter().position(|at| {
            let info = u32_at(&self.data, at + 4).map(kind);
            let string = || u32_at(&self.data, *at).map(|offset| self.is_string(offset, name));
            matches!(info, Ok(KIND_FUNC)) && string().unwrap_or(false)
        });
        // Type ids start at 1.
        u32::try_from(found? + 1).ok()
    }

    fn struct_id(&self, name: &str) -> Option<u32> {
        u32::try_from(self.structs.get(name)? + 1).ok()
    }

    fn is_string(&self, offset: u32, text: &str) -> bool {
        let begin = self.strings + offset as usize;
        self.data
            .get(begin..begin + text.len() + 1)
            .is_some_and(|bytes| bytes.split_last() == Some((&0, text.as_bytes())))
    }
}

fn kind(info: u32) -> u32 {
    (info >> 24) & 0x1f
}

/// Bytes after a `struct btf_type`, by its kind.
fn trailer(info: u32) -> Result<usize, BtfError> {
    let count = (info & 0xffff) as usize;
    Ok(match kind(info) {
        // int, var, decl_tag
        1 | 14 | 17 => 4,
        // array
        3 => 12,
        // struct, union, datasec, enum64
        4 | 5 | 15 | 19 => 12 * count,
        // enum, func_proto
        6 | 13 => 8 * count,
        // pointer, forward, typedef, volatile, const, restrict, func, float, type_tag
        2 | 7..=12 | 16 | 18 => 0,
        _ => return Err(BtfError::Malformed("a kind of type that is too new")),
    })
}

fn u32_at(data: &[u8], at: usize) -> Result<u32, BtfError> {
    match data.get(at..at + 4) {
        Some(&[a, b, c, d]) => Ok(u32::from_ne_bytes([a, b, c, d])),
        _ => Err(BtfError::Malformed("too short")),
    }
}

#[cfg(test)]
mod tests;
