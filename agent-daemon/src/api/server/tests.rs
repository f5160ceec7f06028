use std::{io, net::SocketAddr, thread};

use rto_agent_core::wire::types::{ChangeAnswer, DetachAnswer, VerifyAnswer, WalkView};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::broadcast,
    time::timeout,
};

use super::*;
use crate::engine::EngineConfig;

const ROUTES: [&str; 18] = [
    "GET /v1/status",
    "GET /v1/stats",
    "GET /v1/events",
    "GET /v1/entries",
    "GET /v1/lookup?address=10.0.0.1",
    "GET /v1/discover",
    "GET /v1/apply",
    "POST /v1/entries",
    "POST /v1/entries/remove",
    "POST /v1/reload",
    "POST /v1/verify",
    "POST /v1/detach",
    "POST /v1/apply",
    "POST /v1/probe",
    "HEAD /v1/events",
    "PUT /v1/status",
    "POST /v1/nothing",
    "GET /",
];
const GROUP: u32 = 7;
/// Neither root nor in the group.
const STRANGER: u32 = 65_534;

/// A handle whose engine answers every message.
fn engine() -> Handle {
    let (handle, messages) = Handle::disconnected(&EngineConfig::for_tests());
    let (lines, _) = broadcast::channel(1);
    thread::spawn(move || {
        for message in messages {
            let no = || EngineError::Refused("no".to_owned());
            match message {
                Message::Add(_, _, reply) => drop(reply.send(Err(no()))),
                Message::Remove(_, _, reply) => drop(reply.send(Err(no()))),
                Message::Reload(_, _, reply) => drop(reply.send(Ok(ChangeAnswer::default()))),
                Message::Detach(_, _, reply) => drop(reply.send(Ok(DetachAnswer::default()))),
                Message::Apply(_, _, reply) => drop(reply.send(Ok(WalkView::default()))),
                Message::Verify(reply) => drop(reply.send(Ok(VerifyAnswer::default()))),
                Message::Watch(_, reply) => drop(reply.send(Ok(lines.subscribe()))),
                _ => {}
            }
        }
    });
    handle
}

/// Runs a test with the addresses at which the routes are served to these users.
fn served<const N: usize>(uids: [u32; N], test: impl AsyncFnOnce([SocketAddr; N])) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _entered = runtime.enter();
    let routes = router(engine());
    let addresses = uids.map(|uid| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let groups = if uid == STRANGER { 0 } else { GROUP };
        let peer = Some(Peer {
            caller: Caller { uid, pid: 1 },
            groups: vec![groups],
        });
        let allowed = Allowed {
            group: GROUP.into(),
        };
        let routes = for_peer(routes.clone(), peer, allowed, Lasting::default());
        let listener = TcpListener::from_std(listener).unwrap();
        tokio::spawn(async { axum::serve(listener, routes).await });
        address
    });
    runtime.block_on(test(addresses));
}

/// Sends the head of a request, and this part of its body.
async fn ask(to: SocketAddr, route: &str, headers: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(to).await.unwrap();
    let head = format!("{route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    // The server may refuse the request before it has all of it.
    let _refused = stream.write_all(body).await;
    stream
}

/// The status of an answer.
async fn status_of(stream: &mut TcpStream) -> String {
    let mut line = [0; 12];
    let read = timeout(Duration::from_secs(20), stream.read_exact(&mut line)).await;
    read.expect("an answer").unwrap();
    String::from_utf8_lossy(&line[9..]).into_owned()
}

#[test]
fn root_has_its_own_bodies_and_watches() {
    served([0, 1000], async |[root, other]| {
        const RELOAD: &str = "POST /v1/reload";
        let watch = async |to| ask(to, "GET /v1/events", "x: y", b"").await;
        let length = format!("content-length: {}", LARGE + 1);
        let whole = [b"{}", &vec![b' '; LARGE - 1][..]].concat();
        let mut held = Vec::new();
        for _ in 0..LARGE_AT_ONCE {
            held.push(ask(other, RELOAD, &length, b"{}").await);
        }
        for _ in 0..WATCHES_AT_ONCE {
            let mut stream = watch(other).await;
            assert_eq!(status_of(&mut stream).await, "200");
            held.push(stream);
        }
        assert_eq!(status_of(&mut watch(other).await).await, "422");
        assert_eq!(status_of(&mut watch(root).await).await, "200");
        let of_root = async || ask(root, RELOAD, &length, &whole).await;
        assert_eq!(status_of(&mut of_root().await).await, "200");
        // The third request of other users waits.
        let mut third = ask(other, RELOAD, &length, &whole).await;
        assert_eq!(status_of(&mut of_root().await).await, "200");
        assert!(third.try_read(&mut [0; 1]).is_err());
        drop(held);
        assert_eq!(status_of(&mut third).await, "200");
    });
}

/// A route that did not wait for its body would answer before the other requests are answered, as
/// one thread and one engine handle all in turn.
#[test]
fn answer_and_refusal_wait_for_the_body() {
    for (uid, expected) in [(0, "200"), (STRANGER, "403")] {
        served([uid], async |[address]| {
            for route in ROUTES {
                let headers = "content-type: application/json\r\ncontent-length: 2";
                let mut stream = ask(address, route, headers, b"").await;
                for _ in 0..2 {
                    let mut other = ask(address, "POST /v1/reload", "content-length: 0", b"").await;
                    assert_eq!(status_of(&mut other).await, expected);
                }
                let early = stream.try_read(&mut [0; 64]).map_err(|e| e.kind());
                assert_eq!(early, Err(io::ErrorKind::WouldBlock), "{route}");
                stream.write_all(b"{}").await.unwrap();
                status_of(&mut stream).await;
            }
        });
    }
}

#[test]
fn every_route_limits_its_body() {
    served([0], async |[address]| {
        for route in ROUTES {
            let length = MAX_BODY + 1;
            let declared = format!("content-length: {length}");
            let mut stream = ask(address, route, &declared, b"").await;
            assert_eq!(status_of(&mut stream).await, "413", "{route}");
            // A body without a declared length is read up to the limit.
            let chunk = [format!("{length:x}\r\n").as_bytes(), &vec![b' '; length]].concat();
            let mut stream = ask(address, route, "transfer-encoding: chunked", &chunk).await;
            assert_eq!(status_of(&mut stream).await, "413", "{route}");
        }
    });
}
