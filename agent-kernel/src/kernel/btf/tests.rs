use super::*;

/// Encoded types, and the strings that they refer to.
struct Sample {
    strings: Vec<u8>,
    types: Vec<u32>,
    count: u32,
}

impl Sample {
    fn new() -> Self {
        Self {
            strings: vec![0],
            types: Vec::new(),
            count: 0,
        }
    }

    fn name(&mut self, name: &str) -> u32 {
        if name.is_empty() {
            return 0;
        }
        let at = u32::try_from(self.strings.len()).unwrap();
        self.strings.extend_from_slice(name.as_bytes());
        self.strings.push(0);
        at
    }

    /// Adds a type; returns its id.
    fn push(&mut self, name: &str, info: u32, rest: &[u32]) -> u32 {
        let name = self.name(name);
        self.types.extend([name, info]);
        self.types.extend(rest);
        self.count += 1;
        self.count
    }

    fn int(&mut self, bytes: u32) -> u32 {
        self.push("", KIND_INT << 24, &[bytes, bytes * 8])
    }

    fn pointer(&mut self, to: u32) -> u32 {
        self.push("", KIND_PTR << 24, &[to])
    }

    /// Adds a struct with members eight bytes apart: name, type, and bits of a bit field or 0.
    fn members(&mut self, name: &str, info: u32, members: &[(&str, u32, u32)]) -> u32 {
        let count = u32::try_from(members.len()).unwrap();
        let mut rest = vec![count * 8];
        for (index, (name, id, bits)) in (0..).zip(members) {
            rest.extend([self.name(name), *id, bits << 24 | (index * 64)]);
        }
        self.push(name, 1 << 31 | info << 24 | count, &rest)
    }

    fn structure(&mut self, name: &str, members: &[(&str, u32)]) -> u32 {
        let members: Vec<_> = members.iter().map(|(name, id)| (*name, *id, 0)).collect();
        self.members(name, KIND_STRUCT, &members)
    }

    fn bytes(&self) -> Vec<u8> {
        let types = u32::try_from(self.types.len() * 4).unwrap();
        let strings = u32::try_from(self.strings.len()).unwrap();
        let header = [0x0001_eb9f, 24, 0, types, types, strings];
        let words = header.into_iter().chain(self.types.iter().copied());
        let mut bytes: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
        bytes.extend_from_slice(&self.strings);
        bytes
    }

    fn parsed(&self) -> Btf {
        Btf::parse(self.bytes()).unwrap()
    }
}

/// `struct pair { int a; union { int b; int *p; }; u32 bits: 8; u32 odd: 7; enum { A } e; }`
fn sample() -> Sample {
    let mut sample = Sample::new();
    let int = sample.int(4);
    let pointer = sample.pointer(int);
    let either = sample.members("", KIND_UNION, &[("b", int, 0), ("p", pointer, 0)]);
    let constant = sample.push("", 10 << 24, &[either]);
    let name = sample.name("A");
    let choice = sample.push("", KIND_ENUM << 24 | 1, &[4, name, 0]);
    let members = [
        ("a", int, 0),
        ("", constant, 0),
        ("bits", int, 8),
        ("odd", int, 7),
        ("e", choice, 0),
    ];
    sample.members("pair", KIND_STRUCT, &members);
    sample
}

#[test]
fn field_is_found_also_in_an_anonymous_union() {
    let btf = sample().parsed();
    assert_eq!(btf.offset("pair", &["a"], 4).unwrap(), 0);
    assert_eq!(btf.offset("pair", &["b"], 4).unwrap(), 8);
    assert_eq!(btf.pointer("pair", &["p"]).unwrap(), 16);
    assert_eq!(btf.offset("pair", &["bits"], 1).unwrap(), 16);
    assert_eq!(btf.offset("pair", &["e"], 4).unwrap(), 32);
    for (of, field) in [("pair", "c"), ("none", "a"), ("pair", "odd")] {
        let error = btf.offset(of, &[field], 4).unwrap_err();
        assert!(matches!(error, BtfError::Missing(_)), "{error}");
        assert!(error.to_string().contains(&format!("{of}.{field}")));
    }
}

#[test]
fn field_of_another_size_or_kind_is_refused() {
    let btf = sample().parsed();
    let error = |r: Result<u32, BtfError>| match r.unwrap_err() {
        error @ BtfError::Changed(..) => error.to_string(),
        other => panic!("{other}"),
    };
    let wider = error(btf.offset("pair", &["a"], 2));
    assert!(
        wider.contains("pair.a") && wider.contains("4 bytes instead of 2"),
        "{wider}"
    );
    assert!(error(btf.offset("pair", &["bits"], 4)).contains("1 bytes instead of 4"));
    assert!(error(btf.offset("pair", &["p"], 8)).contains("no number"));
    assert!(error(btf.pointer("pair", &["b"])).contains("pair.b"));
}

