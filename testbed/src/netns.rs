//! Two namespaces joined by a veth: a client and a server.

use std::{
    fs::{self, File},
    marker::PhantomData,
    panic,
    path::Path,
    process::Command,
    thread,
    time::Duration,
};

use anyhow::Context as _;
use nix::sched::{CloneFlags, setns};

use crate::{
    names,
    process::{run, run_with_input},
    wait::{TIMEOUT, eventually},
};

/// Addresses of the client's end.
pub const CLIENT_V4: &str = "10.88.0.1";
/// A second one.
const CLIENT_V4_OTHER: &str = "10.88.1.1";
/// Its IPv6 address.
pub const CLIENT_V6: &str = "fd88::1";
/// Addresses of the server's end.
pub const SERVER_V4: &str = "10.88.0.2";
/// A second one.
pub const SERVER_V4_OTHER: &str = "10.88.1.2";
/// Its IPv6 address.
pub const SERVER_V6: &str = "fd88::2";

/// The two namespaces; removed when dropped. Not `Send`: the test that made it removes it.
#[derive(Debug)]
pub struct Pair {
    /// Namespace of the client.
    pub client: String,
    /// Namespace of the server.
    pub server: String,
    _not_send: PhantomData<*const ()>,
}

/// Runs this in a namespace, on a thread of its own, because the one that asks has to stay in its namespace.
///
/// # Errors
///
/// If there is no such namespace, or what is run fails.
pub fn inside<T: Send>(
    netns: &str,
    run: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            join(netns)?;
            run()
        });
        let joined = thread.join();
        joined.unwrap_or_else(|panic| panic::resume_unwind(panic))
    })
    .with_context(|| format!("in {netns}"))
}

/// Has the calling thread, and the processes it starts, in this namespace from now on.
pub(crate) fn join(netns: &str) -> anyhow::Result<()> {
    let path = format!("/run/netns/{netns}");
    let namespace = File::open(&path).context(path)?;
    Ok(setns(namespace, CloneFlags::CLONE_NEWNET)?)
}

/// The client's interface.
pub const CLIENT_LINK: &str = "veth-c";
/// The server's interface.
pub const SERVER_LINK: &str = "veth-s";

impl Pair {
    /// Makes the namespaces, the link and the addresses.
    ///
    /// # Errors
    ///
    /// If `ip` fails; what was made is removed.
    pub fn new() -> anyhow::Result<Self> {
        let name = names::unique();
        let pair = Self {
            client: format!("{name}-c"),
            server: format!("{name}-s"),
            _not_send: PhantomData,
        };
        let Self { client, server, .. } = &pair;
        ip(&[], &format!("netns add {client}\nnetns add {server}"))?;
        run(&format!(
            "ip -n {client} link add {CLIENT_LINK} type veth peer name {SERVER_LINK} netns {server}"
        ))?;
        for (netns, link, v4, v6) in [
            (client, CLIENT_LINK, [CLIENT_V4, CLIENT_V4_OTHER], CLIENT_V6),
            (server, SERVER_LINK, [SERVER_V4, SERVER_V4_OTHER], SERVER_V6),
        ] {
            let [one, other] = v4;
            // Without duplicate detection, which would keep the address tentative for a second.
            let lines = format!(
                "addr add {one}/24 dev {link}
                addr add {other}/24 dev {link}
                addr add {v6}/64 dev {link} nodad
                link set lo up
                link set {link} up"
            );
            ip(&["-n", netns], &lines)?;
            sysctl(netns, "net.ipv4.tcp_no_metrics_save", "1")?;
        }
        until_local(client, CLIENT_V6)?;
        until_local(server, SERVER_V6)?;
        Ok(pair)
    }

    /// Drops everything TCP that arrives at the server's `port` (all families).
    ///
    /// # Errors
    ///
    /// If `nft` fails.
    pub fn black_hole(&self, port: u16) -> anyhow::Result<()> {
        self.server_drops(&format!("tcp dport {port}"))
    }

