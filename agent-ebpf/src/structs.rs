//! The kernel's own structs, read by offsets that the loader takes from the running kernel's BTF.
//!
//! The verifier checks these loads against the same BTF. A wrong offset makes loading the program fail; the program
//! cannot read any other memory.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_skc_to_tcp_sock;
use rto_agent_common::address::{AF_INET, AF_INET6, Peer, peer_v6};

use crate::socket::{constant, read};

macro_rules! offsets {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            pub(crate) static $name: u32 = 0;
        )*
    };
}
pub(crate) use offsets;

offsets! {
    OFFSET_FAMILY
    OFFSET_STATE
    OFFSET_DADDR
    OFFSET_V6_DADDR
    OFFSET_CGROUP
    OFFSET_CGROUP_KN
    OFFSET_KN_ID
    OFFSET_CSS_PARENT
    OFFSET_CSS_CGROUP
    OFFSET_RCV_SADDR
    OFFSET_V6_RCV_SADDR
    OFFSET_DPORT
    OFFSET_NUM
    OFFSET_NUM_RETRANS
    OFFSET_REQUEST_TIMEOUT
    OFFSET_CB_FLAGS
}

/// Maximum depth of the cgroup tree that is searched.
const CGROUP_DEPTH: usize = 64;

/// Reads a field.
///
/// # Safety
///
/// `base` must be a pointer the verifier tracks, not null, and `offset` a global made by [`offsets`].
#[inline(always)]
pub(crate) unsafe fn field<T: Copy>(base: *const c_void, offset: &'static u32) -> T {
    // SAFETY: by the contract; the loader has written the constant.
    unsafe { read(base.byte_add(constant(offset) as usize).cast::<T>()) }
}

/// A `struct sock_common`: the beginning of every socket and connection request.
#[derive(Clone, Copy)]
pub(crate) struct SockCommon(*const c_void);

impl SockCommon {
    /// # Safety
    ///
    /// The pointer must not be null, must point to such a struct, and the verifier must track it.
    #[inline(always)]
    pub(crate) unsafe fn new(pointer: *const c_void) -> Self {
        Self(pointer)
    }

    /// The state (`BPF_TCP_*`).
    #[inline(always)]
    pub(crate) fn state(self) -> u8 {
        // SAFETY: by the contract of `new`.
        unsafe { field(self.0, &OFFSET_STATE) }
    }

    /// The remote address; `None` for another family.
    #[inline(always)]
    pub(crate) fn peer(self) -> Option<Peer> {
        // SAFETY: by the contract of `new`.
        unsafe {
            let family: u16 = field(self.0, &OFFSET_FAMILY);
            match u32::from(family) {
                AF_INET => {
                    let address: u32 = field(self.0, &OFFSET_DADDR);
                    Some(Peer::V4(address.to_ne_bytes()))
                }
                AF_INET6 => {
                    let word =
                        |i: usize| -> u32 { field(self.0.byte_add(4 * i), &OFFSET_V6_DADDR) };
                    Some(peer_v6([word(0), word(1), word(2), word(3)]))
                }
                _ => None,
            }
        }
    }

    #[inline(always)]
    pub(crate) fn is_v4(self) -> bool {
        // SAFETY: by the contract of `new`.
        let family: u16 = unsafe { field(self.0, &OFFSET_FAMILY) };
        u32::from(family) == AF_INET
    }

    /// The local address: IPv4 in the first word, or IPv6; network byte order.
    #[inline(always)]
    pub(crate) fn local_words(self) -> [u32; 4] {
        self.words(&OFFSET_RCV_SADDR, &OFFSET_V6_RCV_SADDR)
    }

    /// The remote address, likewise.
    #[inline(always)]
    pub(crate) fn remote_words(self) -> [u32; 4] {
        self.words(&OFFSET_DADDR, &OFFSET_V6_DADDR)
    }

