//! `[agent]`: how the daemon runs.

use std::{
    fmt,
    net::SocketAddr,
    path::{Component, Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, Unexpected},
};

use super::DEFAULT_SOCKET;
use crate::policy::{
    MAX_ENTRIES_LIMIT,
    units::{format_duration, parse_duration},
};

/// `[agent]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentConfig {
    /// The cgroup to attach to.
    #[serde(deserialize_with = "parsed")]
    pub cgroup: CgroupSetting,
    /// Directory on a BPF file system for the pins of link and maps.
    #[serde(deserialize_with = "pin_dir")]
    pub pin_dir: PathBuf,
    /// The control socket.
    #[serde(deserialize_with = "socket")]
    pub socket: PathBuf,
    /// Directory for runtime entries and the instance lock.
    #[serde(deserialize_with = "absolute")]
    pub state_dir: PathBuf,
    /// Directory for learnt values and other state that survives a reboot.
    #[serde(deserialize_with = "absolute")]
    pub persistent_dir: PathBuf,
    /// Group whose members may use the socket, besides root.
    pub group: String,
    /// What happens to the policies when the daemon ends.
    #[serde(deserialize_with = "parsed")]
    pub on_exit: OnExit,
    /// Where the metrics are served.
    #[serde(deserialize_with = "parsed")]
    pub metrics: MetricsSetting,
    /// Entries that the maps have room for before larger ones replace them; `None`: the limit, and
    /// fewer before Linux 5.11.
    #[serde(deserialize_with = "max_entries")]
    pub max_entries: Option<u32>,
    /// Whether the program is attached; false keeps hosts with this configuration detached.
    pub attach: bool,
    /// Whether open sockets get the options of a policy that begins to cover them.
    pub apply_to_open: bool,
    /// Whether statistics are kept.
    pub statistics: bool,
    /// Whether connections that no entry covers are counted.
    pub count_unmatched: bool,
    /// Samples 1 in N loss-free connections until they close.
    #[serde(deserialize_with = "sampling")]
    pub sampling: u32,
    /// When smoothed RTTs are sampled.
    #[serde(deserialize_with = "parsed")]
    pub rtt_sampling: RttSampling,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            cgroup: CgroupSetting::Auto,
            pin_dir: "/sys/fs/bpf/rto-agent".into(),
            socket: DEFAULT_SOCKET.into(),
            state_dir: "/run/rto-agent".into(),
            persistent_dir: "/var/lib/rto-agent".into(),
            group: "root".to_owned(),
            on_exit: OnExit::Detach,
            metrics: MetricsSetting::Off,
            max_entries: None,
            attach: true,
            apply_to_open: false,
            statistics: true,
            count_unmatched: false,
            sampling: SAMPLING,
            rtt_sampling: RttSampling::AtEnd,
        }
    }
}

/// `cgroup = ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupSetting {
    /// The cgroup2 root.
    Auto,
    /// The given directory.
    Path(PathBuf),
}

impl FromStr for CgroupSetting {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            path => absolute_path(path).map(Self::Path),
        }
    }
}

/// `metrics = ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsSetting {
    /// Not served.
    Off,
    /// At an address and port.
    Tcp(SocketAddr),
    /// At a Unix socket.
    Unix(PathBuf),
}

impl FromStr for MetricsSetting {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self::Off);
        }
        if let Some(path) = text.strip_prefix("unix:") {
            if !path.starts_with('/') {
                return Err("unix: must be followed by an absolute path");
            }
            return socket_path(path).map(Self::Unix);
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.port() == 0 => Err("the port must not be 0"),
            Ok(address) => Ok(Self::Tcp(address)),
            Err(_) => Err(
                "metrics must be \"off\", an address and port like \"127.0.0.1:9464\", or \
                 \"unix:/run/rto-agent/metrics.sock\"",
            ),
        }
    }
}

