//! Requests and answers over an established connection, and the state of its sockets as seen from outside.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::bail;
use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    Program, Role, socket,
    stdio::{commands, reply},
    traffic::Connect,
};
use crate::{
    channel::ControlChannel,
    netns,
    process::stdout_of,
    tcp::{get_option, set_option},
};

/// Bytes of a request.
pub const REQUEST: usize = 100;
/// First byte of a request that expects an answer of one byte.
pub(super) const WANTS_ANSWER: u8 = b'R';
/// First byte of a request that expects none.
const SILENT: u8 = b'S';

/// A client that executes commands; killed by its pid when dropped.
#[derive(Debug)]
pub struct Conversation {
    client: ControlChannel,
    port: u16,
}

/// A command to the client.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Sequential requests and answers.
    Rounds {
        /// Number of requests.
        count: usize,
        /// Pause before each.
        pause: Duration,
    },
    /// Send this many bytes that get no answer.
    Send(usize),
    /// Wait until the connection fails; reply with the error and how long that took.
    Fail,
    /// Reply with the value of a TCP option.
    Option(i32),
    /// Set a TCP option.
    SetOption(i32, i32),
    /// Close the sending side.
    Shutdown,
}

impl Conversation {
    /// Connects in a namespace and a cgroup; returns once connected.
    pub fn start(
        netns: &str,
        cgroup: Option<&Path>,
        to: SocketAddr,
        options: Connect,
    ) -> anyhow::Result<Self> {
        let role = Role::Conversation { to, options };
        let mut command = Program::built()?.command(netns, cgroup, &role)?;
        let mut client = ControlChannel::start(&mut command)?;
        let port = client.recv()?;
        Ok(Self { client, port })
    }

    /// The client's port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Exchanges `count` requests and answers, one after the other.
    pub fn rounds(&mut self, count: usize) -> anyhow::Result<()> {
        self.paced(count, Duration::ZERO)
    }

    /// The same with a pause before each request.
    pub fn paced(&mut self, count: usize, pause: Duration) -> anyhow::Result<()> {
        self.client.request(&Command::Rounds { count, pause })
    }

    /// Sends this many bytes that get no answer; must be a multiple of [`REQUEST`].
    pub fn send(&mut self, bytes: usize) -> anyhow::Result<()> {
        self.client.request(&Command::Send(bytes))
    }

    /// The value of an option of [`crate::tcp::option`], as the application sees it.
    pub fn option(&mut self, number: i32) -> anyhow::Result<i32> {
        self.client.request(&Command::Option(number))
    }

    /// Sets an option of [`crate::tcp::option`], as an application does.
    pub fn set_option(&mut self, number: i32, value: i32) -> anyhow::Result<()> {
        self.client.request(&Command::SetOption(number, value))
    }

    /// Closes the sending side.
    pub fn shutdown(&mut self) -> anyhow::Result<()> {
        self.client.request(&Command::Shutdown)
    }

    /// Waits until the connection fails; returns the errno's name and how long that took.
    pub fn fail(&mut self) -> anyhow::Result<(String, Duration)> {
        self.client.request(&Command::Fail)
    }
}

pub(super) fn run(to: SocketAddr, options: Connect) -> anyhow::Result<()> {
    let (socket, to) = options.socket(to)?;
    socket::connect(&socket, to)?;
    let mut stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    reply(&stream.local_addr()?.port())?;
    commands(|command| execute(&mut stream, command))
}

fn execute(stream: &mut TcpStream, command: Command) -> anyhow::Result<Value> {
    match command {
        Command::Rounds { count, pause } => {
            for _ in 0..count {
                thread::sleep(pause);
                stream.write_all(&[WANTS_ANSWER; REQUEST])?;
                stream.read_exact(&mut [0])?;
            }
            Ok(Value::Null)
        }
        Command::Send(bytes) => {
            stream.write_all(&vec![SILENT; bytes])?;
            Ok(Value::Null)
        }
        Command::Fail => {
            let begin = Instant::now();
            let error = stream.read(&mut [0]).err().and_then(|e| e.raw_os_error());
            let error = error.map_or("none".to_owned(), |e| format!("{:?}", Errno::from_raw(e)));
            Ok(json!((error, begin.elapsed())))
        }
        Command::Option(number) => Ok(json!(get_option(stream, number)?)),
        Command::SetOption(number, value) => Ok(json!(set_option(stream, number, value)?)),
        Command::Shutdown => Ok(json!(stream.shutdown(Shutdown::Write)?)),
    }
}

/// The retransmission timeout of the only established socket that matches `filter` (of ss(8)) in a namespace, as `ss
/// -tin` shows it.
pub fn rto(netns: &str, filter: &str) -> anyhow::Result<Duration> {
    let mut ss = std::process::Command::new("ss");
    ss.args(["-tinHO", "state", "established"]);
    ss.args(filter.split(' '));
    let output = netns::inside(netns, || Ok(ss.output()?))?;
    let text = stdout_of("ss", output)?;
    let mut rtos = text
        .lines()
        .filter_map(|line| line.split(' ').find_map(|word| word.strip_prefix("rto:")));
    match (rtos.next(), rtos.next()) {
        (Some(millis), None) => Ok(Duration::from_secs_f64(millis.parse::<f64>()? / 1e3)),
        _ => bail!("not one socket {filter} in {netns}: {text:?}"),
    }
}
