//! What this kernel is: HZ, cgroup2 mount, features, other programs. No aya here.

pub mod bpf;
pub mod cgroup;
pub mod facts;
pub mod features;
pub mod hz;
pub mod mounts;
pub mod preflight;
pub mod privileges;
pub mod programs;
pub mod routes;
pub mod sysctl;
pub mod version;
