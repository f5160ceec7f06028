//! The traffic over a link in a run. [`crate::protocol`] implements both ends; flows are implemented by the testbed.

use std::{net::SocketAddr, time::Duration};

use anyhow::ensure;
use rto_testbed::{
    channel::ControlChannel,
    link::{packet::Packet, relay::Relayed, rule::PacketFilter},
    tcp::TcpInfo,
    workload::{Role, flow, rr::Options},
};
use serde::{Deserialize, Serialize};

use crate::{
    program::{self, Program},
    protocol::{self, Object, Seen, To, Until},
    summary::{f, millis, ms},
    topology::{ClientEnd, Topology},
};

/// The kind of traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// HTTP/1.1: GET and a response of three segments, each over a new connection
    #[default]
    HttpNew,
    /// The same, and the server closes each connection after its response, so that a FIN follows the last data
    HttpClosed,
    /// The same by curl, a process for each transfer
    Curl,
    /// The same as [`Workload::HttpNew`], sequentially over one connection
    HttpKept,
    /// The same over one connection, pipelined: the next request is sent before the last one is answered
    HttpPipelined,
    /// HTTP/2 over one connection, four requests at a time
    Http2,
    /// One bidirectional stream of HTTP/2, with a message of 100 bytes every 10 ms and its echo
    Grpc,
    /// New connections: TLS 1.3 handshake, 1 byte out, 1 byte back
    Tls,
    /// New connections, like a load balancer's health checks: 1 byte out, 2 bytes back, close
    HealthCheck,
    /// Request of one byte and response of two over one connection, as TCP sees it at both ends
    RequestResponse,
    /// A flow of `segments` full segments over each of `count` parallel connections, after `skip` small transactions on
    /// each; without any, the time begins with connect()
    Flows,
    /// `count` flows of 8 to 12 segments, in turn over ten connections
    FlowsInTurn,
    /// A real server and load generator, which makes `count` requests at its own times
    Program(Program),
    /// `count` web pages; the times are the objects'
    Page(Page),
}

/// A web page, whose objects are loaded over six connections at a time, as browsers do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Page {
    /// Number of objects.
    pub objects: u32,
    /// Bytes of each.
    pub bytes: u32,
    /// How it is loaded.
    pub by: Loader,
}

/// What loads a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loader {
    /// The lab, over new connections.
    New,
    /// The lab, over connections that the page before it has left.
    Kept,
    /// Chromium, over new connections.
    BrowserNew,
    /// Chromium, over connections that the page before it has left.
    BrowserKept,
}

/// Bytes of a full segment with an MTU of 1500 and timestamps.
const MSS: u32 = 1448;
/// Connections of [`Workload::FlowsInTurn`].
const CONNECTIONS: u32 = 10;
/// Least interval between the starts of flows that would otherwise start at the same time, so that they do not wait for the
/// CPU.
const STAGGER: Duration = Duration::from_millis(3);

/// The amount of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Transactions before the measured ones.
    pub skip: u32,
    /// Transactions that are measured.
    pub count: u32,
    /// Pause after each transaction.
    pub pause: Duration,
    /// Bytes of a request of [`Workload::RequestResponse`].
    pub request: u32,
    /// Connections of it at the same time.
    pub connections: u32,
    /// Segments of a flow of [`Workload::Flows`].
    pub segments: u32,
}

/// The server of a workload; it ends when dropped.
pub enum Server {
    /// A child process of the lab.
    Role(ControlChannel),
    /// A real program.
    Program(program::Server),
}

