//! Facts about the running kernel: HZ, cgroup2 mount, features, other programs. Does not use aya.

pub mod bpf;
pub mod btf;
pub mod calls;
pub mod cgroup;
pub mod clock;
pub mod descriptors;
pub mod facts;
pub mod features;
pub mod hz;
pub mod interface;
pub mod interference;
pub mod kfuncs;
pub mod link;
pub mod lpm_batch;
pub mod memory_limit;
pub mod mounts;
pub mod netlink;
pub mod netns;
pub mod pinned;
pub mod preflight;
pub mod privileges;
pub mod programs;
pub mod sysctl;
pub mod tcp_metrics;
pub mod tcp_option;
pub mod version;