    /// Drops the clients' answers to SYN-ACKs at `port`, so that the server repeats them.
    ///
    /// # Errors
    ///
    /// If `nft` fails.
    pub fn drop_final_acks(&self, port: u16) -> anyhow::Result<()> {
        self.server_drops(&format!("tcp dport {port} tcp flags & (syn|ack) == ack"))
    }

    /// Drops what matches at the server's input.
    ///
    /// # Errors
    ///
    /// If `nft` fails.
    pub fn server_drops(&self, matching: &str) -> anyhow::Result<()> {
        self.server_filters(&format!("add rule inet t in {matching} drop\n"))
    }

    /// Adds to the table `t` and its chain `in` at the server's input.
    fn server_filters(&self, added: &str) -> anyhow::Result<()> {
        let rules = format!(
            "add table inet t\nadd chain inet t in {{ type filter hook input priority 0; }}\n{added}"
        );
        nft(&self.server, &["-f", "-"], &rules).map(drop)
    }

    /// Drops every SYN at the server's input from the first one of an IPv4 client on, for so long; the kernel's clock
    /// ends it.
    ///
    /// # Errors
    ///
    /// If `nft` fails.
    pub fn server_loses_syns_for(&self, outage: Duration) -> anyhow::Result<()> {
        let millis = outage.as_millis();
        let syn = "add rule inet t in tcp flags & (syn|ack) == syn ip saddr";
        let sets = format!(
            "add set inet t begun {{ type ipv4_addr; flags dynamic; size 16; }}\n\
             add set inet t lasting {{ type ipv4_addr; flags dynamic,timeout; timeout {millis}ms; size 16; }}\n"
        );
        self.server_filters(&format!(
            "{sets}{syn} @lasting drop\n\
             {syn} != @begun add @begun {{ ip saddr }} add @lasting {{ ip saddr }} drop\n"
        ))
    }

    /// Drops nothing any more.
    ///
    /// # Errors
    ///
    /// If `nft` fails.
    pub fn drop_nothing(&self) -> anyhow::Result<()> {
        nft(&self.server, &["flush", "ruleset"], "").map(drop)
    }
}

/// Waits until packets to this IPv6 address are taken: also without duplicate detection the kernel makes its local route
/// in a workqueue, after the address was added (`addrconf_dad_work()`, Linux 6.12; measured 0.2 s later on a busy host),
/// and drops what comes before.
pub(crate) fn until_local(netns: &str, address: &str) -> anyhow::Result<()> {
    eventually("local route", TIMEOUT, || {
        let routes = run(&format!("ip -n {netns} -6 route show table local"))?;
        let mut words = routes.lines().map(|line| line.split_whitespace().nth(1));
        Ok(words.any(|to| to == Some(address)).then_some(()))
    })
    .with_context(|| format!("to {address} in {netns}"))
}

/// Sets a sysctl of one of our namespaces.
///
/// # Errors
///
/// If there is none of that name.
pub fn sysctl(netns: &str, name: &str, value: &str) -> anyhow::Result<()> {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    inside(netns, || Ok(fs::write(path, value)?)).with_context(|| format!("{name}={value}"))
}

/// Runs `ip` with these options once for all lines, as starting a program takes it longer than most of them.
///
/// # Errors
///
/// If it fails; it does nothing more then.
pub(crate) fn ip(options: &[&str], lines: &str) -> anyhow::Result<()> {
    let mut ip = Command::new("ip");
    run_with_input(ip.args(options).args(["-batch", "-"]), lines).map(drop)
}

/// What nft(8) prints in a namespace, with this text at its standard input.
///
/// # Errors
///
/// If it fails.
pub(crate) fn nft(netns: &str, args: &[&str], text: &str) -> anyhow::Result<String> {
    inside(netns, || {
        run_with_input(Command::new("nft").args(args), text)
    })
}

impl Drop for Pair {
    fn drop(&mut self) {
        let Self { client, server, .. } = self;
        // The link goes with either. Nothing more can be done in a drop than try.
        let lines = format!("netns del {client}\nnetns del {server}");
        let _gone = ip(&["-force"], &lines);
    }
}

/// Removes the namespace of this path.
pub(crate) fn remove(path: &Path) {
    let name = path.file_name().unwrap_or_default().display();
    let _gone = run(&format!("ip netns del {name}"));
}
