//! The running kernel's structs and functions, as the loader passes them to the programs.

/// Offsets of fields in the running kernel's structs, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// `sock_common.skc_family`, u16.
    pub family: u32,
    /// `sock_common.skc_state`, u8.
    pub state: u32,
    /// `sock_common.skc_daddr`, 4 bytes.
    pub daddr: u32,
    /// `sock_common.skc_v6_daddr`, 16 bytes.
    pub v6_daddr: u32,
    /// `sock.sk_cgrp_data.cgroup`, pointer.
    pub cgroup: u32,
    /// `cgroup.kn`, pointer.
    pub cgroup_kn: u32,
    /// `kernfs_node.id`, u64.
    pub kn_id: u32,
    /// `cgroup.self.parent`, pointer.
    pub css_parent: u32,
    /// `cgroup_subsys_state.cgroup`, pointer.
    pub css_cgroup: u32,
    /// `sock_common.skc_rcv_saddr`, 4 bytes.
    pub rcv_saddr: u32,
    /// `sock_common.skc_v6_rcv_saddr`, 16 bytes.
    pub v6_rcv_saddr: u32,
    /// `sock_common.skc_dport`, u16 in network byte order.
    pub dport: u32,
    /// `sock_common.skc_num`, u16.
    pub num: u32,
    /// `request_sock.num_retrans`, u8.
    pub num_retrans: u32,
    /// `request_sock.timeout`, u32, jiffies (Linux 5.17); 0: the kernel has no such field.
    pub request_timeout: u32,
    /// `tcp_sock.bpf_sock_ops_cb_flags`, u8.
    pub cb_flags: u32,
}

impl Offsets {
    /// The values in the order of [`crate::globals::OFFSETS`].
    #[must_use]
    pub const fn values(&self) -> [u32; 16] {
        [
            self.family,
            self.state,
            self.daddr,
            self.v6_daddr,
            self.cgroup,
            self.cgroup_kn,
            self.kn_id,
            self.css_parent,
            self.css_cgroup,
            self.rcv_saddr,
            self.v6_rcv_saddr,
            self.dport,
            self.num,
            self.num_retrans,
            self.request_timeout,
            self.cb_flags,
        ]
    }
}

/// Fields that the sock_ops program reads from the running kernel's structs, because its context does not have them:
/// offsets in bytes, and BTF ids; 0 if the kernel has no such field or does not let the program read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketTypes {
    /// `tcp_sock.is_mptcp`, bool.
    pub is_mptcp: u32,
    /// `tcp_sock.fastopen_req`, pointer: not null while a SYN with TCP Fast Open is to be sent.
    pub fastopen_req: u32,
    /// `sock_common.skc_net`, pointer.
    pub net: u32,
    /// `net.ipv4.sysctl_tcp_fastopen_blackhole_timeout`, u32.
    pub fastopen_blackhole_timeout: u32,
    /// `net.ipv4.sysctl_tcp_synack_retries`, u8 (Linux 5.15).
    pub synack_retries: u32,
    /// `inet_connection_sock.icsk_syn_retries`, u8.
    pub syn_retries: u32,
    /// `inet_connection_sock.icsk_accept_queue.rskq_defer_accept`, u8.
    pub defer_accept: u32,
    /// `sock_common.skc_listener` of a request, pointer. 0 if a program cannot reach the request, which requires
    /// [`kfunc`]s.
    pub listener: u32,
    /// `bpf_sock_ops_kern.sk`, pointer.
    pub context_sk: u32,
    /// `inet_connection_sock.icsk_rto`, u32, jiffies.
    pub rto: u32,
    /// `inet_connection_sock.icsk_rto_min`, u32, jiffies.
    pub rto_min: u32,
    /// `inet_connection_sock.icsk_delack_max`, u32, jiffies.
    pub delack_max: u32,
    /// `inet_connection_sock.icsk_user_timeout`, u32, milliseconds.
    pub user_timeout: u32,
    /// `inet_connection_sock.icsk_retransmits`, u8.
    pub retransmits: u32,
    /// `net.ipv4.sysctl_tcp_syn_retries`, its first byte.
    pub net_syn_retries: u32,
    /// `net.ipv4.sysctl_tcp_syn_linear_timeouts`, u8 (Linux 6.5); 0: the kernel has no such field.
    pub net_syn_linear_timeouts: u32,
    /// `net.ipv4.sysctl_tcp_rto_min_us`, u32 (Linux 6.11); 0: the kernel has no such field.
    pub net_rto_min: u32,
    /// `net.ipv4.sysctl_tcp_thin_linear_timeouts`, u8 (Linux 5.15).
    pub net_thin_linear: u32,
    /// `inet_connection_sock.icsk_rto_max`, u32, jiffies (Linux 6.15); 0: the kernel has no such field.
    pub rto_max: u32,
    /// `tcp_sock.retrans_stamp`, u32: when the first SYN was sent, milliseconds or microseconds.
    pub retrans_stamp: u32,
    /// `inet_connection_sock.icsk_retransmit_timer.expires`, 8 bytes, jiffies.
    pub timer_expires: u32,
    /// `sock.sk_txrehash`, u8 (Linux 5.18); 0: the kernel has no such field, or programs cannot set the option.
    pub txrehash: u32,
    /// `sock.sk_dst_cache`, pointer.
    pub dst_cache: u32,
    /// `dst_entry._metrics`: an address, with flags in its two lowest bits.
    pub metrics: u32,
    /// `sock.sk_max_ack_backlog`, u32.
    pub max_ack_backlog: u32,
    /// `tcp_sock.total_rto_time`, u32, milliseconds (Linux 6.7); 0: the kernel has no such field.
    pub total_rto_time: u32,
    /// BTF id of `struct inet_connection_sock`.
    pub connection_sock: u32,
    /// BTF id of `struct tcp_sock`.
    pub tcp_sock: u32,
    /// BTF id of `struct dst_metrics`, an array of u32 at its beginning.
    pub dst_metrics: u32,
}