/// Measures of a run and their values as measured; they include "time" (milliseconds).
pub type Values = Vec<(&'static str, Vec<f64>)>;

impl Workload {
    /// Whether this is flows, which count connections and have no pauses between requests.
    pub const fn has_flows(self) -> bool {
        matches!(self, Self::Flows | Self::FlowsInTurn)
    }

    /// Whether it sends at its own times, so that a pause does not apply.
    pub const fn has_own_pace(self) -> bool {
        matches!(
            self,
            Self::HttpPipelined | Self::Grpc | Self::Program(_) | Self::Page(_)
        )
    }

    /// The real program, if it is one.
    #[must_use]
    pub const fn program(self) -> Option<Program> {
        match self {
            Self::Program(program) => Some(program),
            _ => None,
        }
    }

    /// Interval between messages, if it does not depend on the previous answer.
    pub const fn interval(self) -> Duration {
        match self {
            Self::Grpc => protocol::INTERVAL,
            _ => Duration::ZERO,
        }
    }

    /// The names of its measures.
    pub const fn measures(self) -> &'static [&'static str] {
        match self {
            Self::RequestResponse => &[
                "time",
                "smoothed RTT at the client",
                "smoothed RTT at the server",
                "RTO at the server",
                "sent again",
                "responses",
            ],
            Self::Flows | Self::FlowsInTurn => &["time"],
            Self::Page(_) => &["time", "page time", "time of tails", "timed out"],
            _ => &["time", "timed out", "requests"],
        }
    }

    /// Starts the server; returns its certificate.
    pub fn serve(self, topology: &Topology, options: Options) -> anyhow::Result<(Server, Vec<u8>)> {
        let on = topology.server_address();
        let (server, certificate) = match self {
            Self::Program(program) => {
                return Ok((Server::Program(program.serve(topology)?), Vec::new()));
            }
            Self::Flows | Self::FlowsInTurn => {
                (topology.serve(&Role::FlowServer { on })?, Vec::new())
            }
            _ => topology.server(&protocol::Role::WorkloadServer {
                on: on.ip(),
                options,
            })?,
        };
        Ok((Server::Role(server), certificate))
    }

    /// Starts the client; if connections persist, it has already made the skipped transactions.
    pub fn connect(
        self,
        end: &ClientEnd,
        to: SocketAddr,
        certificate: &[u8],
        (work, options): (Work, Options),
    ) -> anyhow::Result<ControlChannel> {
        if self.has_flows() {
            let mut client = end.start(&Role::FlowClient { to })?;
            client.recv::<()>()?;
            let connections = match self {
                Self::Flows if work.skip == 0 => return Ok(client),
                Self::Flows => work.count,
                _ => CONNECTIONS,
            };
            let _ports: Vec<u16> = client.request(&flow::Command::Connect(connections as usize))?;
            return Ok(client);
        }
        let mut client = end.start(&protocol::Role::WorkloadClient(To {
            workload: self,
            to: to.ip(),
            certificate: certificate.to_vec(),
            work,
            options,
        }))?;
        client.recv::<()>()?;
        Ok(client)
    }

    /// Starts the measurement of a client; with an outage it lasts until a transaction took at least this long, plus
    /// `count` more.
    pub fn begin(
        self,
        client: &mut ControlChannel,
        work: Work,
        at_least: Option<Duration>,
    ) -> anyhow::Result<()> {
        let flows = |from: u32, to: u32, flows| flow::Work {
            warm: work.skip,
            bytes: (from * MSS, to * MSS, MSS),
            flows,
            pause: work.pause,
            stagger: STAGGER.max(work.pause),
        };
        let all = flows(work.segments, work.segments, 1);
        match self {
            Self::Flows if work.skip == 0 => {
                client.send(&flow::Command::RunNew(all, work.count as usize))
            }
            Self::Flows => client.send(&flow::Command::Run(all)),
            Self::FlowsInTurn => client.send(&flow::Command::Run(flows(8, 12, work.count))),
            _ => client.send(&match at_least {
                None => Until::Count(work.count),
                Some(at_least) => Until::Longer {
                    at_least,
                    after: work.count,
                },
            }),
        }
    }

    /// The results, when the client has replied.
    pub fn end(
        self,
        client: &mut ControlChannel,
        server: &mut Server,
        work: Work,
        log: &[Relayed],
    ) -> anyhow::Result<Values> {
        if self.has_flows() {
            let took: Vec<Duration> = client.recv()?;
            return Ok(vec![("time", took.into_iter().map(millis).collect())]);
        }
        let seen: Seen = client.recv()?;
        let mut values = vec![("time", seen.us.iter().map(|us| ms(*us)).collect())];
        values.push(("timed out", vec![f64::from(seen.timed_out)]));
        if let Self::Page(_) = self {
            let times = |all: &[Object]| all.iter().map(|one| ms(one.us)).collect();
            let mut tails = seen.objects.clone();
            tails.retain(|object| lost_tail(log, object));
            values.push(("time of tails", times(&tails)));
            values[0].0 = "page time";
            values.push(("time", times(&seen.objects)));
        }
        let (Some((port, at_client)), Server::Role(server)) = (seen.tcp, server) else {
            values.push(("requests", vec![f(seen.us.len() as u64)]));
            return Ok(values);
        };
        let at_server: Vec<TcpInfo> = server.request(&port)?;
        ensure!(
            at_server.len() > work.skip as usize,
            "no transactions to measure"
        );
        let of = |infos: &[TcpInfo], time: fn(&TcpInfo) -> u32| {
            infos.iter().map(|info| ms(time(info))).collect()
        };
        let measured = &at_server[work.skip as usize..];
        let again = at_server.last().map_or(0, |info| info.total_retrans);
        values.extend([
            (
                "smoothed RTT at the client",
                of(&at_client, |info| info.srtt_us),
            ),
            (
                "smoothed RTT at the server",
                of(measured, |info| info.srtt_us),
            ),
            ("RTO at the server", of(measured, |info| info.rto_us)),
            ("sent again", vec![f64::from(again)]),
            ("responses", vec![f(at_server.len() as u64)]),
        ]);
        Ok(values)
    }

    /// The share of a small machine that it needs, so that it hardly disturbs simultaneous runs; each transaction is
    /// under way for this time.
    pub fn load(self, work: Work, under_way: Duration) -> f64 {
        match self {
            Self::HttpNew | Self::HttpClosed | Self::Flows => 0.03,
            Self::Page(page) => match page.by {
                Loader::New | Loader::Kept => 0.1,
                Loader::BrowserNew | Loader::BrowserKept => 0.5,
            },
            Self::Program(_) => 0.07,
            Self::HttpKept | Self::HttpPipelined | Self::FlowsInTurn => 0.08,
            Self::Http2 | Self::Grpc | Self::Tls | Self::HealthCheck | Self::Curl => 0.1,
            Self::RequestResponse if !under_way.is_zero() => 0.1,
            // 400 transactions per second, each of which takes 0.4 ms.
            Self::RequestResponse => {
                f64::from(work.connections) / ((work.pause.as_secs_f64() + 4e-4) * 400.0)
            }
        }
    }
}

