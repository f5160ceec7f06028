//! Both ends of a request/response connection.

use std::{
    io::{self, BufRead as _, Write as _},
    net::{SocketAddr, TcpListener},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::Args;

use super::socket_address;
use crate::rr::{Client, Options, Sizes, serve};

/// A server.
#[derive(Debug, Args)]
pub struct Answer {
    #[arg(long, value_parser = socket_address)]
    on: SocketAddr,
    #[arg(long)]
    thin_linear: Option<bool>,
}

/// A client.
#[derive(Debug, Args)]
pub struct Ask {
    #[arg(long, value_parser = socket_address)]
    to: SocketAddr,
    #[arg(long)]
    thin_linear: Option<bool>,
}

#[expect(clippy::print_stdout, reason = "its parent reads it")]
pub(super) fn answer(args: &Answer) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.on).with_context(|| args.on.to_string())?;
    println!("listening");
    io::stdout().flush()?;
    let options = Options {
        thin_linear: args.thin_linear,
    };
    Ok(serve(&listener, options)?)
}

/// Transactions after the longest idle time: it is over.
const AFTER: u32 = 10;

/// Orders: `connect N` (a new connection, and `N` transactions; says its port), `go MICROS` (transactions until
/// some time after one was longer than that; says the longest time between two responses, microseconds).
#[expect(clippy::print_stdout, reason = "its parent reads it")]
pub(super) fn ask(args: &Ask) -> anyhow::Result<()> {
    let options = Options {
        thin_linear: args.thin_linear,
    };
    let mut client = None;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let (order, number) = line.split_once(' ').unwrap_or((&line, "0"));
        let number: u32 = number.parse().with_context(|| line.clone())?;
        let said: u128 = match order {
            "connect" => {
                let fresh = client.insert(Client::connect(args.to, Sizes::SMALL, options)?);
                for _ in 0..number {
                    fresh.transact()?;
                }
                fresh.stream().local_addr()?.port().into()
            }
            "go" => {
                let client = client.as_mut().context("not connected")?;
                idle(client, Duration::from_micros(number.into()))?.as_micros()
            }
            _ => bail!("{line}: connect or go"),
        };
        println!("{said}");
        io::stdout().flush()?;
    }
    Ok(())
}

/// The longest time from one response to the next, which is known once one was at least this long and some
/// more transactions have come after it.
fn idle(client: &mut Client, at_least: Duration) -> io::Result<Duration> {
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
