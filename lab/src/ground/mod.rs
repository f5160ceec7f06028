//! What experiments and integration tests stand on: namespaces, cgroups, child processes and an agent of one's
//! own, each as a guard that removes what it made, also on panic. Nothing touches the host's own network.

pub mod agent;
pub mod cgroup;
pub mod names;
pub mod netns;
pub mod notify;
pub mod process;

/// Removes namespaces, cgroups and pins that a killed run left behind.
pub fn sweep() {
    netns::sweep();
    cgroup::sweep();
    agent::sweep();
}
