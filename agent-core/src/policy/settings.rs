//! A policy's settings, in the same form in configuration files, on the command line and in JSON.

use std::{fmt, str::FromStr, time::Duration};

use clap::builder::Resettable;
use rto_model::syn::MAX_SYNCNT;
use serde::{Deserialize, Serialize};

use super::{
    share::Share,
    units::{format_duration, parse_duration},
};

mod auto;
mod guard;
mod text;

pub use auto::{AutoInitialRto, AutoRtoMin, InitialRtoSetting, RtoMinSetting, True};
pub use guard::Guard;

/// What a policy sets. A field that is `None` leaves the kernel's own value.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Settings, instead of --policy")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Timeout of the first SYN, or auto
    ///
    /// auto learns the value from the connections and accepts min=, max=, spurious= and memory=,
    /// for example auto,min=20ms,max=500ms
    #[arg(long, value_name = "DURATION|auto")]
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<TextOr<AutoInitialRto>>"))]
    pub initial_rto: Option<InitialRtoSetting>,
    /// Timeout of the first SYN-ACK: auto, keep (the kernel's own) or a duration
    ///
    /// auto is as short as --initial-rto, but long enough to keep half-open connections for 31s
    #[arg(
        long,
        value_name = "DURATION|auto|keep",
        default_value_t,
        hide_default_value = true
    )]
    #[serde(with = "text::or_default", skip_serializing_if = "is_default")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub syn_ack_rto: SynAckRto,
    /// Lower bound of the RTO of an established connection (2 jiffies to 200ms), or auto
    ///
    /// auto learns the value from the control arm and accepts the longest delay of a peer's ACK,
    /// for example auto,peer_delack=5ms
    #[arg(long, value_name = "DURATION|auto")]
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<TextOr<AutoRtoMin>>"))]
    pub rto_min: Option<RtoMinSetting>,
    /// Lower --rto-min by the smoothed RTT at the end of a flight (experimental)
    ///
    /// This applies while fewer than 4 segments are outstanding
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rto_restart: Option<bool>,
    /// Longest delay of an ACK (2 jiffies to 200ms)
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub delack_max: Option<Duration>,
    /// Linear instead of exponential backoff for thin streams
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thin_linear: Option<bool>,
    /// Consecutive timeouts before a thin stream's interval doubles, 1 to 6; needs --thin-linear
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub linear_retries: Option<u8>,
    /// Upper bound of any RTO (1s to 120s, Linux 6.15)
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub rto_max: Option<Duration>,
    /// How long sent data may stay unacknowledged
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub user_timeout: Option<Duration>,
    /// When connect() gives up: auto, keep or a TCP_SYNCNT of 1 to 127
    ///
    /// auto: after the same time as without the agent. keep: after the socket's own TCP_SYNCNT
    /// retransmissions, which takes less time with a short `initial_rto`. A number: after that many
    /// retransmissions.
    #[arg(
        long,
        value_name = "N|auto|keep",
        default_value_t,
        hide_default_value = true
    )]
    #[serde(with = "text::or_default", skip_serializing_if = "is_default")]
    #[cfg_attr(test, schemars(with = "Option<WordOrNumber>"))]
    pub syn_retries: SynRetries,
    /// Whether SYNs of MPTCP sockets get --initial-rto: apply, or keep (they keep the kernel's own
    /// timer)
    #[arg(
        long,
        value_name = "keep|apply",
        default_value_t,
        hide_default_value = true
    )]
    #[serde(with = "text::or_default", skip_serializing_if = "is_default")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub mptcp: Mptcp,
    /// Share of connections that keep the kernel's own timers, as a control arm (up to 50%)
    ///
    /// The control arm is counted separately. It is a share of peers, not connections, if the
    /// policy sets more than handshake timers
    #[arg(long, value_name = "SHARE")]
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<Share>"))]
    pub holdout: Option<Share>,
    /// Reaction to spurious retransmissions of SYNs and SYN-ACKs: warn, on or off
    ///
    /// warn reports them; on also gives new connections the kernel's own timer for 10 minutes after
    /// 20 of them, and while they exceed a tenth of the connections. on is the default with auto
    #[arg(long, value_name = "warn|on|off")]
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub guard: Option<Guard>,
    /// Whether learnt values are applied: apply, or advise (computed and shown, but not applied)
    #[arg(
        long,
        value_name = "apply|advise",
        default_value_t,
        hide_default_value = true
    )]
    #[serde(with = "text::or_default", skip_serializing_if = "is_default")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub mode: Mode,
    /// Allow an initial RTO below 200ms on a prefix shorter than /8 (IPv4) or /16 (IPv6)
    #[arg(long, help_heading = Resettable::Reset)]
    pub force: bool,
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

/// A text or a table, for the schema.
#[cfg(test)]
#[derive(schemars::JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum TextOr<T> {
    Text(String),
    Table(T),
}

impl Settings {
    /// How `initial_rto` is learnt; `None` if it is not.
    #[must_use]
    pub const fn auto_initial_rto(&self) -> Option<&AutoInitialRto> {
        match &self.initial_rto {
            Some(InitialRtoSetting::Auto(auto)) => Some(auto),
            Some(InitialRtoSetting::Fixed(_)) | None => None,
        }
    }

