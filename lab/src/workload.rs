//! What talks over a link in a run. A new kind of traffic is a variant here, and whatever it is made of stays in
//! `rto_testbed::workload`.

use std::{net::SocketAddr, time::Duration};

use anyhow::ensure;
use rto_testbed::{
    channel::ControlChannel,
    tcp::TcpInfo,
    workload::{
        Role, flow,
        http::{self, Took},
        rtt,
    },
};
use serde::{Deserialize, Serialize};

/// Which traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// HTTP/1.1 requests, each over a connection of its own
    #[default]
    HttpNew,
    /// One after the other over one connection
    HttpKept,
    /// Over one connection, the next one sent before the last one is answered
    HttpPipelined,
    /// Request and response of a byte and two over one connection, seen by TCP at both ends
    RequestResponse,
    /// A flow of ten full segments over each of `count` connections at once, which had `skip` small transactions each
    Flows,
    /// `count` flows of 8 to 12 segments in turn over each of ten connections
    FlowsInTurn,
}

/// Bytes of a full segment, where the MTU is 1500 and timestamps are on.
const MSS: u32 = 1448;
/// Connections of [`Workload::FlowsInTurn`].
const CONNECTIONS: u32 = 10;
/// Between flows that begin at the same time otherwise: they do not wait for the processor.
const STAGGER: Duration = Duration::from_millis(3);

/// How much of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Transactions before those that are measured.
    pub skip: u32,
    /// Transactions that are measured.
    pub count: u32,
    /// After each.
    pub pause: Duration,
}

/// Measures of a run, and their values as they were measured; "time" (milliseconds) is among them.
pub type Values = Vec<(&'static str, Vec<f64>)>;

impl Workload {
    /// What it measures.
    #[must_use]
    pub const fn measures(self) -> &'static [&'static str] {
        match self {
            Self::HttpNew | Self::HttpKept | Self::HttpPipelined => &["time", "timed out"],
            Self::RequestResponse => &[
                "time",
                "smoothed RTT at the client",
                "smoothed RTT at the server",
                "RTO at the server",
                "sent again",
                "responses",
            ],
            Self::Flows | Self::FlowsInTurn => &["time"],
        }
    }

    /// What listens.
    #[must_use]
    pub const fn server(self, on: SocketAddr) -> Role {
        match self {
            Self::HttpNew | Self::HttpKept | Self::HttpPipelined => Role::HttpServer { on },
            Self::RequestResponse => Role::RttServer { on },
            Self::Flows | Self::FlowsInTurn => Role::FlowServer { on },
        }
    }

    /// What connects.
    #[must_use]
    pub fn client(self, to: SocketAddr, work: Work) -> Role {
        match self {
            Self::HttpNew | Self::HttpKept | Self::HttpPipelined => Role::HttpClient { to },
            Self::Flows | Self::FlowsInTurn => Role::FlowClient { to },
            Self::RequestResponse => Role::RttClient(rtt::Client {
                to,
                pause: work.pause,
                count: (work.skip + work.count) as usize,
            }),
        }
    }

    /// Has a client that was just started begin.
    pub fn begin(self, client: &mut ControlChannel, work: Work) -> anyhow::Result<()> {
        let count = work.skip + work.count;
        if self != Self::RequestResponse {
            client.recv::<()>()?;
        }
        let command = match self {
            // It begins by itself.
            Self::RequestResponse => return Ok(()),
            Self::HttpNew => http::Command::NewConnections {
                count,
                pause: work.pause,
            },
            Self::HttpKept => http::Command::KeepAlive(count),
            Self::HttpPipelined => http::Command::Pipelined(count),
            Self::Flows => return flows(client, work.count, (10, 10), 1, work),
            Self::FlowsInTurn => return flows(client, CONNECTIONS, (8, 12), work.count, work),
        };
        client.send(&command)
    }

    /// What came of it, when the client has a reply.
    pub fn end(
        self,
        client: &mut ControlChannel,
        server: &mut ControlChannel,
        work: Work,
    ) -> anyhow::Result<Values> {
        let skip = work.skip as usize;
        if matches!(self, Self::Flows | Self::FlowsInTurn) {
            let took: Vec<Duration> = client.recv()?;
            let ms = took.iter().map(|took| took.as_secs_f64() * 1e3);
            return Ok(vec![("time", ms.collect())]);
        }
        if self != Self::RequestResponse {
            let took: Vec<Took> = client.recv()?;
            let took = took.get(skip..).unwrap_or_default();
            let timed_out = took.iter().filter(|took| took.timed_out).count();
            return Ok(vec![
                ("time", took.iter().map(|took| ms(took.us)).collect()),
                ("timed out", vec![f(timed_out)]),
            ]);
        }
        let seen: rtt::Seen = client.recv()?;
        let infos: Vec<TcpInfo> = server.request(&seen.port)?;
        ensure!(infos.len() > skip, "no transactions to measure");
        let of = |infos: &[TcpInfo], time: fn(&TcpInfo) -> u32| {
            infos[skip..].iter().map(|info| ms(time(info))).collect()
        };
        let again = infos.last().map_or(0, |info| info.total_retrans);
        Ok(vec![
            (
                "time",
                seen.latencies_us[skip..].iter().map(|us| ms(*us)).collect(),
            ),
            (
                "smoothed RTT at the client",
                of(&seen.infos, |info| info.srtt_us),
            ),
            (
                "smoothed RTT at the server",
                of(&infos, |info| info.srtt_us),
            ),
            ("RTO at the server", of(&infos, |info| info.rto_us)),
            ("sent again", vec![f64::from(again)]),
            ("responses", vec![f(infos.len())]),
        ])
    }

    /// Which share of a small machine it takes, so that what runs beside it is disturbed little.
    #[must_use]
    pub fn load(self, work: Work) -> f64 {
        match self {
            Self::HttpNew | Self::Flows => 0.03,
            Self::HttpKept | Self::HttpPipelined | Self::FlowsInTurn => 0.1,
            // 400 transactions a second, each of which takes 0.4 ms.
            Self::RequestResponse => 1.0 / ((work.pause.as_secs_f64() + 4e-4) * 400.0),
        }
    }
}

fn flows(
    client: &mut ControlChannel,
    connections: u32,
    segments: (u32, u32),
    flows: u32,
    work: Work,
) -> anyhow::Result<()> {
    let _ports: Vec<u16> = client.request(&flow::Command::Connect(connections as usize))?;
    client.send(&flow::Command::Run(flow::Work {
        warm: work.skip,
        bytes: (segments.0 * MSS, segments.1 * MSS, MSS),
        flows,
        pause: work.pause,
        stagger: STAGGER,
    }))
}

#[expect(clippy::cast_precision_loss, reason = "seconds")]
fn ms(us: impl Into<u64>) -> f64 {
    us.into() as f64 / 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "some thousand")]
fn f(count: usize) -> f64 {
    count as f64
}
