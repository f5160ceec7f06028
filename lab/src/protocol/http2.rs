//! HTTP/2 over one connection: concurrent requests, and a bidirectional stream of messages like gRPC's.

use std::{
    cell::RefCell,
    collections::VecDeque,
    net::{SocketAddr, TcpListener},
    rc::Rc,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::{
    RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
    server::SendResponse,
};
use http::{Method, Request, Response};
use rto_testbed::workload::http::BODY;
use tokio::{
    net::TcpStream,
    runtime::{Builder, Runtime},
    task::LocalSet,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};

use super::{Client, Times, Until};

/// Number of concurrent requests.
const AT_ONCE: usize = 4;
/// Path of the stream of messages, in gRPC's form.
const ECHO: &str = "/lab.Echo/Echo";
/// Interval between messages.
pub(crate) const INTERVAL: Duration = Duration::from_millis(10);
/// Bytes of a message.
const MESSAGE: usize = 100;
/// Length of the prefix of each message: a compression flag, and the length.
const PREFIX: usize = 5;
/// Time after which an answer counts as lost.
const TIMEOUT: Duration = Duration::from_secs(60);

fn runtime() -> anyhow::Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Answers connections until the listener fails.
pub(super) fn serve(listener: TcpListener) -> anyhow::Result<()> {
    runtime()?.block_on(async {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        loop {
            let (stream, _) = listener.accept().await?;
            // A client that disconnects is not an error of the server.
            tokio::spawn(serve_connection(stream));
        }
    })
}

async fn serve_connection(stream: TcpStream) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut connection = h2::server::handshake(stream).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, respond) = accepted?;
        tokio::spawn(answer(request, respond));
    }
    Ok(())
}

async fn answer(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> anyhow::Result<()> {
    let is_echo = request.uri().path() == ECHO;
    let mut requests = request.into_body();
    let mut answers = respond.send_response(Response::new(()), false)?;
    if !is_echo {
        answers.send_data(Bytes::from_static(&[b'.'; BODY]), true)?;
        return Ok(());
    }
    let mut messages = Messages::default();
    while let Some(message) = messages.next(&mut requests).await? {
        answers.send_data(framed(&message), false)?;
    }
    Ok(answers.send_data(Bytes::new(), true)?)
}

/// A message with its prefix.
fn framed(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(PREFIX + message.len());
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    framed.put_slice(message);
    framed.freeze()
}

/// Reassembles the messages of a stream.
#[derive(Default)]
struct Messages(BytesMut);

impl Messages {
    /// `None` at the end of the stream.
    async fn next(&mut self, from: &mut RecvStream) -> anyhow::Result<Option<Bytes>> {
        loop {
            if let Some(message) = self.whole() {
                return Ok(Some(message));
            }
            let Some(more) = more(from).await? else {
                ensure!(self.0.is_empty(), "the stream ended within a message");
                return Ok(None);
            };
            self.0.put(more);
        }
    }

    fn whole(&mut self) -> Option<Bytes> {
        let length = self.0.get(1..PREFIX)?.get_u32() as usize;
        if self.0.len() < PREFIX + length {
            return None;
        }
        self.0.advance(PREFIX);
        Some(self.0.split_to(length).freeze())
    }
}

/// The next piece of data; releases the flow-control window.
async fn more(from: &mut RecvStream) -> anyhow::Result<Option<Bytes>> {
    let Some(more) = from.data().await.transpose()? else {
        return Ok(None);
    };
    from.flow_control().release_capacity(more.len())?;
    Ok(Some(more))
}

/// A connection, which is driven while something waits for it.
struct Connected {
    runtime: Runtime,
    tasks: LocalSet,
    send: SendRequest<Bytes>,
}

impl Connected {
    fn to(to: SocketAddr) -> anyhow::Result<Self> {
        let (runtime, tasks) = (runtime()?, LocalSet::new());
        let send = tasks.block_on(&runtime, async {
            let stream = TcpStream::connect(to).await?;
            stream.set_nodelay(true)?;
            let (send, connection) = h2::client::handshake(stream).await?;
            tokio::task::spawn_local(connection);
            anyhow::Ok(send)
        })?;
        Ok(Self {
            runtime,
            tasks,
            send,
        })
    }
}

/// Concurrent requests, each with a response of [`BODY`] bytes.
pub(super) struct Requests(Connected);

impl Requests {
    pub(super) fn connect(to: SocketAddr) -> anyhow::Result<Self> {
        Connected::to(to).map(Self)
    }
}

impl Client for Requests {
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        let Connected {
            runtime,
            tasks,
            send,
        } = &self.0;
        let none = Times::new(Until::Count(0), times.pause);
        let shared = Rc::new(RefCell::new(std::mem::replace(times, none)));
        tasks.block_on(runtime, async {
            let all: Vec<_> = (0..AT_ONCE)
                .map(|_| tokio::task::spawn_local(repeat(send.clone(), Rc::clone(&shared))))
                .collect();
            for one in all {
                one.await??;
            }
            anyhow::Ok(())
        })?;
        std::mem::swap(times, &mut *shared.borrow_mut());
        Ok(())
    }
}

