//! Requirements of single tests besides root and the programs that all tests use.

use rto_agent_kernel::kernel::btf::Btf;
use rto_testbed::{emulated::is_machine, process::require};
use rto_tests::features;

use super::scale;

/// Something that may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A feature of the kernel; if it is missing, the test asserts that the agent reports that
    /// ([`super::kernel::assert_absent`]).
    Feature(&'static str),
    Program(&'static str),
    /// A program that this variable of the environment names.
    Named(&'static str),
    /// A disposable machine.
    WholeMachine,
}

pub(crate) const THIN_LINEAR: Need = Need::Feature("bpf-thin-linear");
pub(crate) const RTO_MAX: Need = Need::Feature("tcp-rto-max");
pub(crate) const TCP_ITERATOR: Need = Need::Feature("iter-tcp");
pub(crate) const LISTENER: Need = Need::Feature("reads-listener");
/// Not used by the agent: since Linux 6.12 MPTCP is off for an hour after a fallback.
pub(crate) const MPTCP_BLACKHOLE: Need = Need::Feature("mptcp-blackhole");
/// Not used by the agent: Debian's 5.10 is built without it.
pub(crate) const MPTCP: Need = Need::Feature("mptcp");
/// The sysctl that a policy depends on, which may differ in a network namespace.
pub(crate) const LINEAR_SYNS: Need = Need::Feature("tcp_syn_linear_timeouts");
/// Not used by the agent: applications, and so tests, read a socket's rto_min with it.
pub(crate) const RTO_MIN_OPTION: Need = Need::Feature("tcp-rto-min-us");
/// The kernel's own timers of data, which `stats` compares with: Linux 6.11.
pub(crate) const DATA_TIMERS: Need = Need::Feature("tcp_rto_min_us");
/// A socket option that keeps the flow label: Linux 5.18.
pub(crate) const TXREHASH: Need = Need::Feature("txrehash");
/// Not used by the agent: a congestion control under which no stream is thin.
pub(crate) const BBR: Need = Need::Feature("bbr");
/// How long a request waited for its last ACK; without it no window of an accepted connection is restored.
pub(crate) const TOTAL_RTO_TIME: Need = Need::Feature("total-rto-time");
/// Batches of LPM tries; without them the agent writes entry by entry.
pub(crate) const LPM_BATCHES: Need = Need::Feature("lpm-batches");

/// Headless Chromium.
pub(crate) const BROWSER: Need = Need::Program(rto_tests::browser::BROWSER);
/// Web servers, and ping(8), of two of the lab's experiments.
pub(crate) const NGINX: Need = Need::Program("nginx");
pub(crate) const APACHE: Need = Need::Program("apache2");
pub(crate) const LDD: Need = Need::Program("ldd");
pub(crate) const PING: Need = Need::Program("ping");
pub(crate) const BASH: Need = Need::Program("bash");
pub(crate) const CURL: Need = Need::Program("curl");
pub(crate) const FISH: Need = Need::Program("fish");
/// gRPC for Python, which has no program of its own.
pub(crate) const GRPC: Need = Need::Program("/usr/lib/python3/dist-packages/grpc/__init__.py");
pub(crate) const GO: Need = Need::Program("go");
pub(crate) const PROMETHEUS: Need = Need::Program("prometheus");
/// A Prometheus 3, which Debian 12 and 13 do not have: docs/internals/testing.md says how to build one.
pub(crate) const PROMETHEUS3: &str = "RTO_PROMETHEUS3";
pub(crate) const NATIVE_HISTOGRAMS: Need = Need::Named(PROMETHEUS3);
pub(crate) const PROMTOOL: Need = Need::Program("promtool");
pub(crate) const PYTHON3: Need = Need::Program("python3");
pub(crate) const ZSH: Need = Need::Program("zsh");
/// Setting CLOCK_REALTIME, which is global.
pub(crate) const WHOLE_MACHINE: Need = Need::WholeMachine;

impl Need {
    /// If the agent does not answer, no feature counts as missing: the tests then show what is wrong.
    pub(crate) fn is_missing(&self) -> bool {
        let no_sysctl = |name: &str| !std::path::Path::new("/proc/sys/net").join(name).exists();
        match *self {
            MPTCP => no_sysctl("mptcp"),
            MPTCP_BLACKHOLE => no_sysctl("mptcp/blackhole_timeout"),
            LINEAR_SYNS => no_sysctl("ipv4/tcp_syn_linear_timeouts"),
            DATA_TIMERS => no_sysctl("ipv4/tcp_rto_min_us"),
            TXREHASH => no_sysctl("core/txrehash"),
            BBR => !has_bbr(),
            TOTAL_RTO_TIME => {
                Btf::vmlinux().is_ok_and(|btf| btf.socket_types().total_rto_time == 0)
            }
            RTO_MIN_OPTION => !features::tells_rto_min(),
            LPM_BATCHES => !scale::has_batches().unwrap_or(true),
            Self::Feature(name) => features::lacks(name).unwrap_or(false),
            Self::Program(name) => require(&[name]).is_err(),
            Self::Named(variable) => std::env::var_os(variable).is_none(),
            Self::WholeMachine => !is_machine(),
        }
    }

    /// In a word or two; also used in the matrix.
    pub(crate) fn why_not(&self) -> String {
        match self {
            Self::Feature(name) => format!("absent: {name}"),
            Self::Program(name) => format!("{name} is not installed"),
            Self::Named(variable) => format!("{variable} is not set"),
            Self::WholeMachine => "only in cargo xtask vm".to_owned(),
        }
    }
}

fn has_bbr() -> bool {
    let names = "/proc/sys/net/ipv4/tcp_available_congestion_control";
    std::fs::read_to_string(names).is_ok_and(|names| names.split_whitespace().any(|n| n == "bbr"))
}
