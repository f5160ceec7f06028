//! Harness of the integration tests: namespaces, cgroups, captures, agents, each as a guard that
//! removes what it made, also on panic.

pub mod agent;
pub mod bpf;
pub mod capture;
pub mod control;
#[path = "../declared.rs"]
mod declared;
pub mod emulated;
pub mod features;
pub mod foreign;
pub mod held;
pub mod http;
pub mod kernel;
pub mod lab;
pub mod load;
pub mod prober;
pub mod pty;
pub mod rate;
pub mod relay;
pub mod stopwatch;
pub mod talk;
pub mod timing;
pub mod traffic;
pub mod trie;
pub mod verifier;
pub mod watcher;

pub use rto_lab::ground::{cgroup, names, netns, process};
pub use rto_lab::machine;
