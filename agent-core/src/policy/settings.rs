//! A policy's settings, in the same form in configuration files, on the command line and in JSON.
//!
//! `settings!` is the only table of settings. A row defines the field of [`Settings`], the key of the
//! configuration and the JSON, the option of `rto-agent add` with its help, the row of the reference
//! page, what `rto-agent list` reads back from the kernel's maps, and the features that it needs.

use std::{fmt, str::FromStr, time::Duration};

use rto_model::syn::MAX_SYNCNT;

use super::{
    share::Share,
    units::{format_duration, parse_duration},
};

mod auto;
#[macro_use]
mod table;
mod text;

pub use auto::{AutoInitialRto, InitialRtoSetting, True};
pub(crate) use table::key;
pub use table::{Effect, Key, Setting};

settings! {
    /// Timeout of the first SYN, or auto
    ///
    /// auto learns the value from the connections and accepts min=, max= and spurious=, for example
    /// auto,min=20ms,max=500ms
    initial_rto: Option<InitialRtoSetting> as "Option<TextOr<AutoInitialRto>>" {
        option "--initial-rto DURATION|auto",
        values "duration, above 0 and below 120s; `\"auto\"` or [a table](#values-that-are-learnt)",
        meaning "Timeout of the first SYN. `\"auto\"`: learnt from the policy's connections",
        effect Handshake, kernel jiffies initial_rto_jiffies,
        features ["syn-schedule", "syn-ack-retransmission-timeout"],
        accepted [
            "'1us'", "'119.999s'", "'auto'",
            "{ auto = true, min = '1us', max = '1us' }", "{ auto = true, min = '1s', max = '1s' }",
            "{ auto = true, spurious = '0.01%' }", "{ auto = true, spurious = '5%' }",
        ],
        refused [
            "'0s'", "'120s'", "100", "'100'", "true", "{}", "{ auto = false }",
            "{ auto = true, mni = '20ms' }", "{ auto = true, min = '0s' }", "{ auto = true, max = '1001ms' }",
            "{ auto = true, min = '21ms', max = '20ms' }",
            "{ auto = true, spurious = '0.009%' }", "{ auto = true, spurious = '5.1%' }",
        ],
    }
    /// Timeout of the first SYN-ACK: auto, keep (the kernel's own) or a duration
    ///
    /// auto is as short as --initial-rto, but long enough to keep half-open connections for 31s
    syn_ack_rto: SynAckRto as "Option<String>" {
        option "--syn-ack-rto DURATION|auto|keep",
        values "`\"auto\"`, `\"keep\"` or a duration, above 0 and below 120s",
        default "`\"auto\"`",
        effect Handshake if |rto| rto.fixed().is_some(), features ["reads-listener"],
        accepted ["'keep'", "'1us'", "'119.999s'"], refused ["'0s'", "'120s'", "'off'"],
    }
    /// Lower bound of the RTO of an established connection (2 jiffies to 200ms)
    rto_min: Option<Duration> as "Option<String>" {
        option "--rto-min DURATION",
        values "duration, 2 jiffies to 200ms",
        effect Connection, kernel us rto_min_us,
        features ["bpf-rto-min", "btf", "bpf-lsm-cgroup"],
        accepted ["'4.001ms'", "'200ms'"],
        refused ["'4ms'", "'201ms'", "'auto'", "{ auto = true }"],
    }
    /// Lower --rto-min by the smoothed RTT at the end of a flight (experimental)
    ///
    /// This applies while fewer than 4 segments are outstanding
    rto_restart: Option<bool> as "Option<bool>" {
        option "--rto-restart BOOL",
        values "boolean; `true` needs an `rto_min`",
        default "`false`",
        effect Connection if |on| *on == Some(true), with "rto_min", features ["rtt-hook"],
        accepted ["true"], refused ["'on'"],
    }
    /// Longest delay of an ACK (2 jiffies to 200ms)
    delack_max: Option<Duration> as "Option<String>" {
        option "--delack-max DURATION",
        values "duration, 2 jiffies to 200ms, below `rto_min`",
        effect Connection, kernel us delack_max_us, features ["bpf-delack-max"],
        accepted ["'4.001ms'", "'96ms'"],
        refused ["'4ms'", "'100ms'", "'201ms'", "{ auto = true }"],
    }
    /// Linear instead of exponential backoff for thin streams
    thin_linear: Option<bool> as "Option<bool>" {
        option "--thin-linear BOOL",
        values "boolean",
        effect Connection, kernel flag THIN_LINEAR, features ["bpf-thin-linear"],
        accepted ["true", "false"], refused ["1"],
    }
    /// Consecutive timeouts before a thin stream's interval doubles, 1 to 6; needs --thin-linear
    linear_retries: Option<u8> as "Option<u8>" {
        option "--linear-retries N",
        values "1 to 6; needs `thin_linear = true`",
        effect Connection, with "thin_linear", features ["bpf-thin-linear", "rto-hook"],
        accepted ["1", "6"], refused ["0", "7"],
    }
    /// Upper bound of any RTO (1s to 120s, Linux 6.15)
    rto_max: Option<Duration> as "Option<String>" {
        option "--rto-max DURATION",
        values "duration, 1s to 120s, not below `initial_rto`, `syn_ack_rto` or `rto_min`",
        effect Connection, kernel ms rto_max_ms, features ["tcp-rto-max"],
        accepted ["'1s'", "'120s'"], refused ["'999ms'", "'121s'", "'1000.5ms'"],
    }
    /// How long sent data may stay unacknowledged
    user_timeout: Option<Duration> as "Option<String>" {
        option "--user-timeout DURATION",
        values "duration, 1ms to 24 days",
        effect Connection, kernel ms user_timeout_ms, features ["bpf-user-timeout"],
        accepted ["'1ms'", "'576h'"], refused ["'0s'", "'1.5ms'", "'600h'"],
    }
    /// When connect() gives up: auto, keep or a TCP_SYNCNT of 1 to 127
    ///
    /// auto: after the same time as without the agent. keep: after the socket's own TCP_SYNCNT
    /// retransmissions, which takes less time with a short `initial_rto`. A number: after that many
    /// retransmissions.
    syn_retries: SynRetries as "Option<WordOrNumber>" {
        option "--syn-retries N|auto|keep",
        values "`\"auto\"`, `\"keep\"` or 1 to 127",
        default "`\"auto\"`",
        effect Handshake if |retries| matches!(retries, SynRetries::Fixed(_)),
        features ["bpf-syncnt"],
        accepted ["'keep'", "1", "127"], refused ["0", "128", "'off'"],
    }
    /// Whether SYNs of MPTCP sockets get --initial-rto: apply, or keep (they keep the kernel's own
    /// timer)
    mptcp: Mptcp as "Option<String>" {
        option "--mptcp keep|apply",
        values "`\"keep\"` or `\"apply\"`",
        default "`\"keep\"`",
        effect Handshake, with "initial_rto", features ["btf"],
        accepted ["'apply'"], refused ["true"],
    }
    /// Share of connections that keep the kernel's own timers, as a control arm (up to 95%)
    ///
    /// Connects of both arms are compared until a gain or harm is proven. After proven harm all new
    /// connections keep the kernel's own timers
    holdout: Option<Share> as "Option<Share>" {
        option "--holdout SHARE",
        values "share, above 0% and up to 95%",
        default "none",
        kernel share control_below,
        accepted ["'0.5%'", "'95%'"], refused ["'0%'", "'95.1%'", "5", "0.05", "'5'"],
    }
    /// Whether new connections fall back to the kernel's own timers: on or off
    ///
    /// They do after 20 connections with a spurious retransmission, for 10 minutes; in an outage, until
    /// a connection is established; and after proven harm
    guard: Option<Guard> as "Option<String>" {
        option "--guard on|off",
        values "`\"on\"` or `\"off\"`",
        default "`\"on\"`",
        meaning "Whether new connections [fall back](#fallback) to the kernel's own timers",
        accepted ["'on'", "'off'"], refused ["true", "'auto'", "{}"],
    }
    /// Whether learnt values are applied: apply, or advise (computed and shown, but not applied)
    mode: Mode as "Option<String>" {
        option "--mode apply|advise",
        values "`\"apply\"`; also `\"advise\"` if a value is learnt",
        default "`\"apply\"`",
        meaning "Whether learnt values are applied, or only computed and shown",
        accepted ["'apply'"], refused ["'advise'", "true"],
    }
    /// Allow an initial RTO below 200ms on a prefix shorter than /8 (IPv4) or /16 (IPv6)
    force: bool as "bool" {
        option "--force",
        values "boolean",
        default "`false`",
        accepted ["true"], refused ["'true'"],
    }
}

