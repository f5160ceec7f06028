//! `[agent]`: how the daemon runs.

use std::{
    fmt,
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
    path::{Component, Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, Unexpected},
};

use crate::{
    path_security,
    policy::{
        Key, MAX_ENTRIES_LIMIT, key,
        units::{format_duration, parse_duration},
    },
};

/// The default path of the control socket.
pub const DEFAULT_SOCKET: &str = "/run/rto-agent/control.sock";

/// The table of `[agent]`'s keys. A row defines the field, the row of the reference page, and whether
/// a changed value takes effect at the next start only.
macro_rules! keys {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident: $type:ty $(, by $with:literal)? {
            initially $value:expr,
            values $values:literal,
            default $default:literal,
            $(effective $when:ident,)?
            $(features [$($feature:literal),+],)?
            accepted [$($accepted:literal),+],
            refused [$($refused:literal),+],
        }
    )+) => {
        /// `[agent]`.
        #[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct AgentConfig {
            $(
                $(#[doc = $doc])+
                $(#[serde(deserialize_with = $with)])?
                pub $name: $type,
            )+
        }

        impl Default for AgentConfig {
            fn default() -> Self {
                Self { $($name: $value),+ }
            }
        }

        impl AgentConfig {
            /// The keys that differ from `other`, and take effect at the next start.
            pub fn restart_keys(&self, other: &Self) -> Vec<&'static str> {
                let mut keys = Vec::new();
                $($(
                    if at!($when) && self.$name != other.$name {
                        keys.push(stringify!($name));
                    }
                )?)+
                keys
            }
        }

        /// All keys, in the order of the reference.
        pub const AGENT_KEYS: &[Key] = &[$(key!(
            $name, [$($doc),+], $values, $default, None,
            [$($($feature),+)?], [$($accepted),+], [$($refused),+]
        )),+];
    };
}

/// When a key takes effect.
macro_rules! at {
    (next_start) => {
        true
    };
}

keys! {
    /// The cgroup2 directory to attach to. `"auto"` is the root of the hierarchy, wherever it is
    /// mounted: every socket of the host. The daemon does not start in a container with a private
    /// cgroup namespace
    cgroup: CgroupSetting, by "parsed" {
        initially CgroupSetting::Auto, values "`\"auto\"` or an absolute path",
        default "`\"auto\"`",
        effective next_start,
        accepted ["'/sys/fs/cgroup/a'"], refused ["'a'", "1"],
    }
    /// Directory for the pins of the link and the maps; created if it is missing. The pins keep
    /// policies active when the daemon is killed, or stops with `on_exit = "keep"`. The next start
    /// with the same `pin_dir` adopts them, so run `rto-agent detach` before you change it
    pin_dir: PathBuf, by "pin_dir" {
        initially "/sys/fs/bpf/rto-agent".into(),
        values "absolute path on a BPF file system, without dots",
        default "`\"/sys/fs/bpf/rto-agent\"`",
        effective next_start,
        accepted ["'/sys/fs/bpf/other'"], refused ["'pins'", "'/sys/fs/bpf/a.b'"],
    }
    /// The control socket
    socket: PathBuf, by "socket" {
        initially DEFAULT_SOCKET.into(), values "absolute path, at most 107 bytes",
        default "`\"/run/rto-agent/control.sock\"`",
        effective next_start,
        accepted ["'/run/other.sock'"],
        refused ["'control.sock'", "'/run/rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-rto-agent-abc'"],
    }
    /// Directory of the runtime entries and the instance lock; not `persistent_dir`
    state_dir: PathBuf, by "absolute" {
        initially "/run/rto-agent".into(), values "absolute path", default "`\"/run/rto-agent\"`",
        effective next_start,
        accepted ["'/run/other'"], refused ["'state'"],
    }
    /// Directory of data that survives a reboot: [learnt values](#values-that-are-learnt),
    /// [proven harm](holdout.md) and the [last good
    /// configuration](runbook.md#rtoagentreloadfailed)
    persistent_dir: PathBuf, by "absolute" {
        initially "/var/lib/rto-agent".into(), values "absolute path",
        default "`\"/var/lib/rto-agent\"`",
        effective next_start,
        accepted ["'/var/lib/other'"], refused ["'lib'"],
    }
    /// The group that may use the socket in addition to root
    group: String {
        initially "root".to_owned(), values "name of a group, or its number as a string",
        default "`\"root\"`",
        effective next_start,
        accepted ["'netops'", "'998'"], refused ["0"],
    }
    /// Whether a daemon that stops removes the policies from the kernel (`"detach"`) or leaves them
    /// active (`"keep"`)
    on_exit: OnExit {
        initially OnExit::Detach, values "`\"detach\"` or `\"keep\"`", default "`\"detach\"`",
        accepted ["'keep'"], refused ["'stop'", "true"],
    }
    /// The address that serves the [metrics](../reference/metrics.md)
    metrics: MetricsSetting, by "parsed" {
        initially MetricsSetting::Off, values "`\"off\"` or `\"ADDRESS:PORT\"`",
        default "`\"off\"`",
        effective next_start,
        accepted ["'127.0.0.1:9464'", "'[::1]:9464'"],
        refused ["'127.0.0.1:0'", "'localhost:9464'", "'unix:/run/m.sock'"],
    }
    /// Whether the metrics have [all counters and histograms](../reference/metrics.md#cardinality) of each policy
    metrics_detail: bool {
        initially false, values "boolean", default "`false`",
        effective next_start,
        accepted ["true"], refused ["'full'"],
    }
    /// Initial [capacity](../reference/scale.md#room) for entries. The maps grow on demand
    max_entries: Option<u32>, by "max_entries" {
        initially None, values "1 to 4194304", default "4194304; 16384 before Linux 5.11",
        accepted ["1", "4194304"], refused ["0", "4194305", "'1'"],
    }
    /// `false` detaches every host that has this configuration, like `rto-agent detach` on each of
    /// them; `true` attaches these hosts again, except hosts that were detached by `rto-agent detach`
    attach: bool {
        initially true, values "boolean", default "`true`",
        accepted ["false"], refused ["'false'"],
    }
    /// Whether a new or changed policy also sets its options on sockets that are already open
    /// ([scope](../reference/kernel.md#sockets-that-are-open-already))
    apply_to_open: bool {
        initially false, values "boolean", default "`false`",
        features ["rto-hook-on-open-sockets", "btf", "iter-tcp"],
        accepted ["true"], refused ["'true'"],
    }
    /// Whether connections and retransmissions are [counted](../reference/statistics.md) by policy
    statistics: bool {
        initially true, values "boolean", default "`true`",
        effective next_start,
        accepted ["false"], refused ["1"],
    }
    /// Whether connections that no entry covers are counted as well
    count_unmatched: bool {
        initially false, values "boolean", default "`false`",
        effective next_start,
        accepted ["true"], refused ["1"],
    }
    /// Samples 1 in N loss-free connections [until they close](../reference/statistics.md#sampling);
    /// 1: all
    sampling: u32, by "sampling" {
        initially SAMPLING, values "1 to 65536", default "`256`",
        effective next_start,
        accepted ["1", "65536"], refused ["0", "65537", "'1'"],
    }
    /// When the smoothed RTT of a sampled connection is recorded: when it ends, also at this interval,
    /// or never
    rtt_sampling: RttSampling, by "parsed" {
        initially RttSampling::AtEnd, values "`\"end\"`, `\"off\"` or a duration, 1ms to 24h",
        default "`\"end\"`",
        effective next_start,
        accepted ["'off'", "'1ms'", "'24h'"], refused ["'999us'", "'25h'", "1"],
    }
}