/// `rtt_sampling = ...`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RttSampling {
    /// Never.
    Off,
    /// When a connection closes.
    AtEnd,
    /// When it closes, and at most once in this interval before.
    Every(Duration),
}

/// Shortest and longest `rtt_sampling`.
const RTT_SAMPLING: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(24 * 3600);

impl FromStr for RttSampling {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            "end" => Ok(Self::AtEnd),
            _ => match parse_duration(text) {
                Ok(interval) if RTT_SAMPLING.contains(&interval) => Ok(Self::Every(interval)),
                Ok(_) => Err("the interval of rtt_sampling must be 1ms to 24h"),
                Err(_) => Err(
                    "rtt_sampling must be \"off\", \"end\" (at the end of each connection) or an \
                     interval like \"1s\" (at the end, and at this interval)",
                ),
            },
        }
    }
}

impl fmt::Display for RttSampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::AtEnd => f.write_str("end"),
            Self::Every(interval) => f.write_str(&format_duration(*interval)),
        }
    }
}

/// `on_exit = ...`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExit {
    /// The program is detached, and nothing stays in the kernel.
    Detach,
    /// The policies stay in force.
    Keep,
}

impl FromStr for OnExit {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "detach" => Ok(Self::Detach),
            "keep" => Ok(Self::Keep),
            _ => Err("on_exit must be \"detach\" or \"keep\""),
        }
    }
}

fn parsed<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err: fmt::Display>,
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(D::Error::custom)
}

fn absolute_path(text: &str) -> Result<PathBuf, &'static str> {
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err("the path must be absolute (begin with /)");
    }
    if text.contains('\0') {
        return Err("a path must not contain NUL");
    }
    Ok(path.to_owned())
}

/// Longest path of a Unix socket, bytes: `sun_path` has 108 (unix(7)), with the terminating NUL.
pub const MAX_SOCKET_PATH: usize = 107;

fn socket_path(text: &str) -> Result<PathBuf, &'static str> {
    let path = absolute_path(text)?;
    if text.len() > MAX_SOCKET_PATH {
        return Err(
            "the path of a Unix socket must have at most 107 bytes (unix(7)); choose a shorter one",
        );
    }
    Ok(path)
}

fn socket<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    let text = String::deserialize(deserializer)?;
    socket_path(&text).map_err(D::Error::custom)
}

fn absolute<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    let text = String::deserialize(deserializer)?;
    absolute_path(&text).map_err(D::Error::custom)
}

fn pin_dir<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    let path = absolute(deserializer)?;
    let has_dot = |c: Component<'_>| matches!(c, Component::Normal(name) if name.as_encoded_bytes().contains(&b'.'));
    if path.components().any(has_dot) {
        return Err(D::Error::custom(
            "names in a BPF file system must not contain dots",
        ));
    }
    Ok(path)
}

fn max_entries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    from_one(deserializer, "1", MAX_ENTRIES_LIMIT).map(Some)
}

/// A whole number from 1 to `most`; errors show the lower bound as `one`.
fn from_one<'de, D>(deserializer: D, one: &str, most: u32) -> Result<u32, D::Error>
where
    D: Deserializer<'de>,
{
    let number = i64::deserialize(deserializer)?;
    match u32::try_from(number) {
        Ok(number) if (1..=most).contains(&number) => Ok(number),
        _ => {
            let wanted = format!("a whole number from {one} to {most}");
            Err(D::Error::invalid_value(
                Unexpected::Signed(number),
                &wanted.as_str(),
            ))
        }
    }
}

/// The default of `sampling`. Following a connection until it closes takes about 4 us at each end,
/// many times the cost of an unsampled connection. One in 256 adds a thirtieth, and yields a sample
/// every few seconds at a hundred connections a second.
const SAMPLING: u32 = 256;
/// The largest `sampling`.
const SAMPLING_MAX: u32 = 65_536;

fn sampling<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    from_one(deserializer, "1 (all connections)", SAMPLING_MAX)
}