    /// How the SYN-ACK RTO is learnt; `None` if it is not, or if `syn_ack_rto` is set.
    #[must_use]
    pub const fn auto_syn_ack_rto(&self) -> Option<&AutoInitialRto> {
        match self.syn_ack_rto {
            SynAckRto::Auto => self.auto_initial_rto(),
            SynAckRto::Keep | SynAckRto::Fixed(_) => None,
        }
    }

    /// How `rto_min` is learnt; `None` if it is not.
    #[must_use]
    pub const fn auto_rto_min(&self) -> Option<&AutoRtoMin> {
        match &self.rto_min {
            Some(RtoMinSetting::Auto(auto)) => Some(auto),
            Some(RtoMinSetting::Fixed(_)) | None => None,
        }
    }

    /// Whether any value is learnt.
    #[must_use]
    pub const fn is_automatic(&self) -> bool {
        self.auto_initial_rto().is_some() || self.auto_rto_min().is_some()
    }

    /// `initial_rto`, if it is a fixed value.
    #[must_use]
    pub const fn fixed_initial_rto(&self) -> Option<Duration> {
        match self.initial_rto {
            Some(InitialRtoSetting::Fixed(rto)) => Some(rto),
            Some(InitialRtoSetting::Auto(_)) | None => None,
        }
    }

    /// `rto_min`, if it is a fixed value.
    #[must_use]
    pub const fn fixed_rto_min(&self) -> Option<Duration> {
        match self.rto_min {
            Some(RtoMinSetting::Fixed(rto)) => Some(rto),
            Some(RtoMinSetting::Auto(_)) | None => None,
        }
    }

    /// The guard in effect; without a `guard` setting it is on for learnt values.
    #[must_use]
    pub fn guard(&self) -> Guard {
        let implied = match self.is_automatic() {
            true => Guard::On,
            false => Guard::Warn,
        };
        self.guard.unwrap_or(implied)
    }

    /// Whether learnt values are applied.
    #[must_use]
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// The share of the control arm; a learnt `rto_min` always has one.
    #[must_use]
    pub fn control_share(&self) -> Option<Share> {
        let implied = self.auto_rto_min().map(|_| AutoRtoMin::CONTROL);
        self.holdout.or(implied)
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
}

/// For serde, to omit unset values.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
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

/// The `mptcp` setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mptcp {
    /// SYNs of MPTCP sockets keep the kernel's timer: after a few timeouts the kernel falls back to
    /// TCP, and disables MPTCP for an hour (`net.mptcp.blackhole_timeout`).
    #[default]
    Keep,
    /// MPTCP sockets get `initial_rto` like others.
    Apply,
}

/// The `mode` setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Learnt values are applied.
    #[default]
    Apply,
    /// Learnt values are computed and shown, but not applied.
    Advise,
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

impl FromStr for Mptcp {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "keep" => Ok(Self::Keep),
            "apply" => Ok(Self::Apply),
            _ => Err(format!("{text:?} is neither \"keep\" nor \"apply\"")),
        }
    }
}

impl fmt::Display for Mptcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Keep => "keep",
            Self::Apply => "apply",
        })
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "apply" => Ok(Self::Apply),
            "advise" => Ok(Self::Advise),
            _ => Err(format!("{text:?} is neither \"apply\" nor \"advise\"")),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Apply => "apply",
            Self::Advise => "advise",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts() {
        for text in ["auto", "keep", "100ms", "1.5s"] {
            assert_eq!(text.parse::<SynAckRto>().unwrap().to_string(), text);
        }
        for bad in ["", "Auto", "100", "-1ms"] {
            assert!(bad.parse::<SynAckRto>().is_err(), "{bad}");
        }
        for text in ["keep", "apply"] {
            assert_eq!(text.parse::<Mptcp>().unwrap().to_string(), text);
        }
        assert!("on".parse::<Mptcp>().is_err());
    }

    #[test]
    fn json_is_read_as_it_is_written_and_leaves_out_what_is_not_set() {
        let written = |json: &str| {
            let settings: Settings = serde_json::from_str(json).unwrap();
            let json = serde_json::to_string(&settings).unwrap();
            assert_eq!(serde_json::from_str::<Settings>(&json).unwrap(), settings);
            json
        };
        let all = r#"{"initial_rto":"100ms","syn_ack_rto":"keep","rto_min":"5ms","rto_restart":true,"delack_max":"5ms","thin_linear":false,"linear_retries":2,"rto_max":"10s","user_timeout":"30s","syn_retries":6,"mptcp":"apply","holdout":"0.5%","guard":"on","mode":"advise","force":true}"#;
        assert_eq!(written(all), all);
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
        let json = r#"{"initial_rto":"100ms","syn_ack_rto":"keep","rto_min":"5ms","rto_restart":true,"delack_max":"5ms","thin_linear":false,"linear_retries":2,"rto_max":"10s","user_timeout":"30s","syn_retries":6,"mptcp":"apply","holdout":"0.5%","guard":"on","mode":"advise","force":true}"#;
        let settings: Settings = serde_json::from_str(json).unwrap();
        let table: toml::Table = settings.to_toml().to_string().parse().unwrap();
        assert_eq!(table["syn_retries"].as_integer(), Some(6));
        assert_eq!(table["holdout"].as_str(), Some("0.5%"));
        assert_eq!(table.try_into::<Settings>().unwrap(), settings);
        assert!(Settings::default().to_toml().is_empty());
    }
}
