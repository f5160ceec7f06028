//! The command line of rto-agent: the library behind the `rto-agent` binary. `rto-agent run` calls
//! [`rto_agent_daemon`]; other verbs talk to the daemon, or read files and the kernel.

pub mod cli;
pub mod client;
pub mod commands;
pub mod completion;
pub mod doctor;
#[cfg(test)]
mod reference;