impl SocketTypes {
    /// Whether the program can read what decides when a SYN is retransmitted.
    #[must_use]
    pub const fn has_syn_timers(&self) -> bool {
        self.user_timeout != 0
            && self.retransmits != 0
            && self.syn_retries != 0
            && self.rto != 0
            && self.net != 0
            && self.net_syn_retries != 0
            && self.retrans_stamp != 0
            && self.timer_expires != 0
    }

    /// The values in the order of [`crate::globals::SOCKET_TYPES`].
    #[must_use]
    pub const fn values(&self) -> [u32; 29] {
        [
            self.is_mptcp,
            self.fastopen_req,
            self.net,
            self.fastopen_blackhole_timeout,
            self.synack_retries,
            self.syn_retries,
            self.defer_accept,
            self.listener,
            self.context_sk,
            self.rto,
            self.rto_min,
            self.delack_max,
            self.user_timeout,
            self.retransmits,
            self.net_syn_retries,
            self.net_syn_linear_timeouts,
            self.net_rto_min,
            self.net_thin_linear,
            self.rto_max,
            self.retrans_stamp,
            self.timer_expires,
            self.txrehash,
            self.dst_cache,
            self.metrics,
            self.max_ack_backlog,
            self.total_rto_time,
            self.connection_sock,
            self.tcp_sock,
            self.dst_metrics,
        ]
    }
}

/// Kernel functions that the program calls (Documentation/bpf/kfuncs.rst, Linux 6.12). aya does not support them: each
/// call is an instruction with a number instead of the function's BTF id, which the loader replaces.
pub mod kfunc {
    /// `bpf_cast_to_kern_ctx()`, Linux 6.2: from a program's context to the kernel's.
    pub const CAST_TO_KERN_CTX: u32 = 0x7274_6f01;
    /// `bpf_rdonly_cast()`, Linux 6.2: a pointer that may be read as a type.
    pub const RDONLY_CAST: u32 = 0x7274_6f02;
    /// Opcode and registers of such a call: BPF_JMP | BPF_CALL, source BPF_PSEUDO_KFUNC_CALL, offset 0 (the
    /// kernel's own BTF).
    pub const CALL: [u8; 4] = [0x85, 0x20, 0, 0];
    /// `r0 = 0`, which replaces a call of a function that the kernel does not have.
    pub const NULL: [u8; 8] = [0xb7, 0, 0, 0, 0, 0, 0, 0];
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::{format, string::String, vec::Vec};

    use super::*;
    use crate::globals;

    /// Names, in capitals, and values of the fields as `{:?}` prints them.
    fn fields(debug: &str) -> Vec<(String, u32)> {
        let inner = debug.split_once('{').unwrap().1.trim_end_matches('}');
        let fields = inner.split(',').map(|field| {
            let (name, value) = field.split_once(':').unwrap();
            (
                name.trim().to_ascii_uppercase(),
                value.trim().parse().unwrap(),
            )
        });
        fields.collect()
    }

    /// A different number for each field.
    fn numbers<const N: usize>() -> [u32; N] {
        core::array::from_fn(|i| u32::try_from(i + 1).unwrap())
    }

    #[test]
    fn every_value_lies_where_its_name_does() {
        // SAFETY: a struct of as many `u32`, with any values.
        let offsets: Offsets = unsafe { core::mem::transmute(numbers::<16>()) };
        for (i, (name, value)) in fields(&format!("{offsets:?}")).into_iter().enumerate() {
            assert_eq!(globals::OFFSETS[i], format!("OFFSET_{name}"));
            assert_eq!(offsets.values()[i], value, "{name}");
        }
        // SAFETY: as above.
        let types: SocketTypes = unsafe { core::mem::transmute(numbers::<29>()) };
        for (i, (name, value)) in fields(&format!("{types:?}")).into_iter().enumerate() {
            let (_, of) = globals::SOCKET_TYPES[i].split_once('_').unwrap();
            assert_eq!(of, name);
            assert_eq!(types.values()[i], value, "{name}");
        }
    }
}
