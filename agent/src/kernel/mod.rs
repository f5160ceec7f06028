//! What this kernel is: HZ, cgroup2 mount, features, other programs. No aya here.

pub mod bpf;
pub mod btf;
pub mod cgroup;
pub mod descriptors;
pub mod facts;
pub mod features;
pub mod hz;
mod interface;
pub mod interference;
pub mod kfuncs;
pub mod link;
pub mod listeners;
pub mod lpm_batch;
pub mod memory_limit;
pub mod mounts;
mod netlink;
pub mod netns;
pub mod pinned;
pub mod preflight;
pub mod privileges;
pub mod programs;
pub mod routes;
pub mod sock_diag;
pub mod sysctl;
pub mod tcp_metrics;
mod tcp_option;
pub mod version;
