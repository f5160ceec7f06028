//! Real programs: their servers, and load generators that report each request.

use std::{
    collections::BTreeSet,
    fs,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, ensure};
use rto_testbed::{
    netns::inside,
    process::{run, stdout_of},
    wait::{TIMEOUT, eventually},
};
use serde::{Deserialize, Serialize};

use crate::{
    protocol::{Client, Times, Until},
    topology::Topology,
    workload::{Loader, Workload},
};

/// Requests per second.
pub(crate) const RATE: u32 = 20;
/// The clients in Python, and the server of gRPC.
const PYTHON: &str = include_str!("load.py");
/// The script of wrk: its pace, and the times that it measured.
const WRK: &str = include_str!("wrk.lua");
/// Starts a server in a cgroup ($1). When stdin is closed, which the kernel does for a lab that is killed, it stops the
/// server; each server ends at once after one of the two signals.
const SERVE: &str = r#"[ -z "$1" ] || echo 0 > "$1/cgroup.procs"
shift; "$@" > log 2>&1 &
read -r _; exec 2> /dev/null; kill -INT $!; kill -TERM $!; wait $!"#;
/// The browser, and its Debian package.
pub(crate) const BROWSER: (&str, &str) = (
    "/usr/bin/chromium-headless-shell",
    "chromium-headless-shell",
);
/// Makes single transfers.
pub(crate) const CURL: (&str, &str) = ("/usr/bin/curl", "curl");
/// Runs a program until it or the lab ends, at the priority of the link: other programs on the machine do not delay it,
/// and it does not delay the link for long.
const PREFIX: [&str; 6] = ["chrt", "--rr", "1", "setpriv", "--pdeathsig", "KILL"];

/// A load generator with its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// nginx and wrk: HTTP/1.1 over six kept connections
    Wrk,
    /// nginx and h2load: HTTP/2 over two kept connections
    H2load,
    /// nginx and Python's http.client: a connection for each request
    HttpClient,
    /// PostgreSQL and pgbench -C: a connection for each transaction
    Pgbench,
    /// Redis and redis-py: a connection for each command
    Redis,
    /// A server and a client of gRPC for Python: a channel for each call
    Grpcio,
}

impl Program {
    /// Files that it needs, and the Debian packages that have them.
    const fn needs(self) -> [(&'static str, &'static str); 2] {
        const NGINX: (&str, &str) = ("/usr/sbin/nginx", "nginx-light");
        const PYTHON: (&str, &str) = ("/usr/bin/python3", "python3");
        match self {
            Self::Wrk => [NGINX, ("/usr/bin/wrk", "wrk")],
            Self::H2load => [NGINX, ("/usr/bin/h2load", "nghttp2-client")],
            Self::HttpClient => [NGINX, PYTHON],
            Self::Pgbench => [
                ("/usr/lib/postgresql", "postgresql"),
                ("/usr/bin/pgbench", "postgresql"),
            ],
            Self::Redis => [
                ("/usr/bin/redis-server", "redis-server"),
                (
                    "/usr/lib/python3/dist-packages/redis/__init__.py",
                    "python3-redis",
                ),
            ],
            Self::Grpcio => [
                PYTHON,
                (
                    "/usr/lib/python3/dist-packages/grpc/__init__.py",
                    "python3-grpcio",
                ),
            ],
        }
    }