/// A text or a table, for the schema.
#[cfg(test)]
#[derive(schemars::JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum TextOr<T> {
    Text(String),
    Table(T),
}

/// "auto", "keep" or a number, for the schema.
#[cfg(test)]
#[derive(schemars::JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum WordOrNumber {
    Word(String),
    Number(u8),
}

impl Settings {
    /// How `initial_rto` is learnt; `None` if it is not.
    pub const fn auto_initial_rto(&self) -> Option<&AutoInitialRto> {
        match &self.initial_rto {
            Some(InitialRtoSetting::Auto(auto)) => Some(auto),
            Some(InitialRtoSetting::Fixed(_)) | None => None,
        }
    }

    /// How the SYN-ACK RTO is learnt; `None` if it is not, or if `syn_ack_rto` is set.
    pub const fn auto_syn_ack_rto(&self) -> Option<&AutoInitialRto> {
        match self.syn_ack_rto {
            SynAckRto::Auto => self.auto_initial_rto(),
            SynAckRto::Keep | SynAckRto::Fixed(_) => None,
        }
    }

    /// Whether any value is learnt.
    pub const fn is_automatic(&self) -> bool {
        self.auto_initial_rto().is_some()
    }

    /// `initial_rto`, if it is a fixed value.
    pub const fn fixed_initial_rto(&self) -> Option<Duration> {
        match self.initial_rto {
            Some(InitialRtoSetting::Fixed(rto)) => Some(rto),
            Some(InitialRtoSetting::Auto(_)) | None => None,
        }
    }