impl AgentConfig {
    /// Two keys whose paths are the same, however they are spelt, and why that is refused.
    pub(super) fn conflicting_paths(&self) -> Option<([&'static str; 2], String)> {
        let mut paths = vec![
            ("pin_dir", &self.pin_dir),
            ("state_dir", &self.state_dir),
            ("persistent_dir", &self.persistent_dir),
            ("socket", &self.socket),
        ];
        if let CgroupSetting::Path(path) = &self.cgroup {
            paths.insert(0, ("cgroup", path));
        }
        for (i, (second, path)) in paths.iter().enumerate() {
            for (first, other) in &paths[..i] {
                if is_same(path, other) {
                    let message = format!(
                        "{second} is the same as {first}, and each needs its own: choose another \
                         path for one of them"
                    );
                    return Some(([*first, *second], message));
                }
            }
        }
        let name = self.socket.file_name().and_then(|name| name.to_str());
        let dir = self.socket.parent().unwrap_or(Path::new("/"));
        let of_daemon =
            |name: &str| name == "lock" || name.ends_with(".json") || name.ends_with(".lock");
        for (key, path) in &paths[paths.len() - 3..paths.len() - 1] {
            if name.is_some_and(of_daemon) && is_same(dir, path) {
                let message =
                    format!("socket is a file that the daemon may keep in {key}: rename it");
                return Some(([*key, "socket"], message));
            }
        }
        None
    }
}

/// Whether two paths lead to the same file, also by links, `..` or a bind mount.
fn is_same(a: &Path, b: &Path) -> bool {
    let identity = |path: &Path| {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    path_security::resolved(a) == path_security::resolved(b)
        || identity(a).is_some_and(|a| identity(b) == Some(a))
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
}

impl FromStr for MetricsSetting {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self::Off);
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.port() == 0 => Err("the port must not be 0"),
            Ok(address) => Ok(Self::Tcp(address)),
            Err(_) => {
                Err("metrics must be \"off\", or an address and port like \"127.0.0.1:9464\"")
            }
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// The program is detached, and nothing stays in the kernel.
    Detach,
    /// The policies stay in force.
    Keep,
}

/// Reads a text with its own parser.
fn text<'de, D: Deserializer<'de>, T, E: fmt::Display>(
    deserializer: D,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<T, D::Error> {
    parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
}

fn parsed<'de, T: FromStr<Err: fmt::Display>, D: Deserializer<'de>>(d: D) -> Result<T, D::Error> {
    text(d, T::from_str)
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
    text(deserializer, socket_path)
}

fn absolute<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    text(deserializer, absolute_path)
}

fn pin_dir<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    let has_dot = |c: Component<'_>| matches!(c, Component::Normal(name) if name.as_encoded_bytes().contains(&b'.'));
    text(deserializer, |text| match absolute_path(text)? {
        path if path.components().any(has_dot) => {
            Err("names in a BPF file system must not contain dots")
        }
        path => Ok(path),
    })
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
