//! Two namespaces joined by a veth: a client and a server.

use std::{
    fs::{self, File},
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

/// IPv4 address of the client's end.
pub const CLIENT_V4: &str = "10.88.0.1";
/// Second IPv4 address of the client's end.
const CLIENT_V4_OTHER: &str = "10.88.1.1";
/// IPv6 address of the client's end.
pub const CLIENT_V6: &str = "fd88::1";
/// IPv4 address of the server's end.
pub const SERVER_V4: &str = "10.88.0.2";
/// Second IPv4 address of the server's end.
pub const SERVER_V4_OTHER: &str = "10.88.1.2";
/// IPv6 address of the server's end.
pub const SERVER_V6: &str = "fd88::2";

/// The two namespaces; removed when dropped.
#[derive(Debug)]
pub struct Pair {
    /// Namespace of the client.
    pub client: String,
    /// Namespace of the server.
    pub server: String,
}

/// Runs a closure in a namespace, on a separate thread, so that the calling thread stays in its own.
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

/// Moves the calling thread into a namespace; processes that it starts inherit the namespace.
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
    /// Creates the namespaces, the link and the addresses. If a part fails, what was created is removed.
    pub fn new() -> anyhow::Result<Self> {
        let name = names::unique();
        let pair = Self {
            client: format!("{name}-c"),
            server: format!("{name}-s"),
        };
        let Self { client, server } = &pair;
        ip(&[], &format!("netns add {client}\nnetns add {server}"))?;
        run(&format!(
            "ip -n {client} link add {CLIENT_LINK} type veth peer name {SERVER_LINK} netns {server}"
        ))?;
        for (netns, link, v4, v6) in [
            (client, CLIENT_LINK, [CLIENT_V4, CLIENT_V4_OTHER], CLIENT_V6),
            (server, SERVER_LINK, [SERVER_V4, SERVER_V4_OTHER], SERVER_V6),
        ] {
            let [one, other] = v4;
            // nodad: duplicate address detection would keep the address tentative for a second.
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

    /// Sets a sysctl in both namespaces.
    pub fn sysctl(&self, name: &str, value: &str) -> anyhow::Result<()> {
        sysctl(&self.client, name, value)?;
        sysctl(&self.server, name, value)
    }

    /// Selects the congestion control that every kernel has, so that results are comparable.
    pub fn reno(&self) -> anyhow::Result<()> {
        self.sysctl("net.ipv4.tcp_congestion_control", "reno")
    }

    /// Drops all TCP packets that arrive at the server's `port`, IPv4 and IPv6.
    pub fn black_hole(&self, port: u16) -> anyhow::Result<()> {
        self.server_drops(&format!("tcp dport {port}"))
    }

    /// Drops the clients' ACKs of SYN-ACKs at `port`, so that the server retransmits its SYN-ACKs.
    pub fn drop_final_acks(&self, port: u16) -> anyhow::Result<()> {
        self.server_drops(&format!("tcp dport {port} tcp flags & (syn|ack) == ack"))
    }

    /// Drops packets that match at the server's input.
    pub fn server_drops(&self, matching: &str) -> anyhow::Result<()> {
        self.server_filters(&format!("add rule inet t in {matching} drop\n"))
    }

    /// Adds rules to the chain `in` of the table `t` at the server's input.
    fn server_filters(&self, added: &str) -> anyhow::Result<()> {
        filters(&self.server, added)
    }

    /// Drops every SYN at the server's input for `outage` after the first SYN of each IPv4 client. The kernel's clock
    /// ends it.
    pub fn server_loses_syns_for(&self, outage: Duration) -> anyhow::Result<()> {
        let each = [(String::new(), outage)];
        self.server_filters(&outages(Lost::Syns, ("ipv4_addr", "ip saddr"), &each))
    }

    /// Drops packets that match at the client's input.
    pub fn client_drops(&self, matching: &str) -> anyhow::Result<()> {
        filters(
            &self.client,
            &format!("add rule inet t in {matching} drop\n"),
        )
    }

    /// Drops the SYNs of each connection at the server's input for `outage` after its first. On a busy machine many
    /// connections begin over a longer time than a short outage lasts.
    pub fn server_loses_each_syn_for(&self, outage: Duration) -> anyhow::Result<()> {
        let each = [(String::new(), outage)];
        self.server_filters(&outages(Lost::Syns, ("inet_service", "tcp sport"), &each))
    }

    /// Drops the SYN-ACKs of each connection at the client's input for `outage` after its first.
    pub fn client_loses_each_syn_ack_for(&self, outage: Duration) -> anyhow::Result<()> {
        let each = [(String::new(), outage)];
        filters(
            &self.client,
            &outages(Lost::SynAcks, ("inet_service", "tcp dport"), &each),
        )
    }

    /// Removes all rules.
    pub fn drop_nothing(&self) -> anyhow::Result<()> {
        for netns in [&self.client, &self.server] {
            nft(netns, &["flush", "ruleset"], "")?;
        }
        Ok(())
    }
}

/// The packets of a handshake that an outage drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// SYNs, where the server receives them.
    Syns,
    /// SYN-ACKs, where the client receives them.
    SynAcks,
}

impl Lost {
    /// The nft(8) expression that matches them.
    const fn packets(self) -> &'static str {
        match self {
            Self::Syns => "tcp flags & (syn|ack) == syn",
            Self::SynAcks => "tcp flags & (syn|ack) == (syn|ack)",
        }
    }
}