    /// The timers with fixed values, by their names.
    pub fn fixed_timers(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let all = [
            ("initial_rto", self.fixed_initial_rto()),
            ("syn_ack_rto", self.syn_ack_rto.fixed()),
            ("rto_min", self.rto_min),
        ];
        let given = all.into_iter();
        given.filter_map(|(name, value)| Some((name, value?)))
    }

    /// Whether new connections fall back to the kernel's own timers.
    pub fn is_guarded(&self) -> bool {
        self.guard.unwrap_or_default() == Guard::On
    }

    /// Whether no setting has an effect on connections.
    pub fn sets_nothing(&self) -> bool {
        !SETTINGS.iter().any(|setting| (setting.acts)(self))
    }

    /// Whether no setting is given; `force` does not count.
    pub fn is_empty(&self) -> bool {
        let force = self.force;
        *self
            == Self {
                force,
                ..Self::default()
            }
    }

    /// The given settings, as in a configuration file.
    pub fn to_toml(&self) -> toml_edit::Table {
        let document = toml_edit::ser::to_document(self);
        let mut table = document.map_or_else(|_| toml_edit::Table::new(), |d| d.as_table().clone());
        for (_, item) in table.iter_mut() {
            // On one line with its key.
            item.make_value();
        }
        if !self.force {
            table.remove("force");
        }
        table
    }

    /// As arguments of `rto-agent add`.
    pub fn to_flags(&self) -> String {
        let flags = SETTINGS
            .iter()
            .filter_map(|setting| Some(setting.option_with(&(setting.text)(self)?)));
        flags.collect::<Vec<_>>().join(" ")
    }
}

/// The `syn_retries` setting (TCP_SYNCNT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SynRetries {
    /// Raise it so that connect() does not give up before it would with the kernel's own timers.
    #[default]
    Auto,
    /// Leave the socket's value: connect() gives up sooner in proportion to the initial RTO.
    Keep,
    /// Set this many retransmissions, 1 to 127.
    Fixed(u8),
}

/// The `syn_ack_rto` setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SynAckRto {
    /// As short as `initial_rto`, but long enough to keep half-open requests for 31 s, or for as
    /// long as with the kernel's own timers.
    #[default]
    Auto,
    /// Keep the kernel's own timer.
    Keep,
    /// Set this value, even if half-open requests end early.
    Fixed(Duration),
}

impl SynAckRto {
    /// The fixed value, if there is one.
    pub const fn fixed(self) -> Option<Duration> {
        match self {
            Self::Fixed(rto) => Some(rto),
            Self::Auto | Self::Keep => None,
        }
    }
}

words! {
    /// The `mptcp` setting.
    Mptcp, "\"keep\" or \"apply\"" {
        /// SYNs of MPTCP sockets keep the kernel's timer: after a few timeouts the kernel falls back to
        /// TCP, and disables MPTCP for an hour (`net.mptcp.blackhole_timeout`).
        #[default]
        Keep = "keep",
        /// MPTCP sockets get `initial_rto` like others.
        Apply = "apply",
    }
}

