//! A request/response client that finds the longest time between two responses.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    rr::{Client, Options, Sizes},
    stdio::{commands, reply},
};

/// Transactions after the longest idle time: it is over.
const AFTER: u32 = 10;

/// What the client is told.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// A new connection, and so many transactions; says its port (`u16`).
    Connect {
        /// How many.
        transactions: u32,
    },
    /// Transactions until some time after one was longer than this; says the longest time between two responses
    /// (`Duration`).
    Idle {
        /// How long at least.
        at_least: Duration,
    },
}

pub(super) fn run(to: SocketAddr, options: Options) -> anyhow::Result<()> {
    reply(&())?;
    let mut client = None;
    commands(|command| -> anyhow::Result<Value> {
        match command {
            Command::Connect { transactions } => {
                let fresh = client.insert(Client::connect(to, Sizes::SMALL, options)?);
                for _ in 0..transactions {
                    fresh.transact()?;
                }
                Ok(json!(fresh.stream().local_addr()?.port()))
            }
            Command::Idle { at_least } => {
                let client = client.as_mut().context("not connected")?;
                Ok(json!(longest(client, at_least)?))
            }
        }
    })
}

/// The longest time from one response to the next, which is known once one was at least this long and some
/// more transactions have come after it.
fn longest(client: &mut Client, at_least: Duration) -> io::Result<Duration> {
    let mut longest = Duration::ZERO;
    let mut after = 0;
    let mut last = Instant::now();
    while after < AFTER {
        client.transact()?;
        let now = Instant::now();
        longest = longest.max(now - last);
        last = now;
        after += u32::from(longest >= at_least);
    }
    Ok(longest)
}
