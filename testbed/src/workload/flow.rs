//! Both ends of flows of known length, over warm connections.
//!
//! A request is the length of the response, as four bytes; the response is sent with one write.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::stdio::{commands, reply};

/// Longest response.
const LONGEST: usize = 1 << 20;

pub(super) fn serve_connection(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let bytes = vec![b'.'; LONGEST];
    loop {
        let mut wanted = [0; 4];
        stream.read_exact(&mut wanted)?;
        let wanted = u32::from_be_bytes(wanted) as usize;
        stream.write_all(&bytes[..wanted.min(LONGEST)])?;
    }
}

/// A command to the client.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Opens this many connections instead of the current ones; replies with their ports (`Vec<u16>`).
    Connect(usize),
    /// Runs flows over all connections at once; replies with their durations, ordered by connection (`Vec<Duration>`).
    Run(Work),
    /// Runs the flows of this many workers, each over a new connection; their durations begin with connect().
    RunNew(Work, usize),
}

/// The work of each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Transactions of one byte before the flows.
    pub warm: u32,
    /// Lengths of flows, in turn: first, last and step, bytes. Each connection begins with another length.
    pub bytes: (u32, u32, u32),
    /// Number of flows.
    pub flows: u32,
    /// Pause after each flow.
    pub pause: Duration,
    /// How much later each connection begins than the one before it.
    pub stagger: Duration,
}

impl Work {
    /// The length of a flow.
    fn length(&self, connection: u32, flow: u32) -> u32 {
        let (from, to, step) = self.bytes;
        let lengths = to.saturating_sub(from) / step.max(1) + 1;
        from + (connection.wrapping_add(flow) % lengths) * step
    }

    /// Runs the flows over a new connection each; returns how long each took, from connect() to the last byte.
    fn run_new(&self, number: u32, to: SocketAddr) -> io::Result<Vec<Duration>> {
        thread::sleep(self.stagger * number);
        (0..self.flows)
            .map(|flow| {
                let begun = Instant::now();
                let mut stream = one(to)?;
                fetch_one(&mut stream, self.length(number, flow))?;
                let took = begun.elapsed();
                thread::sleep(self.pause);
                Ok(took)
            })
            .collect()
    }

    /// Runs the flows; returns how long each took, from the request to the last byte of the response.
    fn run(&self, connection: u32, stream: &mut TcpStream) -> io::Result<Vec<Duration>> {
        thread::sleep(self.stagger * connection);
        for _ in 0..self.warm {
            fetch_one(stream, 1)?;
        }
        (0..self.flows)
            .map(|flow| {
                let took = fetch_one(stream, self.length(connection, flow))?;
                thread::sleep(self.pause);
                Ok(took)
            })
            .collect()
    }
}

fn fetch_one(stream: &mut TcpStream, bytes: u32) -> io::Result<Duration> {
    let mut response = vec![0; bytes as usize];
    let begun = Instant::now();
    stream.write_all(&bytes.to_be_bytes())?;
    stream.read_exact(&mut response)?;
    Ok(begun.elapsed())
}

pub(super) fn run(to: SocketAddr) -> anyhow::Result<()> {
    reply(&())?;
    let mut streams: Vec<TcpStream> = Vec::new();
    commands(|command| -> anyhow::Result<Value> {
        match command {
            Command::Connect(count) => {
                streams = connect(to, count)?;
                let ports = streams.iter().map(|stream| Ok(stream.local_addr()?.port()));
                Ok(json!(ports.collect::<io::Result<Vec<_>>>()?))
            }
            Command::Run(work) => Ok(json!(
                at_once(&mut streams, |number, stream| work.run(number, stream))?
            )),
            Command::RunNew(work, count) => {
                let workers = vec![(); count];
                Ok(json!(
                    at_once(workers, |number, ()| work.run_new(number, to))?
                ))
            }
        }
    })
}

/// Opens the connections at once, as each takes a round trip.
fn connect(to: SocketAddr, count: usize) -> io::Result<Vec<TcpStream>> {
    at_once(vec![(); count], |_, ()| Ok(vec![one(to)?]))
}

fn one(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Does this for each item in a thread of its own; returns all results in order.
fn at_once<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    each: impl Fn(u32, I) -> io::Result<Vec<T>> + Sync,
) -> io::Result<Vec<T>> {
    thread::scope(|scope| {
        let each = &each;
        let all: Vec<_> = (0..)
            .zip(items)
            .map(|(number, item)| scope.spawn(move || each(number, item)))
            .collect();
        let results: io::Result<Vec<_>> = all.into_iter().map(joined).collect();
        Ok(results?.into_iter().flatten().collect())
    })
}

fn joined<T>(handle: thread::ScopedJoinHandle<'_, T>) -> T {
    handle
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn flows_run_on_several_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                thread::spawn(|| serve_connection(stream.unwrap()));
            }
        });
        let mut streams = connect(to, 3).unwrap();
        let work = Work {
            warm: 5,
            bytes: (1000, 3000, 1000),
            flows: 4,
            pause: Duration::ZERO,
            stagger: Duration::from_micros(10),
        };
        let took = at_once(&mut streams, |number, stream| work.run(number, stream));
        assert_eq!(took.unwrap().len(), 12);
        let took = at_once([(), ()], |number, ()| work.run_new(number, to));
        assert_eq!(took.unwrap().len(), 8);
        let lengths: Vec<u32> = (0..4).map(|flow| work.length(1, flow)).collect();
        assert_eq!(lengths, [2000, 3000, 1000, 2000]);
    }
}