/// Whether one of the last four segments of an object was retransmitted.
fn lost_tail(log: &[Relayed], object: &Object) -> bool {
    let packets = log.iter().filter_map(|one| one.packet.as_ref());
    let of_it = |packet: &&Packet| {
        packet.repeated
            && PacketFilter::SERVER_DATA
                .of_client(object.port)
                .matches(packet)
    };
    packets
        .filter(of_it)
        .filter_map(|packet| packet.offset)
        .any(|from| (object.end.saturating_sub(u64::from(4 * MSS))..object.end).contains(&from))
}

#[cfg(test)]
mod tests {
    use rto_testbed::link::packet::{Direction, Kind};

    use super::*;

    #[test]
    fn tail_of_an_object_is_its_last_four_segments() {
        let relayed = |client_port, offset, repeated| Relayed {
            at: std::time::Instant::now(),
            time: Duration::ZERO,
            packet: Some(Packet {
                direction: Direction::ToClient,
                kind: Kind::Data,
                client_port,
                server_port: 80,
                seq: 0,
                ack: None,
                payload: MSS,
                offset: Some(offset),
                repeated,
            }),
            bytes: 1500,
            leaves: None,
        };
        let object = Object {
            us: 1,
            port: 7,
            end: 10 * u64::from(MSS),
        };
        for (port, segment, repeated, is_lost) in [
            (7, 6, true, true),
            (7, 9, true, true),
            (7, 9, false, false),
            (8, 9, true, false),
            (7, 5, true, false),
            (7, 10, true, false),
        ] {
            let log = [relayed(port, segment * u64::from(MSS), repeated)];
            assert_eq!(
                lost_tail(&log, &object),
                is_lost,
                "{port} {segment} {repeated}"
            );
        }
    }
}
