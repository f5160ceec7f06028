//! The bytes that a client sends over the control socket.
//!
//! A request of a client without permission is refused before it reaches the daemon's engine. A client with permission
//! always gets an HTTP answer, errors are JSON that explains the mistake, and a request that is serialised and parsed
//! again keeps its meaning.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
        mpsc::Receiver,
    },
    thread,
};

use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use rto_agent_core::{
    config::Config,
    policy::{Cidr, PolicyName, compile::compile},
    testing::HOST,
    wire::{
        tune::TuneAnswer,
        types::{
            AddRequest, Caller, ChangeAnswer, DetachAnswer, RemoveRequest, VerifyAnswer, WalkView,
        },
    },
};
use rto_agent_daemon::{
    api::{
        peer::{Allowed, Peer},
        server,
    },
    engine::{EngineConfig, EngineError, Handle, Message},
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
    runtime::{Builder, Runtime},
};

/// The group that has permission.
const GROUP: u32 = 7;
/// The bytes in transit in one direction.
const PIPE: usize = 1 << 16;

/// The number of requests to the engine since the process began.
static ASKED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
}

/// Checks a connection's bytes.
pub fn check(data: &[u8]) {
    let before = ASKED.load(Ordering::Relaxed);
    for answer in answers(&served(data, peer(65_534, 65_534))) {
        // 403 refuses a request, whose body is read (100) and dropped; with the other statuses the bytes were not a
        // complete, valid request.
        let refused = [100, 403, 400, 408, 414, 431].contains(&answer.status);
        assert!(refused, "{answer:?}");
    }
    assert_eq!(
        ASKED.load(Ordering::Relaxed),
        before,
        "a request without permission reached the engine"
    );
    // Root, or a member of the group: chosen by the length, so that the same input always has the same caller.
    let (uid, group) = if data.len().is_multiple_of(2) {
        (0, 0)
    } else {
        (1000, GROUP)
    };
    for answer in answers(&served(data, peer(uid, group))) {
        assert!((100..600).contains(&answer.status), "{answer:?}");
        assert!(uid != 0 || answer.status != 403, "{answer:?}");
        if let (400.., Some(body)) = (answer.status, &answer.body) {
            let body: Value = serde_json::from_slice(body).expect("an error is JSON");
            assert!(body["error"].is_string(), "{body}");
        }
    }
}

fn peer(uid: u32, group: u32) -> Peer {
    Peer {
        caller: Caller { uid, pid: 1 },
        groups: vec![group],
    }
}

/// The daemon's answer to these bytes.
fn served(data: &[u8], peer: Peer) -> Vec<u8> {
    let allowed = Allowed {
        group: GROUP.into(),
    };
    let routes = server::routes_for(Some(peer), engine(), allowed);
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let (client, daemon) = duplex(PIPE);
            let serving = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(daemon), TowerToHyperService::new(routes));
            let (mut from, mut to) = tokio::io::split(client);
            let asking = async {
                // The daemon may close the connection on invalid input.
                let _hung_up = to.write_all(data).await;
                let _hung_up = to.shutdown().await;
            };
            let mut text = Vec::new();
            let listening = from.read_to_end(&mut text);
            let (_nonsense, (), read) = tokio::join!(serving, asking, listening);
            read.expect("a pipe can be read");
            text
        })
    })
}

#[derive(Debug)]
struct Answer {
    status: u16,
    /// `None` if its length is unknown or it is incomplete.
    body: Option<Vec<u8>>,
}