    #[inline(always)]
    fn words(self, v4: &'static u32, v6: &'static u32) -> [u32; 4] {
        // SAFETY: by the contract of `new`; offsets of 4 and of 16 bytes.
        unsafe {
            if self.is_v4() {
                return [field(self.0, v4), 0, 0, 0];
            }
            let word = |i: usize| -> u32 { field(self.0.byte_add(4 * i), v6) };
            [word(0), word(1), word(2), word(3)]
        }
    }

    #[inline(always)]
    pub(crate) fn local_port(self) -> u32 {
        // SAFETY: by the contract of `new`.
        let port: u16 = unsafe { field(self.0, &OFFSET_NUM) };
        port.into()
    }

    /// The remote port in the layout of `bpf_sock_ops.remote_port`.
    #[inline(always)]
    pub(crate) fn remote_port(self) -> u32 {
        // SAFETY: by the contract of `new`.
        let port: u16 = unsafe { field(self.0, &OFFSET_DPORT) };
        u32::from(port) << 16
    }

    /// The callbacks that sock_ops programs have requested (`bpf_sock_ops_cb_flags`); 0 if this is not a full TCP
    /// socket.
    #[inline(always)]
    pub(crate) fn callbacks(self) -> u32 {
        // SAFETY: by the contract of `new`; the kernel returns a full TCP socket or null.
        unsafe {
            let tcp = bpf_skc_to_tcp_sock(self.0.cast_mut()).cast::<c_void>();
            if tcp.is_null() {
                return 0;
            }
            field::<u8>(tcp, &OFFSET_CB_FLAGS).into()
        }
    }

    /// Whether the socket belongs to the cgroup with this id, or to one below it.
    #[inline(always)]
    pub(crate) fn is_in_cgroup(self, id: u64) -> bool {
        // SAFETY: by the contract of `new`; the kernel returns a full TCP socket or null. Pointers read from it may
        // have any value: the verifier makes loads through them safe.
        unsafe {
            let tcp = bpf_skc_to_tcp_sock(self.0.cast_mut()).cast::<c_void>();
            if tcp.is_null() {
                return false;
            }
            let mut cgroup: *const c_void = field(tcp, &OFFSET_CGROUP);
            for _ in 0..CGROUP_DEPTH {
                if cgroup.is_null() {
                    return false;
                }
                let node: *const c_void = field(cgroup, &OFFSET_CGROUP_KN);
                if node.is_null() {
                    return false;
                }
                if field::<u64>(node, &OFFSET_KN_ID) == id {
                    return true;
                }
                let parent: *const c_void = field(cgroup, &OFFSET_CSS_PARENT);
                if parent.is_null() {
                    return false;
                }
                cgroup = field(parent, &OFFSET_CSS_CGROUP);
            }
        }
        false
    }
}

/// A `struct request_sock`.
#[derive(Clone, Copy)]
pub(crate) struct Request(*const c_void);

impl Request {
    /// # Safety
    ///
    /// The pointer must not be null, must point to such a struct, and the verifier must track it.
    #[inline(always)]
    pub(crate) unsafe fn new(pointer: *const c_void) -> Self {
        Self(pointer)
    }

    /// The `sock_common` at its start.
    #[inline(always)]
    pub(crate) fn common(self) -> SockCommon {
        SockCommon(self.0)
    }

    /// The SYN-ACK's initial RTO, jiffies; 0 if the kernel does not keep it (before Linux 5.17). Such a kernel computes
    /// every timeout except the first from 1 s.
    #[inline(always)]
    pub(crate) fn timeout(self) -> u32 {
        // SAFETY: by the contract of `new`; a constant.
        unsafe {
            if constant(&OFFSET_REQUEST_TIMEOUT) == 0 {
                return 0;
            }
            field(self.0, &OFFSET_REQUEST_TIMEOUT)
        }
    }

    /// The number of earlier retransmissions of the SYN-ACK.
    #[inline(always)]
    pub(crate) fn retransmissions(self) -> u32 {
        // SAFETY: by the contract of `new`.
        let count: u8 = unsafe { field(self.0, &OFFSET_NUM_RETRANS) };
        count.into()
    }
}