async fn repeat(mut send: SendRequest<Bytes>, times: Rc<RefCell<Times>>) -> anyhow::Result<()> {
    let pause = times.borrow().pause;
    while times.borrow_mut().next() {
        let begun = Instant::now();
        let length = timeout(TIMEOUT, get(&mut send))
            .await
            .context("no answer")??;
        ensure!(length == BODY, "a response of {length} bytes");
        times.borrow_mut().add(begun.elapsed());
        if !pause.is_zero() {
            sleep(pause).await;
        }
    }
    Ok(())
}

async fn get(send: &mut SendRequest<Bytes>) -> anyhow::Result<usize> {
    let mut ready = send.clone().ready().await?;
    let request = Request::get("http://lab.invalid/").body(())?;
    let (response, _) = ready.send_request(request, true)?;
    let mut body = response.await?.into_body();
    let mut length = 0;
    while let Some(more) = more(&mut body).await? {
        length += more.len();
    }
    Ok(length)
}

/// A message every [`INTERVAL`], whether or not the previous one has been echoed.
pub(super) struct Stream {
    connected: Connected,
    requests: SendStream<Bytes>,
    answers: RecvStream,
    messages: Messages,
}

impl Stream {
    pub(super) fn connect(to: SocketAddr) -> anyhow::Result<Self> {
        let connected = Connected::to(to)?;
        let Connected {
            runtime,
            tasks,
            send,
        } = &connected;
        let (requests, answers) = tasks.block_on(runtime, async {
            let mut ready = send.clone().ready().await?;
            let request = Request::builder()
                .method(Method::POST)
                .uri(format!("http://lab.invalid{ECHO}"))
                .header("content-type", "application/grpc")
                .body(())?;
            let (response, requests): (ResponseFuture, _) = ready.send_request(request, false)?;
            anyhow::Ok((requests, response.await?.into_body()))
        })?;
        Ok(Self {
            connected,
            requests,
            answers,
            messages: Messages::default(),
        })
    }
}

impl Client for Stream {
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        let Self {
            connected,
            requests,
            answers,
            messages,
        } = self;
        let conversation = async {
            let mut ticks = interval(INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            // Send times of the messages that have not been echoed.
            let mut sent: VecDeque<Instant> = VecDeque::new();
            let mut is_over = false;
            loop {
                if is_over && sent.is_empty() {
                    return Ok(());
                }
                let oldest = sent.front().copied().unwrap_or_else(Instant::now);
                tokio::select! {
                    _ = ticks.tick(), if !is_over => {
                        is_over = !times.next();
                        if !is_over {
                            sent.push_back(Instant::now());
                            requests.send_data(framed(&[b'm'; MESSAGE]), false)?;
                        }
                    }
                    message = messages.next(answers) => {
                        let message = message?.context("the server ended the stream")?;
                        ensure!(message.len() == MESSAGE, "a message of {} bytes", message.len());
                        let begun = sent.pop_front().context("an answer without a request")?;
                        times.add(begun.elapsed());
                    }
                    () = sleep_until(oldest + TIMEOUT) => bail!("no answer"),
                }
            }
        };
        let tasks = &connected.tasks;
        tasks.block_on(&connected.runtime, conversation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http2_messages_are_read_in_pieces() {
        let whole = [framed(b"one"), framed(b""), framed(b"three")].concat();
        let mut messages = Messages::default();
        let mut found = Vec::new();
        for byte in whole {
            messages.0.put_u8(byte);
            found.extend(messages.whole());
        }
        assert_eq!(found, [&b"one"[..], b"", b"three"]);
        assert!(messages.0.is_empty());
    }
}
