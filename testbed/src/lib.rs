//! The base of experiments, integration tests and benchmarks: network namespaces joined by a link with programmable
//! losses ([`link`]), an agent that is driven from outside as a user would drive it ([`agent`]), child processes at the
//! ends of the link ([`workload`]), and captures ([`capture`]).
//!
//! Each is a guard that removes what it has created, also after a panic. None changes the host's own network.

pub mod agent;
pub mod bpf;
pub mod capture;
pub mod cgroup;
pub mod channel;
pub mod control;
pub mod emulated;
pub mod env;
pub mod facts;
pub mod foreign;
pub mod http;
pub mod json;
pub mod kernel;
pub mod leftovers;
pub mod link;
pub mod machine;
pub mod names;
pub mod netns;
pub mod notify;
pub mod process;
pub mod prometheus;
pub mod stopwatch;
pub mod tcp;
pub mod timing;
pub mod trie;
pub mod wait;
pub mod warm;
pub mod workload;
