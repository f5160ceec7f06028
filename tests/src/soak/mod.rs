//! A soak test: an agent in one machine, connections between it and a second machine, and disturbances in random order.
//!
//! The agent's machine runs the disturbances, checks the kernel five times a second, and after each round of
//! disturbances compares the agent's counters with the counts of the clients in both machines. It prints events as
//! lines of JSON (`event.rs`), from which `cargo xtask soak` makes a report.

mod config;
mod counters;
mod disturbance;
mod event;
mod look;
mod network;
mod peer;
mod rounds;

use std::process::ExitCode;

use anyhow::Context as _;
use serde::Deserialize;

/// The role of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Role {
    /// The machine with the agent.
    Host {
        /// Duration of the disturbances.
        seconds: u64,
        /// Seed of their order.
        seed: u64,
    },
    /// The machine at the other end of the connections; it ends when the host closes the control connection.
    Peer,
}

/// The main function of a program whose only argument is a role.
pub fn main(arguments: impl IntoIterator<Item = String>) -> ExitCode {
    let arguments: Vec<String> = arguments.into_iter().collect();
    let role = match &arguments[..] {
        [role] => serde_json::from_str::<Role>(role).context("not a role"),
        _ => Err(anyhow::anyhow!("one argument is taken: a role as JSON")),
    };
    let done = role.and_then(|role| match role {
        Role::Host { seconds, seed } => rounds::run(seconds, seed),
        Role::Peer => peer::run(),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rto-soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_round_trip_as_json() {
        let role = serde_json::from_str::<Role>(r#"{"host":{"seconds":600,"seed":7}}"#).unwrap();
        let expected = Role::Host {
            seconds: 600,
            seed: 7,
        };
        assert_eq!(role, expected);
        assert_eq!(
            serde_json::from_str::<Role>(r#""peer""#).unwrap(),
            Role::Peer
        );
        assert!(serde_json::from_str::<Role>(r#"{"host":{"seconds":600}}"#).is_err());
    }
}
