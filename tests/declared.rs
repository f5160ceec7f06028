//! What is declared about kernels and eBPF programs. The integration tests assert it, and `cargo xtask vm` copies it
//! into the table of docs/matrix.json. Both include this file, so that xtask depends on no other crate of the
//! workspace.

/// Features by their `doctor` id, and the first mainline version that has each. Older kernels are expected to lack it.
pub const FEATURES: [(&str, (u32, u32)); 18] = [
    ("rto-hook", (4, 16)),
    ("bpf-syncnt", (4, 14)),
    ("btf", (5, 4)),
    ("cgroup-bpf-link", (5, 7)),
    ("sock_ops-socket-storage", (5, 10)),
    ("bpf-rto-min", (5, 10)),
    ("bpf-delack-max", (5, 10)),
    ("bpf-user-timeout", (5, 10)),
    ("syn-schedule", (5, 10)),
    ("iter-tcp", (5, 15)),
    ("syn-ack-retransmission-timeout", (5, 17)),
    ("bpf-lsm-cgroup", (6, 0)),
    ("bpf-thin-linear", (6, 1)),
    ("reads-listener", (6, 2)),
    ("tcp-syn-linear-timeouts", (6, 5)),
    ("rto-hook-on-open-sockets", (6, 12)),
    ("bpf-getsockopt-rto-min", (6, 15)),
    ("tcp-rto-max", (6, 15)),
];

/// Most instructions that the verifier may process for each program, on any kernel: less than twice the largest number
/// measured (docs/matrix.json; a test of xtask compares them). The verifier gives up at 1,000,000. A program that
/// reaches its limit has more paths than before and must be simplified.
pub const VERIFIER_LIMITS: [(&str, u32); 5] = [
    ("rto_agent", 90_000),
    ("rto_clone", 1_400),
    ("rto_walk", 20_000),
    ("rto_synack", 6_000),
    ("rto_probe", 340),
];
