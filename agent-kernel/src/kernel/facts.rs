//! The host's facts from which settings are computed.

use anyhow::Context as _;
use nix::{
    errno::Errno,
    libc,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};
use rto_agent_core::{policy::HostFacts, wire::kernel::Feature};

use super::{
    features::{BPF_TIMERS, READS_LISTENER, SYN_SCHEDULE, can_set},
    hz, sysctl, tcp_option, version,
};

const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Reads the facts from this host. Facts that `features` does not contain or leaves unknown are
/// determined as far as possible without privileges.
pub fn host_facts(features: &[Feature]) -> anyhow::Result<HostFacts> {
    let has_bpf_thin_linear = match can_set(features, "bpf-thin-linear") {
        Some(has) => has,
        None => version::running()?.at_least((6, 1)),
    };
    Ok(HostFacts {
        hz: hz::measure().context("HZ cannot be measured")?,
        tcp_syn_retries: sysctl::ipv4("tcp_syn_retries")
            .context("net.ipv4.tcp_syn_retries cannot be read; is /proc mounted?")?,
        tcp_synack_retries: sysctl::ipv4("tcp_synack_retries")
            .context("net.ipv4.tcp_synack_retries cannot be read; is /proc mounted?")?,
        reads_listener: can_set(features, READS_LISTENER) == Some(true),
        reads_timers: can_set(features, BPF_TIMERS) == Some(true),
        tcp_syn_linear_timeouts: sysctl::ipv4("tcp_syn_linear_timeouts").unwrap_or(0),
        has_rto_max: can_set(features, "tcp-rto-max").unwrap_or_else(has_rto_max),
        shapes_syns: can_set(features, SYN_SCHEDULE) != Some(false),
        has_bpf_thin_linear,
        is_bbr_default: sysctl::ipv4::<String>("tcp_congestion_control")
            .is_some_and(|name| name.starts_with("bbr")),
    })
}

/// Whether TCP sockets support TCP_RTO_MAX_MS. The kernel refuses an unknown option with
/// ENOPROTOOPT.
fn has_rto_max() -> bool {
    let Ok(socket) = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    ) else {
        return false;
    };
    tcp_option::get(&socket, TCP_RTO_MAX_MS) != Err(Errno::ENOPROTOOPT)
}
