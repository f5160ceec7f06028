use futures_util::FutureExt as _;
use rto_agent_core::wire::types::ChangeAnswer;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use super::*;
use crate::engine::EngineConfig;

/// The first line of an answer.
async fn answered(stream: &mut TcpStream) -> String {
    let mut line = [0; 12];
    let read = timeout(Duration::from_secs(20), stream.read_exact(&mut line)).await;
    read.expect("an answer").unwrap();
    String::from_utf8_lossy(&line[9..]).into_owned()
}

#[test]
fn turns_of_others_leave_root_its_own() {
    let turns = Turns::new(LISTS_AT_ONCE);
    let next = |uid| turns.next(Caller { uid, pid: 1 }).now_or_never().flatten();
    let mut held: Vec<_> = (0..LISTS_AT_ONCE).map(|_| next(1000)).collect();
    assert!(held.iter().all(Option::is_some));
    assert!(next(1001).is_none(), "all others share theirs");
    let of_root: Vec<_> = (0..LISTS_AT_ONCE).map(|_| next(0)).collect();
    assert!(of_root.iter().all(Option::is_some));
    held.pop();
    assert!(next(1001).is_some());
}

#[test]
fn others_leave_root_its_bodies_and_watches() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (engine, messages) = Handle::disconnected(&EngineConfig::for_tests());
    let (lines, _) = tokio::sync::broadcast::channel(1);
    std::thread::spawn(move || {
        for message in messages {
            match message {
                Message::Reload(_, _, reply) => drop(reply.send(Ok(ChangeAnswer::default()))),
                Message::Watch(_, reply) => drop(reply.send(Ok(lines.subscribe()))),
                _ => {}
            }
        }
    });
    runtime.block_on(async {
        let routes = router(engine, Allowed { group: 7.into() });
        let mut addresses = Vec::new();
        for uid in [0, 1000] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            addresses.push(listener.local_addr().unwrap());
            let peer = Some(Peer {
                caller: Caller { uid, pid: 1 },
                groups: vec![7],
            });
            let lasting = Lasting::default();
            let info = Extension(ConnectInfo(PeerInfo { peer, lasting }));
            let routes = routes.clone().layer(info);
            tokio::spawn(async { axum::serve(listener, routes).await });
        }
        let (root, other) = (addresses[0], addresses[1]);
        let ask = async |address, text: &str| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(text.as_bytes()).await.unwrap();
            stream
        };
        let watch = "GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n";
        let length = LARGE + 1;
        let reload =
            format!("POST /v1/reload HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{{}}");
        let mut held = Vec::new();
        for _ in 0..LARGE_AT_ONCE {
            held.push(ask(other, &reload).await);
        }
        for _ in 0..WATCHES_AT_ONCE {
            let mut stream = ask(other, watch).await;
            assert_eq!(answered(&mut stream).await, "200");
            held.push(stream);
        }
        assert_eq!(answered(&mut ask(other, watch).await).await, "422");
        assert_eq!(answered(&mut ask(root, watch).await).await, "200");
        let whole = reload + &" ".repeat(length - 2);
        assert_eq!(answered(&mut ask(root, &whole).await).await, "200");
        // The third request of other users waits.
        let mut third = ask(other, &whole).await;
        assert_eq!(answered(&mut ask(root, &whole).await).await, "200");
        assert!(third.try_read(&mut [0; 1]).is_err());
        drop(held);
        assert_eq!(answered(&mut third).await, "200");
    });
}
