//! Both ends of flows of known length, over connections that are warm.
//!
//! A request is the number of bytes wanted, four bytes; the response is so many bytes, in one write.

use std::{
    io::{self, BufRead as _, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::bail;

use super::tcp::Fetch;

/// Longest response.
const LONGEST: usize = 1 << 20;

pub(super) fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let bytes = vec![b'.'; LONGEST];
    loop {
        let mut wanted = [0; 4];
        stream.read_exact(&mut wanted)?;
        let wanted = u32::from_be_bytes(wanted) as usize;
        stream.write_all(&bytes[..wanted.min(LONGEST)])?;
    }
}

/// One connection's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Work {
    /// Transactions of one byte before the flows.
    warm: u32,
    /// Lengths of flows in turn: from, and to, in steps; each connection begins with another.
    bytes: (u32, u32, u32),
    /// How many flows.
    flows: u32,
    /// After each.
    pause: Duration,
    /// This connection begins so much later than the one before it.
    stagger: Duration,
}

impl Work {
    fn parse(words: &[&str]) -> anyhow::Result<Self> {
        let numbers: Result<Vec<u32>, _> = words.iter().map(|word| word.parse()).collect();
        let [warm, from, to, step, flows, pause, stagger] = numbers?[..] else {
            bail!("run WARM FROM TO STEP FLOWS PAUSE STAGGER");
        };
        Ok(Self {
            warm,
            bytes: (from, to, step.max(1)),
            flows,
            pause: Duration::from_micros(pause.into()),
            stagger: Duration::from_micros(stagger.into()),
        })
    }

    /// Length of a flow.
    fn length(&self, connection: u32, flow: u32) -> u32 {
        let (from, to, step) = self.bytes;
        let lengths = to.saturating_sub(from) / step + 1;
        from + (connection.wrapping_add(flow) % lengths) * step
    }

    /// How long each flow took: from the request to the last byte of the response.
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

/// Orders: `connect N` (so many connections, in place of those there are; says their ports), `run WARM FROM TO
/// STEP FLOWS PAUSE STAGGER` (over all of them at once: small transactions, then flows of `FROM`, `FROM + STEP`
/// up to `TO` bytes in turn with pauses; microseconds; says how long the flows took, microseconds, those of
/// the first connection first).
#[expect(clippy::print_stdout, reason = "its parent reads it")]
pub(super) fn fetch(args: &Fetch) -> anyhow::Result<()> {
    let mut streams: Vec<TcpStream> = Vec::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let said: Vec<String> = match words.as_slice() {
            ["connect", count] => {
                streams = connect(args.to, count.parse()?)?;
                let ports = streams.iter().map(|stream| Ok(stream.local_addr()?.port()));
                let ports: io::Result<Vec<_>> = ports.collect();
                ports?.iter().map(u16::to_string).collect()
            }
            ["run", numbers @ ..] => {
                let took = all(Work::parse(numbers)?, &mut streams)?;
                took.iter()
                    .map(|took| took.as_micros().to_string())
                    .collect()
            }
            _ => bail!("{line}: connect or run"),
        };
        println!("{}", said.join(" "));
        io::stdout().flush()?;
    }
    Ok(())
}

/// At once, as each takes a round trip.
fn connect(to: SocketAddr, count: usize) -> io::Result<Vec<TcpStream>> {
    let one = || {
        let stream = TcpStream::connect(to)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    thread::scope(|scope| {
        let all: Vec<_> = (0..count).map(|_| scope.spawn(one)).collect();
        all.into_iter().map(joined).collect()
    })
}

fn all(work: Work, streams: &mut [TcpStream]) -> io::Result<Vec<Duration>> {
    thread::scope(|scope| {
        let all: Vec<_> = (0..)
            .zip(streams)
            .map(|(number, stream)| scope.spawn(move || work.run(number, stream)))
            .collect();
        let took: io::Result<Vec<_>> = all.into_iter().map(joined).collect();
        Ok(took?.concat())
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
    fn flows_of_several_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                thread::spawn(|| answer(stream.unwrap()));
            }
        });
        let mut streams = connect(to, 3).unwrap();
        let work = Work::parse(&["5", "1000", "3000", "1000", "4", "0", "10"]).unwrap();
        assert_eq!(all(work, &mut streams).unwrap().len(), 12);
        let lengths: Vec<u32> = (0..4).map(|flow| work.length(1, flow)).collect();
        assert_eq!(lengths, [2000, 3000, 1000, 2000]);
        assert!(Work::parse(&["5"]).is_err());
    }
}