    /// The command line of the server, whose directory may need some files before.
    fn server(self, on: SocketAddr, dir: &str) -> anyhow::Result<String> {
        let (ip, port) = (on.ip(), on.port());
        let write = |name: &str, text: &str| fs::write(Path::new(dir).join(name), text);
        Ok(match self {
            Self::Wrk | Self::H2load | Self::HttpClient => {
                let protocol = if self == Self::H2load { "http2" } else { "" };
                write("index.html", &"0123456789abcde\n".repeat(256))?;
                let server = format!("listen {on} {protocol}; root {dir};");
                write("nginx.conf", &nginx(dir, &server))?;
                format!("nginx -e stderr -c {dir}/nginx.conf")
            }
            Self::Redis => {
                format!("redis-server --bind {ip} --port {port} --save '' --protected-mode no")
            }
            Self::Grpcio => {
                write("load.py", PYTHON)?;
                format!("/usr/bin/python3 load.py serve {ip} {port}")
            }
            Self::Pgbench => {
                let versions = fs::read_dir("/usr/lib/postgresql")?;
                let newest = versions
                    .flatten()
                    .map(|entry| entry.path().join("bin"))
                    .max();
                let bin = newest.context("/usr/lib/postgresql is empty: install postgresql")?;
                let user = "setpriv --reuid postgres --regid postgres --clear-groups";
                let bin = bin.display();
                run(&format!("chown postgres {dir}"))?;
                run(&format!("{user} {bin}/initdb -N -A trust -D {dir}/data"))?;
                write("data/pg_hba.conf", "host all all all trust\n")?;
                format!(
                    "{user} {bin}/postgres -D {dir}/data -F -c listen_addresses={ip} -c port={port} \
                     -c unix_socket_directories="
                )
            }
        })
    }

    /// The command line of a client that makes about this many requests; some write their times into files.
    fn client(self, to: SocketAddr, count: u32, dir: &Path) -> anyhow::Result<String> {
        let (ip, port, seconds) = (to.ip(), to.port(), count / RATE);
        let write = |name: &str, text: &str| fs::write(dir.join(name), text);
        let python = |name| {
            write("load.py", PYTHON)?;
            anyhow::Ok(format!(
                "/usr/bin/python3 load.py {name} {ip} {port} {count} {RATE}"
            ))
        };
        Ok(match self {
            Self::Wrk => {
                write("wrk.lua", WRK)?;
                format!(
                    "wrk -t 1 -c 6 -d {seconds}s -s wrk.lua http://{to}/ {}",
                    6000 / RATE
                )
            }
            Self::H2load => {
                format!(
                    "h2load -c 2 -m 100 -n {count} --rps {} --log-file times http://{to}/",
                    RATE / 2
                )
            }
            Self::Pgbench => {
                write("one.sql", "select 1;\n")?;
                format!(
                    "pgbench -n -C -c 32 -j 32 -R {RATE} -T {seconds} -f one.sql -l --log-prefix times \
                     -h {ip} -p {port} -U postgres postgres"
                )
            }
            Self::HttpClient => python("http")?,
            Self::Redis => python("redis")?,
            Self::Grpcio => python("grpc")?,
        })
    }
}

/// The configuration of nginx as a single process with one server and with its files in a directory.
pub(crate) fn nginx(dir: &str, server: &str) -> String {
    let places = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let places = places.map(|name| format!("{name}_temp_path {dir};"));
    format!(
        "daemon off; master_process off; pid {dir}/nginx.pid;\nevents {{}}\nhttp {{ access_log off; {}\n\
         server {{ {server} }} }}\n",
        places.concat()
    )
}

/// Checks that the programs of these workloads are installed; the error names the missing packages.
pub(crate) fn require(workloads: impl Iterator<Item = Workload>) -> anyhow::Result<()> {
    let needs = workloads.flat_map(|workload| match workload {
        Workload::Program(program) => program.needs().to_vec(),
        Workload::Page(page) if matches!(page.by, Loader::BrowserNew | Loader::BrowserKept) => {
            vec![BROWSER]
        }
        Workload::Curl => vec![CURL],
        _ => Vec::new(),
    });
    let missing = needs.filter(|(path, _)| !Path::new(path).exists());
    let missing: BTreeSet<&str> = missing.map(|(_, package)| package).collect();
    ensure!(
        missing.is_empty(),
        "missing programs: install them (Debian: apt-get install {}), or select others with --only",
        Vec::from_iter(missing).join(" ")
    );
    Ok(())
}

/// A server; it is stopped when dropped.
pub struct Server(Child);

