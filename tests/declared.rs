//! What is declared of kernels and of the eBPF programs. The integration tests assert it, and `cargo xtask vm` puts it
//! into the table of docs/matrix.json. Both include this file, so that xtask needs no other crate of the workspace.

/// Features as `doctor` names them, and the first mainline version that has each. An older kernel is expected to lack
/// it.
pub const FEATURES: [(&str, (u32, u32)); 19] = [
    ("rto-hook", (4, 16)),
    ("bpf-syncnt", (4, 14)),
    ("btf", (5, 4)),
    ("cgroup-bpf-link", (5, 7)),
    ("sock_ops-socket-storage", (5, 10)),
    ("bpf-rto-min", (5, 10)),
    ("bpf-delack-max", (5, 10)),
    ("bpf-user-timeout", (5, 10)),
    ("iter-tcp", (5, 15)),
    ("syn-ack-retransmission-timeout", (5, 17)),
    ("bpf-lsm-cgroup", (6, 0)),
    ("bpf-thin-linear", (6, 1)),
    ("bpf-getsockopt-syncnt", (6, 1)),
    ("reads-listener", (6, 2)),
    ("tcp-syn-linear-timeouts", (6, 5)),
    ("rtt-hook-sample", (6, 10)),
    ("rto-hook-on-open-sockets", (6, 12)),
    ("bpf-getsockopt-rto-min", (6, 15)),
    ("tcp-rto-max", (6, 15)),
];

/// Instructions that the verifier may process of each program, on any kernel: less than twice the most it takes on any
/// (docs/matrix.json, which a test of xtask compares). The verifier gives up at 1,000,000; a program that reaches its
/// limit has more paths than before, and needs to be simplified.
pub const VERIFIER_LIMITS: [(&str, u32); 5] = [
    ("rto_agent", 60_000),
    ("rto_clone", 1_400),
    ("rto_walk", 18_000),
    ("rto_synack", 6_000),
    ("rto_probe", 280),
];