/// BTF with all fields that programs read, and the functions that they call. The member named
/// `changed` has a different size.
fn kernel(changed: &str) -> Btf {
    let mut sample = Sample::new();
    let [u8, u16, u32, u64] = [1, 2, 4, 8].map(|bytes| sample.int(bytes));
    let v6 = sample.structure("in6_addr", &[("a", u64), ("b", u64)]);
    let pointer = sample.pointer(u8);
    let namespace = sample.structure("possible_net_t", &[("net", pointer)]);
    let css = [("parent", pointer), ("cgroup", pointer)];
    let css = sample.structure("cgroup_subsys_state", &css);
    let data = sample.structure("sock_cgroup_data", &[("cgroup", pointer)]);
    let queue = [("rskq_defer_accept", u8)];
    let queue = sample.structure("request_sock_queue", &queue);
    let ipv4 = [
        ("sysctl_tcp_fastopen_blackhole_timeout", u32),
        ("sysctl_tcp_synack_retries", u8),
    ];
    let other = |members: &[(&'static str, u32)]| -> Vec<(&'static str, u32)> {
        let size = |name, id| match (name == changed, id == u64) {
            (true, true) => u32,
            (true, false) => u64,
            (false, _) => id,
        };
        members
            .iter()
            .map(|(name, id)| (*name, size(*name, *id)))
            .collect()
    };
    let ipv4 = sample.structure("netns_ipv4", &other(&ipv4));
    for (name, members) in [
        (
            "sock_common",
            &[
                ("skc_family", u16),
                ("skc_state", u8),
                ("skc_daddr", u32),
                ("skc_v6_daddr", v6),
                ("skc_rcv_saddr", u32),
                ("skc_v6_rcv_saddr", v6),
                ("skc_dport", u16),
                ("skc_num", u16),
                ("skc_net", namespace),
                ("skc_listener", pointer),
            ][..],
        ),
        ("sock", &[("sk_cgrp_data", data)]),
        ("cgroup", &[("kn", pointer), ("self", css)]),
        ("kernfs_node", &[("id", u64)]),
        ("request_sock", &[("num_retrans", u8), ("timeout", u32)]),
        (
            "tcp_sock",
            &[
                ("pad", u64),
                ("bpf_sock_ops_cb_flags", u8),
                ("is_mptcp", u8),
                ("fastopen_req", pointer),
            ],
        ),
        ("net", &[("pad", u64), ("ipv4", ipv4)]),
        (
            "inet_connection_sock",
            &[
                ("pad", u64),
                ("icsk_syn_retries", u8),
                ("icsk_accept_queue", queue),
                ("icsk_rto", u32),
                ("icsk_rto_min", u32),
                ("icsk_delack_max", u32),
            ],
        ),
        ("bpf_sock_ops_kern", &[("sk", pointer)]),
    ] {
        sample.structure(name, &other(members));
    }
    for function in ["bpf_cast_to_kern_ctx", "bpf_rdonly_cast"] {
        sample.push(function, KIND_FUNC << 24, &[0]);
    }
    sample.parsed()
}

#[test]
fn changed_member_turns_off_only_what_reads_it() {
    let whole = kernel("");
    let (types, offsets) = (whole.socket_types(), whole.request_offsets().unwrap());
    assert_ne!(types.listener, 0);
    assert_ne!(offsets.request_timeout, 0);
    type Off = fn(&mut SocketTypes);
    let changes: [(&str, bool, Off); 9] = [
        ("is_mptcp", true, |types| types.is_mptcp = 0),
        ("icsk_rto", true, |types| types.rto = 0),
        ("icsk_rto_min", true, |types| types.rto_min = 0),
        ("icsk_delack_max", true, |types| types.delack_max = 0),
        ("icsk_syn_retries", false, |types| types.syn_retries = 0),
        ("skc_listener", false, |_| {}),
        ("sk", false, |_| {}),
        ("skc_net", false, |types| {
            types.net = 0;
            types.fastopen_blackhole_timeout = 0;
        }),
        ("sysctl_tcp_synack_retries", false, |types| {
            types.synack_retries = 0;
        }),
    ];
    for (changed, has_listener, off) in changes {
        let mut expected = types;
        off(&mut expected);
        if !has_listener {
            (expected.listener, expected.context_sk) = (0, 0);
        }
        assert_eq!(kernel(changed).socket_types(), expected, "{changed}");
        assert_eq!(
            kernel(changed).request_offsets().unwrap(),
            offsets,
            "{changed}"
        );
    }
}

#[test]
fn changed_request_turns_off_only_the_tracepoint() {
    for changed in ["num_retrans", "timeout", "skc_rcv_saddr"] {
        let btf = kernel(changed);
        assert!(btf.offsets().is_ok(), "{changed}");
        let error = btf.request_offsets().unwrap_err().to_string();
        assert!(error.contains(changed), "{error}");
    }
    for changed in ["skc_state", "id", "bpf_sock_ops_cb_flags", "sk_cgrp_data"] {
        let btf = kernel(changed);
        assert!(btf.offsets().is_err(), "{changed}");
        assert_eq!(btf.socket_types(), kernel("").socket_types(), "{changed}");
    }
}

#[test]
fn truncated_btf_is_refused_without_a_panic() {
    let whole = sample().bytes();
    assert!(Btf::parse(Vec::new()).is_err());
    for length in 0..whole.len() - 16 {
        // Truncated BTF must not cause a panic.
        let _ = Btf::parse(whole[..length].to_vec());
    }
}

#[test]
fn running_kernel_has_the_members() {
    let Ok(btf) = Btf::vmlinux() else {
        return;
    };
    let offsets = btf.request_offsets().unwrap();
    assert!(offsets.v6_daddr > offsets.daddr);
    assert_ne!(offsets.cgroup, 0);
    let types = btf.socket_types();
    for of_every_kernel in [types.rto, types.rto_min, types.fastopen_req] {
        assert_ne!(of_every_kernel, 0, "{types:?}");
    }
}
