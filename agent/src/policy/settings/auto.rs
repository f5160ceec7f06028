//! `initial_rto = "auto"` and `rto_min = "auto"`: values that the daemon learns.

use std::{fmt, str::FromStr, time::Duration};

use rto_model::tune::law;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{
    Guard,
    text::{self, Extended, read_extended, write_extended},
};
use crate::policy::{
    Share,
    units::{format_duration, jiffies_duration, parse_duration},
};

/// The `initial_rto` setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialRtoSetting {
    /// This.
    Fixed(Duration),
    /// The daemon learns it, by direction.
    Auto(AutoInitialRto),
}

/// The `rto_min` setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RtoMinSetting {
    /// This.
    Fixed(Duration),
    /// The daemon learns it from the policy's control arm.
    Auto(AutoRtoMin),
}

/// How the initial RTO is learnt. A field that is `None` has the default of [`law::Settings::new`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AutoInitialRto {
    /// That the value is learnt.
    #[cfg_attr(test, schemars(with = "bool"))]
    pub auto: True,
    /// The least value.
    #[serde(default, with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub min: Option<Duration>,
    /// The largest, at most 1 s.
    #[serde(default, with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub max: Option<Duration>,
    /// The share of connections that may take longer than half the timer.
    #[serde(default, with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<Share>"))]
    pub spurious: Option<Share>,
    /// How long an hour is remembered, and a value over a reboot.
    #[serde(
        default,
        with = "text::lifetime",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub memory: Option<Duration>,
}

impl AutoInitialRto {
    /// What the tuner is asked for, at so many jiffies a second.
    #[must_use]
    pub fn to_law(&self, hz: u32, guard: &Guard) -> law::Settings {
        let default = law::Settings::new(hz);
        law::Settings {
            min_us: self.min.map_or(default.min_us, micros),
            max_us: self.max.map_or(default.max_us, micros),
            spurious: self.spurious.map_or(default.spurious, Share::fraction),
            memory_ms: self.memory.map_or(default.memory_ms, millis),
            hold_ms: millis(guard.hold()),
            guard: guard.rates(),
            ..default
        }
    }
}

/// How rto_min is learnt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AutoRtoMin {
    /// That the value is learnt.
    #[cfg_attr(test, schemars(with = "bool"))]
    pub auto: True,
    /// The longest delay of a peer's ACK, where that is known.
    #[serde(default, with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub peer_delack: Option<Duration>,
}

impl AutoRtoMin {
    /// The share of the control arm where `holdout` is left out.
    pub const CONTROL: Share = Share::percent(5);
    /// With a smaller control arm too little is learnt.
    pub const LEAST_CONTROL: Share = Share::percent(2);
    /// The delayed ACK of a Linux peer (40 ms), and two jiffies of it at HZ 250.
    const FLOOR: Duration = Duration::from_millis(48);
    /// Jiffies beyond the delay of an ACK.
    const MARGIN: u64 = 2;

    /// The least value, at so many jiffies a second.
    #[must_use]
    pub fn floor(&self, hz: u32) -> Duration {
        match self.peer_delack {
            Some(delay) => delay.saturating_add(jiffies_duration(Self::MARGIN, hz)),
            None => Self::FLOOR,
        }
    }
}

/// `true`, and nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct True;

impl Serialize for True {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bool(true)
    }
}

impl<'de> Deserialize<'de> for True {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match bool::deserialize(deserializer)? {
            true => Ok(Self),
            false => Err(D::Error::custom(
                "a table is for auto = true; a value of your own is a duration, like \"100ms\"",
            )),
        }
    }
}

macro_rules! fixed_or_auto {
    ($type:ident, $table:ty) => {
        impl From<Duration> for $type {
            fn from(value: Duration) -> Self {
                Self::Fixed(value)
            }
        }

        impl Extended for $type {
            type Table = $table;
            const WORD: &'static str = "auto";

            fn of_table(table: $table) -> Self {
                Self::Auto(table)
            }

            fn table(&self) -> Option<&$table> {
                match self {
                    Self::Auto(auto) => Some(auto),
                    Self::Fixed(_) => None,
                }
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match read_extended(text) {
                    Some(auto) => auto,
                    None => parse_duration(text)
                        .map(Self::Fixed)
                        .map_err(|e| format!("not \"auto\", and {e}")),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    Self::Fixed(value) => f.write_str(&format_duration(*value)),
                    Self::Auto(auto) => write_extended::<Self>(auto, f),
                }
            }
        }
    };
}

fixed_or_auto!(InitialRtoSetting, AutoInitialRto);
fixed_or_auto!(RtoMinSetting, AutoRtoMin);

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