words! {
    /// The `mode` setting.
    Mode, "\"apply\" or \"advise\"" {
        /// Learnt values are applied.
        #[default]
        Apply = "apply",
        /// Learnt values are computed and shown, but not applied.
        Advise = "advise",
    }
}

words! {
    /// The `guard` setting: whether new connections fall back to the kernel's own timers.
    Guard, "\"on\" or \"off\"" {
        /// They do.
        #[default]
        On = "on",
        /// They do not.
        Off = "off",
    }
}

impl FromStr for SynRetries {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "keep" => Ok(Self::Keep),
            number => match number.parse::<u8>() {
                Ok(n) if (1..=MAX_SYNCNT).contains(&n) => Ok(Self::Fixed(n)),
                _ => Err(format!(
                    "{text:?} is neither \"auto\", \"keep\" nor a number from 1 to 127"
                )),
            },
        }
    }
}

impl fmt::Display for SynRetries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Keep => f.write_str("keep"),
            Self::Fixed(n) => n.fmt(f),
        }
    }
}

impl FromStr for SynAckRto {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "keep" => Ok(Self::Keep),
            duration => match parse_duration(duration) {
                Ok(rto) => Ok(Self::Fixed(rto)),
                Err(e) => Err(format!("neither \"auto\" nor \"keep\", and {e}")),
            },
        }
    }
}

impl fmt::Display for SynAckRto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Keep => f.write_str("keep"),
            Self::Fixed(rto) => f.write_str(&format_duration(*rto)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &str = r#"{"initial_rto":"100ms","syn_ack_rto":"keep","rto_min":"5ms","rto_restart":true,"delack_max":"5ms","thin_linear":false,"linear_retries":2,"rto_max":"10s","user_timeout":"30s","syn_retries":6,"mptcp":"apply","holdout":"0.5%","guard":"on","mode":"advise","force":true}"#;

    #[test]
    fn settings_json_round_trips_without_unset_keys() {
        let written = |json: &str| {
            let settings: Settings = serde_json::from_str(json).unwrap();
            let json = serde_json::to_string(&settings).unwrap();
            assert_eq!(serde_json::from_str::<Settings>(&json).unwrap(), settings);
            json
        };
        assert_eq!(written(ALL), ALL);
        assert_eq!(
            written(r#"{"syn_retries":6,"rto_min":null}"#),
            r#"{"syn_retries":6,"force":false}"#
        );
        assert_eq!(written(r#"{"syn_ack_rto":"auto"}"#), r#"{"force":false}"#);
        for (bad, why) in [
            (r#"{"rto_min":5}"#, "a unit is missing, perhaps 5ms"),
            (r#"{"rto_min":true}"#, "expected a duration, like"),
            (r#"{"rto_mni":"5ms"}"#, "unknown field"),
            (r#"{"syn_retries":"0"}"#, "a number from 1 to 127"),
            (
                r#"{"holdout":5}"#,
                "invalid share \"5\"; write a percentage",
            ),
            (r#"{"holdout":0.05}"#, "invalid share \"0.05\""),
            (r#"{"holdout":true}"#, "expected a share, like"),
        ] {
            let error = serde_json::from_str::<Settings>(bad)
                .unwrap_err()
                .to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    /// A configuration that `add --save` writes is read back unchanged.
    #[test]
    fn toml_has_the_keys_of_json() {
        let settings: Settings = serde_json::from_str(ALL).unwrap();
        let table: toml::Table = settings.to_toml().to_string().parse().unwrap();
        assert_eq!(table["syn_retries"].as_integer(), Some(6));
        assert_eq!(table["holdout"].as_str(), Some("0.5%"));
        assert_eq!(table.try_into::<Settings>().unwrap(), settings);
        assert!(Settings::default().to_toml().is_empty());
    }

    #[test]
    fn settings_become_flags() {
        let json = r#"{"initial_rto":"100ms","thin_linear":true,"syn_retries":6,"force":true}"#;
        let settings: Settings = serde_json::from_str(json).unwrap();
        assert_eq!(
            settings.to_flags(),
            "--initial-rto 100ms --thin-linear --syn-retries 6 --force"
        );
        let json = r#"{"initial_rto":{"auto":true,"min":"50ms"},"rto_min":"50ms","guard":"on"}"#;
        let settings: Settings = serde_json::from_str(json).unwrap();
        assert_eq!(
            settings.to_flags(),
            "--initial-rto auto,min=50ms --rto-min 50ms --guard on"
        );
    }
}