/// The answers on a connection, as far as their lengths are known.
fn answers(mut text: &[u8]) -> Vec<Answer> {
    let mut answers = Vec::new();
    while !text.is_empty() {
        let end = text.windows(4).position(|w| w == b"\r\n\r\n");
        let end = end.expect("headers end") + 4;
        let head = str::from_utf8(&text[..end]).expect("headers are text");
        let status = head
            .strip_prefix("HTTP/1.1 ")
            .or_else(|| head.strip_prefix("HTTP/1.0 "))
            .and_then(|rest| rest.get(..3)?.parse().ok())
            .expect("it is HTTP");
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
        text = &text[end..];
        let body = length.and_then(|length| text.get(..length));
        // The answer to HEAD has a length but no body.
        let body = body.filter(|body| !body.starts_with(b"HTTP/1."));
        text = body.map_or(text, |body| &text[body.len()..]);
        let is_last = body.is_none() && !text.starts_with(b"HTTP/1.");
        answers.push(Answer {
            status,
            body: body.filter(|body| !body.is_empty()).map(<[u8]>::to_vec),
        });
        if is_last {
            break;
        }
    }
    answers
}

/// The handle of an engine without a kernel.
fn engine() -> Handle {
    static ENGINE: OnceLock<Handle> = OnceLock::new();
    let engine = ENGINE.get_or_init(|| {
        let (handle, messages) = Handle::disconnected(&config());
        thread::spawn(move || answer_all(&messages));
        handle
    });
    engine.clone()
}

/// Answers like an engine without entries; requests are parsed as far as that needs no kernel.
fn answer_all(messages: &Receiver<Message>) {
    for message in messages {
        ASKED.fetch_add(1, Ordering::Relaxed);
        // A client that has disconnected gets no answer.
        match message {
            Message::Add(request, _, reply) => drop(reply.send(add(&request))),
            Message::Remove(request, _, reply) => drop(reply.send(remove(&request))),
            Message::Reload(_, _, reply) | Message::Attach(_, reply) => {
                drop(reply.send(Ok(ChangeAnswer::default())));
            }
            Message::Detach(_, _, reply) => drop(reply.send(Ok(DetachAnswer::default()))),
            Message::Apply(_, _, reply) => drop(reply.send(Ok(WalkView::default()))),
            Message::Probed(_, caller, reply) => {
                assert_eq!(caller.uid, 0, "only root may report a probe");
                drop(reply.send(Ok(())));
            }
            Message::Verify(reply) => drop(reply.send(Ok(VerifyAnswer::default()))),
            // The sender of these lines is dropped, so they end at once.
            Message::Watch(_, reply) => {
                drop(reply.send(Ok(tokio::sync::broadcast::channel(1).1)));
            }
            Message::Tune(_, _, _, reply) => drop(reply.send(Ok(TuneAnswer::default()))),
            Message::Unwatched
            | Message::Metrics(_)
            | Message::Done(_)
            | Message::Resumed
            | Message::Sighup
            | Message::FilesChanged
            | Message::Stop => {}
        }
    }
}

fn add(request: &AddRequest) -> Result<ChangeAnswer, EngineError> {
    let text = serde_json::to_string(request).expect("it can be written");
    let read: AddRequest = serde_json::from_str(&text).expect("it can be read");
    assert_eq!(format!("{read:?}"), format!("{request:?}"));
    cidrs(&request.cidrs)?;
    if let Some(settings) = &request.settings {
        let compiled = compile(
            &PolicyName::for_settings(settings, |_| false),
            settings,
            &HOST,
        );
        compiled.map_err(|errors| {
            let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
            EngineError::Refused(texts.join("\n"))
        })?;
    }
    Ok(ChangeAnswer::default())
}

fn remove(request: &RemoveRequest) -> Result<ChangeAnswer, EngineError> {
    cidrs(&request.cidrs)?;
    Ok(ChangeAnswer::default())
}

fn cidrs(texts: &[String]) -> Result<(), EngineError> {
    for text in texts {
        let cidr: Cidr = text
            .parse()
            .map_err(|e: rto_agent_core::policy::CidrError| EngineError::Refused(e.to_string()))?;
        assert_eq!(cidr.to_string().parse(), Ok(cidr));
    }
    Ok(())
}

fn config() -> EngineConfig {
    EngineConfig {
        config_path: "/config.toml".into(),
        config: Config::default(),
        refused: None,
        fingerprint: 0,
        cgroup: "/".into(),
        host: HOST,
        kernel: "6.12".to_owned(),
        features: Vec::new(),
        tells_process: false,
        dropped_lines: || 0,
    }
}
