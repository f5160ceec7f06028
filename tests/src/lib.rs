//! Harness of the integration tests: namespaces, cgroups, captures, agents, each as a guard that
//! removes what it made, also on panic.

pub mod agent;
pub mod capture;
pub mod cgroup;
pub mod foreign;
pub mod http;
pub mod names;
pub mod netns;
pub mod notify;
pub mod process;
pub mod pty;
pub mod rate;
pub mod relay;
pub mod talk;
pub mod timing;
pub mod traffic;
pub mod watcher;