impl Program {
    /// Starts its server, and waits until it accepts connections.
    pub(crate) fn serve(self, topology: &Topology) -> anyhow::Result<Server> {
        let dir = topology.dir.path();
        let on = topology.server_address();
        let line = self.server(on, &dir.display().to_string())?;
        let netns = &topology.net.server;
        let mut command = Command::new(PREFIX[0]);
        command.args(&PREFIX[1..3]).args(["sh", "-c", SERVE, "sh"]);
        command.arg(topology.cgroup.as_deref().unwrap_or(Path::new("")));
        command
            .args(words(&line))
            .current_dir(dir)
            .stdin(Stdio::piped());
        let server = Server(inside(netns, || Ok(command.spawn()?))?);
        let log = || fs::read_to_string(dir.join("log")).unwrap_or_default();
        eventually("connection", TIMEOUT, || {
            inside(netns, || Ok(TcpStream::connect(on).ok().map(drop)))
        })
        .with_context(|| format!("{line}: {}", log()))?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split_whitespace().map(|word| word.trim_matches('\''))
}

/// Runs a program in a directory; returns its output.
pub(crate) fn output(line: &str, dir: &Path) -> anyhow::Result<String> {
    let mut command = Command::new(PREFIX[0]);
    command
        .args(&PREFIX[1..])
        .args(words(line))
        .current_dir(dir);
    stdout_of(line, command.stdin(Stdio::null()).output()?)
}

/// A load generator.
pub(crate) struct Load {
    pub(crate) program: Program,
    pub(crate) to: SocketAddr,
}

impl Client for Load {
    fn requests(&mut self, times: &mut Times) -> anyhow::Result<()> {
        let Until::Count(count @ 1..) = times.until else {
            return Ok(());
        };
        let dir = tempfile::tempdir()?;
        let line = self.program.client(self.to, count, dir.path())?;
        let mut text = output(&line, dir.path())?;
        let files = fs::read_dir(&dir)?.flatten().map(|entry| entry.path());
        let is_log = |path: &PathBuf| path.to_string_lossy().contains("/times");
        let logs: Vec<PathBuf> = files.filter(is_log).collect();
        if !logs.is_empty() {
            text = logs
                .iter()
                .map(fs::read_to_string)
                .collect::<Result<_, _>>()?;
        }
        for line in text.lines() {
            let (us, is_answered) = request(line).with_context(|| line.to_owned())?;
            times.seen.us.push(us);
            times.seen.timed_out += u32::from(!is_answered);
        }
        ensure!(!times.seen.us.is_empty(), "{line}: no requests");
        Ok(())
    }
}

/// How long a request took, microseconds, and whether it was answered.
fn request(line: &str) -> Option<(u64, bool)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    Some(match fields[..] {
        ["failed", us] => (us.parse().ok()?, false),
        [us] => (us.parse().ok()?, true),
        // h2load: start, status, duration.
        [_, status, us] => (us.parse().ok()?, status == "200"),
        // pgbench: client, transaction, duration, script, time; with -R the time in the queue is included.
        [_, _, us, _, _, _, ..] => (us.parse().ok()?, true),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_from_every_format() {
        for (line, read) in [
            ("1234", Some((1234, true))),
            ("failed 2000000", Some((2_000_000, false))),
            ("1795789314704377\t200\t204", Some((204, true))),
            ("1795789314704377\t-1\t9000", Some((9000, false))),
            ("2 6 46532 0 1795789334 611667 42570", Some((46_532, true))),
            ("Running 8s test @ http://127.0.0.1:7780/", None),
            ("", None),
        ] {
            assert_eq!(request(line), read, "{line}");
        }
    }

    #[test]
    fn missing_programs_are_named_with_their_packages() {
        let all = [Program::Wrk, Program::Redis, Program::Redis];
        let found = require(all.into_iter().map(Workload::Program));
        let needs = all.iter().flat_map(|one| one.needs());
        let missing = needs.filter(|(path, _)| !Path::new(path).exists());
        let missing: BTreeSet<&str> = missing.map(|(_, package)| package).collect();
        let error = found
            .map_err(|error| error.to_string())
            .err()
            .unwrap_or_default();
        assert_eq!(error.is_empty(), missing.is_empty());
        assert!(
            missing
                .iter()
                .all(|package| error.matches(package).count() > 0),
            "{error}"
        );
    }
}
