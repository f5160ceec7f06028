//! Addresses of the two machines, which share a link.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use rto_testbed::{process::run, wait::eventually};

/// Longest time until the device appears.
const TIMEOUT: Duration = Duration::from_secs(60);
const DEVICE: &str = "eth0";
/// The machine with the agent.
pub(super) const HOST: [&str; 2] = ["10.90.0.1", "fd90::1"];
pub(super) const PEER: [&str; 3] = ["10.90.0.2", "10.90.0.3", "fd90::2"];
/// Addresses routed to the peer, which drops their packets silently.
pub(super) const LOST: [&str; 2] = ["10.90.1.1", "fd90:0:0:1::1"];
/// Port of the servers.
pub(super) const PORT: u16 = 4900;
/// Port on which the host controls the peer.
pub(super) const CONTROL_PORT: u16 = 4901;

/// Configures the device of the host.
pub(super) fn set_up_host() -> anyhow::Result<()> {
    set_up(&HOST)?;
    for (lost, via) in LOST.iter().zip([PEER[0], PEER[2]]) {
        run(&format!("ip route add {lost} via {via}"))?;
    }
    Ok(())
}

/// Configures the device of the peer.
pub(super) fn set_up_peer() -> anyhow::Result<()> {
    set_up(&PEER)?;
    for lost in LOST {
        run(&format!("ip route add blackhole {lost}"))?;
    }
    Ok(())
}

fn set_up(own: &[&str]) -> anyhow::Result<()> {
    let device = Path::new("/sys/class/net").join(DEVICE);
    eventually("network device", TIMEOUT, || {
        Ok(device.exists().then_some(()))
    })?;
    for address in own {
        // nodad: duplicate address detection would keep an IPv6 address tentative for a second.
        let (length, options) = if address.contains(':') {
            (64, " nodad")
        } else {
            (24, "")
        };
        run(&format!(
            "ip addr add {address}/{length} dev {DEVICE}{options}"
        ))?;
    }
    run(&format!("ip link set {DEVICE} up")).map(drop)
}

pub(super) fn at(address: &str, port: u16) -> anyhow::Result<SocketAddr> {
    Ok(SocketAddr::new(address.parse::<IpAddr>()?, port))
}

pub(super) fn all_at(addresses: &[&str], port: u16) -> anyhow::Result<Vec<SocketAddr>> {
    addresses.iter().map(|address| at(address, port)).collect()
}
