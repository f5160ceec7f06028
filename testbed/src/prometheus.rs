//! A private Prometheus server in a network namespace.

use std::{
    fs::{self, File},
    io::Write as _,
    net::{Ipv4Addr, TcpStream},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    http, netns,
    process::KillOnDrop,
    wait::{TIMEOUT, eventually},
};

/// The port it listens on, at the namespace's loopback interface.
pub const PORT: u16 = 9090;

/// The server; stopped, and its data removed, when dropped.
#[derive(Debug)]
pub struct Prometheus {
    server: KillOnDrop,
    dir: TempDir,
    netns: String,
}

impl Prometheus {
    /// Starts it with this configuration, and waits until it is ready.
    pub fn start(netns: &str, config: &str) -> anyhow::Result<Self> {
        Self::start_program("prometheus", netns, config)
    }

    /// The same for another program than that of the distribution.
    pub fn start_program(program: &str, netns: &str, config: &str) -> anyhow::Result<Self> {
        let dir = TempDir::new()?;
        let file = dir.path().join("prometheus.yml");
        fs::write(&file, config)?;
        let log = File::create(dir.path().join("log"))?;
        let mut command = Command::new(program);
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.path().join("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{PORT}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let server = netns::inside(netns, || command.spawn().context("prometheus"))?;
        let mut started = Self {
            server: KillOnDrop(server),
            dir,
            netns: netns.to_owned(),
        };
        eventually("Prometheus that is ready", TIMEOUT, || {
            let ended = started.server.0.try_wait()?;
            ensure!(ended.is_none(), "prometheus ended: {ended:?}");
            let ready = started.get("/-/ready");
            Ok(ready.ok().filter(|answer| answer.status == 200))
        })
        .with_context(|| started.log())?;
        Ok(started)
    }

    /// The server's log.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// The server's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.server.0.id()
    }

    /// The samples that an instant query returns.
    pub fn query(&self, query: &str) -> anyhow::Result<Vec<Value>> {
        let answer = self.api(&format!("/api/v1/query?query={}", encoded(query)))?;
        let result = answer["data"]["result"].as_array();
        Ok(result
            .with_context(|| format!("{query}: {answer}"))?
            .clone())
    }

    /// The answer of its API to a GET.
    pub fn api(&self, path: &str) -> anyhow::Result<Value> {
        let answer = self.get(path)?;
        serde_json::from_str(&answer.body).with_context(|| format!("{path}: {answer:?}"))
    }

    /// The server's rules of a kind, "record" or "alert", as its API returns them.
    pub fn rules(&self, kind: &str) -> anyhow::Result<Vec<Value>> {
        let answer = self.api(&format!("/api/v1/rules?type={kind}"))?;
        let groups = answer["data"]["groups"].as_array().context("no groups")?;
        let rules = groups
            .iter()
            .flat_map(|group| group["rules"].as_array().into_iter().flatten());
        Ok(rules.cloned().collect())
    }

    /// Uses HTTP/1.0, so that the answer is not chunked.
    fn get(&self, path: &str) -> anyhow::Result<http::Answer> {
        let mut stream = netns::inside(&self.netns, || {
            Ok(TcpStream::connect((Ipv4Addr::LOCALHOST, PORT))?)
        })?;
        write!(stream, "GET {path} HTTP/1.0\r\nhost: x\r\n\r\n")?;
        http::receive(stream)
    }
}

/// The queries of a Grafana dashboard, each with its panel's title.
pub fn panels(dashboard: &Value) -> anyhow::Result<Vec<(String, String)>> {
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let queries = panels.iter().flat_map(|panel| {
        let title = panel["title"].as_str().unwrap_or_default();
        let targets = panel["targets"].as_array().into_iter().flatten();
        let queries = targets.filter_map(|target| target["expr"].as_str());
        queries.map(move |query| (title.to_owned(), query.to_owned()))
    });
    Ok(queries.collect())
}

/// A dashboard's query after its variables are replaced: one host, and all of the other variables.
#[must_use]
pub fn filled(query: &str, instance: &str, rate_interval: &str) -> String {
    ["$cluster", "$job", "$policy"]
        .iter()
        .fold(query.to_owned(), |query, name| query.replace(name, ".*"))
        .replace("$instance", instance)
        .replace("$__rate_interval", rate_interval)
}

/// Percent-encodes a string for a URL (RFC 3986 section 2.1).
fn encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b if b.is_ascii_alphanumeric() => char::from(b).to_string(),
        b => format!("%{b:02X}"),
    };
    text.bytes().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_encoded() {
        assert_eq!(encoded("a{b=\"ü\"}"), "a%7Bb%3D%22%C3%BC%22%7D");
    }
}
