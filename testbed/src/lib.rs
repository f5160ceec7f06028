//! What experiments, integration tests and benchmarks run on: network namespaces with a link that loses what it is
//! told to lose ([`link`]), an agent driven from outside as a user would ([`agent`]), child processes at the link's
//! ends ([`workload`]), and captures ([`capture`]).
//!
//! Each of them is a guard that removes what it made, also on panic. Nothing touches the host's own network.

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