/// Drops handshake packets by the client's port. Each port has its own outage, which begins with the first packet it
/// drops; the kernel ends it with a resolution of one jiffy (`nft_set_elem_expired()`, Linux 6.12). Earlier rules of
/// both namespaces are removed.
pub fn lose_handshakes(
    client: &str,
    server: &str,
    each: &[(u16, Lost, Duration)],
) -> anyhow::Result<()> {
    for (netns, lost, key) in [
        (server, Lost::Syns, "tcp sport"),
        (client, Lost::SynAcks, "tcp dport"),
    ] {
        let own = each.iter().filter(|(_, which, _)| *which == lost);
        let own: Vec<_> = own
            .map(|(port, _, outage)| (format!("{key} {port}"), *outage))
            .collect();
        nft(netns, &["flush", "ruleset"], "")?;
        filters(netns, &outages(lost, ("inet_service", key), &own))?;
    }
    Ok(())
}

/// Rules that drop packets for a period that begins with the first packet of each key.
fn outages(lost: Lost, (kind, key): (&str, &str), each: &[(String, Duration)]) -> String {
    let (packets, size) = (lost.packets(), each.len().max(1024));
    let mut rules = format!(
        "add set inet t begun {{ type {kind}; flags dynamic; size {size}; }}\n\
         add set inet t lasting {{ type {kind}; flags dynamic,timeout; size {size}; }}\n\
         add rule inet t in {packets} {key} @lasting drop\n"
    );
    for (matching, outage) in each {
        let millis = outage.as_millis();
        rules.push_str(&format!(
            "add rule inet t in {packets} {matching} {key} != @begun add @begun {{ {key} }} \
             add @lasting {{ {key} timeout {millis}ms }} drop\n"
        ));
    }
    rules
}

/// Adds rules to the chain `in` of the table `t` at a namespace's input.
fn filters(netns: &str, added: &str) -> anyhow::Result<()> {
    let rules = format!(
        "add table inet t\nadd chain inet t in {{ type filter hook input priority 0; }}\n{added}"
    );
    nft(netns, &["-f", "-"], &rules).map(drop)
}

/// Waits until the namespace accepts packets to this IPv6 address. Even without duplicate address detection the kernel
/// creates the local route in a workqueue after the address was added (`addrconf_dad_work()`, Linux 6.12; 0.2 s later
/// on a busy host), and drops packets that arrive before.
pub fn until_local(netns: &str, address: &str) -> anyhow::Result<()> {
    eventually("local route", TIMEOUT, || {
        let routes = run(&format!("ip -n {netns} -6 route show table local"))?;
        let mut words = routes.lines().map(|line| line.split_whitespace().nth(1));
        Ok(words.any(|to| to == Some(address)).then_some(()))
    })
    .with_context(|| format!("to {address} in {netns}"))
}

/// A counter of a namespace, in a group of `/proc/net/netstat` such as "TcpExt: ".
pub fn netstat(netns: &str, group: &str, name: &str) -> anyhow::Result<u64> {
    let text = run(&format!("ip netns exec {netns} cat /proc/net/netstat"))?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(group));
    let (names, values) = lines.next().zip(lines.next()).context("no such group")?;
    let mut pairs = names.split(' ').zip(values.split(' '));
    let (_, value) = pairs
        .find(|(known, _)| *known == name)
        .context("no such counter")?;
    Ok(value.parse()?)
}

/// Sets a sysctl in a test namespace.
pub fn sysctl(netns: &str, name: &str, value: &str) -> anyhow::Result<()> {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    inside(netns, || Ok(fs::write(path, value)?)).with_context(|| format!("{name}={value}"))
}

/// Runs `ip` once for all lines, because starting the program takes longer than most of its commands.
/// Lines after one that fails are not run.
pub(crate) fn ip(options: &[&str], lines: &str) -> anyhow::Result<()> {
    let mut ip = Command::new("ip");
    run_with_input(ip.args(options).args(["-batch", "-"]), lines).map(drop)
}

/// Runs nft(8) in a namespace with this text on its stdin, and returns what it prints.
pub fn nft(netns: &str, args: &[&str], text: &str) -> anyhow::Result<String> {
    inside(netns, || {
        run_with_input(Command::new("nft").args(args), text)
    })
}

impl Drop for Pair {
    fn drop(&mut self) {
        let Self { client, server, .. } = self;
        // Removing either namespace also removes the link. A failure is ignored, because drop() cannot report it.
        let lines = format!("netns del {client}\nnetns del {server}");
        let _gone = ip(&["-force"], &lines);
    }
}

/// Removes the namespace with this path.
pub(crate) fn remove(path: &Path) {
    let name = path.file_name().unwrap_or_default().display();
    let _gone = run(&format!("ip netns del {name}"));
}
