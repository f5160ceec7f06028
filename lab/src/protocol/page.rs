//! Web pages: objects over six connections at a time, loaded by the lab or by Chromium.

use std::{
    net::{SocketAddr, TcpStream},
    panic,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Instant,
};

use anyhow::Context as _;
use rto_testbed::workload::http;
use serde::{Deserialize, Serialize};

use super::{Client, Times};
use crate::{
    program,
    summary::micros,
    workload::{Loader, Page},
};

/// Connections to a host at the same time, as in browsers.
const CONNECTIONS: usize = 6;
/// The document of a browser: two pages after each other. The connection that it came over is closed.
const FRAMES: &str = include_str!("frames.html");

/// An object that was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// How long it took, including a connection that was made for it, microseconds.
    pub us: u64,
    /// The client's port; 0 if it is unknown.
    pub port: u16,
    /// Bytes that the connection had received at its end.
    pub end: u64,
}

/// Serves objects, and the documents of a browser: `/frames/COUNT/BYTES` and `/page/COUNT/BYTES/NUMBER`.
pub(super) fn serve_connection(stream: TcpStream) -> std::io::Result<()> {
    http::serve_connection(stream, |path| {
        let fields: Vec<&str> = path.split('/').collect();
        match fields[..] {
            ["", "frames", ..] => Some((FRAMES.to_owned(), true)),
            ["", "page", count, bytes, number] => {
                let images = 0..count.parse().unwrap_or(0);
                let images = images.map(|n: u32| format!("<img src=\"/{bytes}?{number}-{n}\">"));
                Some((
                    "<!doctype html>".to_owned() + &images.collect::<String>(),
                    false,
                ))
            }
            _ => None,
        }
    })
}

/// A client that loads pages.
pub(super) struct Pages {
    to: SocketAddr,
    page: Page,
    open: Vec<Option<http::Client>>,
}

impl Pages {
    pub(super) fn new(to: SocketAddr, page: Page) -> Self {
        let open = Vec::new();
        Self { to, page, open }
    }

    /// Loads a page over new or open connections.
    fn load(&mut self, times: &mut Times) -> anyhow::Result<()> {
        if self.page.by == Loader::New {
            self.open.clear();
        }
        self.open.resize_with(CONNECTIONS, || None);
        let (begun, next, page, to) = (Instant::now(), AtomicU32::new(0), self.page, self.to);
        let loaded = thread::scope(|scope| {
            let connections = self.open.iter_mut();
            let each = connections.map(|client| scope.spawn(|| objects(page, to, client, &next)));
            let each: Vec<_> = each.collect();
            let each = each.into_iter().map(thread::ScopedJoinHandle::join);
            each.map(|ended| ended.unwrap_or_else(|error| panic::resume_unwind(error)))
                .collect::<anyhow::Result<Vec<_>>>()
        });
        // A timeout ends the page.
        let (done, loaded) = match loaded {
            Ok(loaded) => (Ok(()), loaded),
            Err(error) => (Err(error), Vec::new()),
        };
        if !times.done(begun, done)? {
            self.open.clear();
        }
        times.seen.objects.extend(loaded.into_iter().flatten());
        Ok(())
    }

    /// Loads two pages in a new browser, and takes the times of one of them.
    fn browse(&self, times: &mut Times) -> anyhow::Result<()> {
        let Page { objects, bytes, by } = self.page;
        let state = tempfile::tempdir()?;
        let line = format!(
            "{} --no-sandbox --disable-gpu --user-data-dir={} --dump-dom http://{}/frames/{objects}/{bytes}",
            program::BROWSER.0,
            state.path().display(),
            self.to
        );
        let text = program::output(&line, state.path())?;
        let json = text
            .split_once("[[")
            .and_then(|(_, rest)| rest.split_once("]]"));
        let json = json.with_context(|| text.clone())?.0;
        let [new, kept]: [Vec<f64>; 2] = serde_json::from_str(&format!("[[{json}]]"))?;
        let ms = if by == Loader::BrowserNew { new } else { kept };
        let us = |ms: &f64| micros(std::time::Duration::from_secs_f64(ms / 1e3));
        let (page, objects) = ms.split_first().context("no times")?;
        times.seen.us.push(us(page));
        let object = |ms| Object {
            us: us(ms),
            port: 0,
            end: 0,
        };
        times.seen.objects.extend(objects.iter().map(object));
        Ok(())
    }
}

impl Client for Pages {
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        while times.next() {
            match self.page.by {
                Loader::New | Loader::Kept => self.load(times)?,
                Loader::BrowserNew | Loader::BrowserKept => self.browse(times)?,
            }
            times.rest();
        }
        Ok(())
    }
}

/// Loads objects over one connection, until `next` says that all are taken.
fn objects(
    page: Page,
    to: SocketAddr,
    client: &mut Option<http::Client>,
    next: &AtomicU32,
) -> anyhow::Result<Vec<Object>> {
    let mut loaded = Vec::new();
    while next.fetch_add(1, Ordering::Relaxed) < page.objects {
        let begun = Instant::now();
        let connected = match client.take() {
            Some(open) => open,
            None => http::Client::connect(to)?,
        };
        let client = client.insert(connected);
        client.request(&page.bytes.to_string())?;
        client.response()?;
        loaded.push(Object {
            us: micros(begun.elapsed()),
            port: client.port()?,
            end: client.received,
        });
    }
    Ok(loaded)
}
