//! A policy's settings as text.

use serde::{Deserialize, Serialize};

use crate::policy::{Mptcp, Settings, SynAckRto, SynRetries, units};

/// Settings as text, as a configuration file or a command line has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettingsSpec {
    /// "100ms".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_rto: Option<String>,
    /// "auto", "keep" or a duration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub syn_ack_rto: Option<String>,
    /// "5ms".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rto_min: Option<String>,
    /// On or off; on needs `rto_min`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rto_restart: Option<bool>,
    /// "5ms".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delack_max: Option<String>,
    /// On or off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thin_linear: Option<bool>,
    /// 1 to 6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_retries: Option<u8>,
    /// "10s".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rto_max: Option<String>,
    /// "30s".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_timeout: Option<String>,
    /// "auto", "keep" or a number from 1 to 127.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub syn_retries: Option<String>,
    /// "keep" or "apply".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mptcp: Option<String>,
    /// Allow a short initial RTO on a very wide prefix.
    #[serde(default)]
    pub force: bool,
}

impl SettingsSpec {
    /// Whether it sets anything at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self
            == Self {
                force: self.force,
                ..Self::default()
            }
    }

    /// The settings meant.
    ///
    /// # Errors
    ///
    /// Names the setting that cannot be read, and how it should look.
    pub fn parse(&self) -> Result<Settings, String> {
        let duration = |name: &str, text: &Option<String>| match text {
            Some(text) => units::parse_duration(text)
                .map(Some)
                .map_err(|e| format!("{name}: {e}")),
            None => Ok(None),
        };
        Ok(Settings {
            initial_rto: duration("initial_rto", &self.initial_rto)?,
            syn_ack_rto: match self.syn_ack_rto.as_deref() {
                None => SynAckRto::default(),
                Some(text) => text.parse().map_err(|e| format!("syn_ack_rto: {e}"))?,
            },
            rto_min: duration("rto_min", &self.rto_min)?,
            rto_restart: self.rto_restart,
            delack_max: duration("delack_max", &self.delack_max)?,
            thin_linear: self.thin_linear,
            linear_retries: self.linear_retries,
            rto_max: duration("rto_max", &self.rto_max)?,
            user_timeout: duration("user_timeout", &self.user_timeout)?,
            syn_retries: match self.syn_retries.as_deref() {
                None => SynRetries::default(),
                Some(text) => text.parse().map_err(|e| format!("syn_retries: {e}"))?,
            },
            mptcp: match self.mptcp.as_deref() {
                None => Mptcp::default(),
                Some(text) => text.parse().map_err(|e| format!("mptcp: {e}"))?,
            },
            force: self.force,
        })
    }
}

impl From<&Settings> for SettingsSpec {
    fn from(settings: &Settings) -> Self {
        let text = |d: Option<std::time::Duration>| d.map(units::format_duration);
        Self {
            initial_rto: text(settings.initial_rto),
            syn_ack_rto: (settings.syn_ack_rto != SynAckRto::default())
                .then(|| settings.syn_ack_rto.to_string()),
            rto_min: text(settings.rto_min),
            rto_restart: settings.rto_restart,
            delack_max: text(settings.delack_max),
            thin_linear: settings.thin_linear,
            linear_retries: settings.linear_retries,
            rto_max: text(settings.rto_max),
            user_timeout: text(settings.user_timeout),
            syn_retries: (settings.syn_retries != SynRetries::default())
                .then(|| settings.syn_retries.to_string()),
            mptcp: (settings.mptcp != Mptcp::default()).then(|| settings.mptcp.to_string()),
            force: settings.force,
        }
    }
}
