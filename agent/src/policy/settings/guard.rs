//! The `guard` setting: what is done about spurious retransmissions of SYNs and SYN-ACKs.

use std::{fmt, str::FromStr, time::Duration};

use rto_model::tune::cusum::Rates;
use serde::{Deserialize, Serialize};

use super::text::{self, Extended, read_extended, write_extended};
use crate::policy::Share;

/// The `guard` setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Guard {
    /// The daemon tells of them, and does nothing.
    #[default]
    Warn,
    /// New connections get the kernel's own timer or a longer one: by the program's brakes, and by the daemon.
    On(GuardLimits),
    /// Nothing.
    Off,
}

/// When it acts, and for how long. A field that is `None` has the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct GuardLimits {
    /// The share of connections with a spurious retransmission that is tolerated.
    #[serde(default, with = "text", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<Share>"))]
    pub spurious: Option<Share>,
    /// How long a timer is not lowered after the first alarm.
    #[serde(
        default,
        with = "text::lifetime",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(test, schemars(with = "Option<String>"))]
    pub hold: Option<Duration>,
}

impl Guard {
    /// As [`rto_model::tune::law::Settings::new`] has it.
    const HOLD: Duration = Duration::from_secs(600);
    /// As [`Rates::DEFAULT`] has it.
    const SPURIOUS: Share = Share::of_ten_thousand(50);

    /// Whether it has brakes, in the program and in the daemon.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        matches!(self, Self::On(_))
    }

    /// What it goes by.
    #[must_use]
    pub fn limits(&self) -> GuardLimits {
        match self {
            Self::On(limits) => *limits,
            Self::Warn | Self::Off => GuardLimits::default(),
        }
    }

    /// The share of connections with a spurious retransmission that is tolerated.
    #[must_use]
    pub fn spurious(&self) -> Share {
        self.limits().spurious.unwrap_or(Self::SPURIOUS)
    }

    /// The rate of spurious retransmissions that is tolerated, and the one that must be noticed: as far apart as the
    /// defaults.
    #[must_use]
    pub fn rates(&self) -> Rates {
        let default = Rates::DEFAULT;
        let tolerated = self.spurious().fraction();
        Rates {
            tolerated,
            intolerable: tolerated * (default.intolerable / default.tolerated),
        }
    }

    /// How long a timer is not lowered after the first alarm.
    #[must_use]
    pub fn hold(&self) -> Duration {
        self.limits().hold.unwrap_or(Self::HOLD)
    }
}

impl Extended for Guard {
    type Table = GuardLimits;
    const WORD: &'static str = "on";

    fn of_table(table: GuardLimits) -> Self {
        Self::On(table)
    }

    fn table(&self) -> Option<&GuardLimits> {
        match self {
            Self::On(limits) => Some(limits),
            Self::Warn | Self::Off => None,
        }
    }
}

impl FromStr for Guard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "warn" => Ok(Self::Warn),
            "off" => Ok(Self::Off),
            _ => read_extended(text).unwrap_or_else(|| {
                Err(format!("{text:?} is neither \"warn\", \"on\" nor \"off\""))
            }),
        }
    }
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Warn => f.write_str("warn"),
            Self::Off => f.write_str("off"),
            Self::On(limits) => write_extended::<Self>(limits, f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Settings;

    #[test]
    fn a_word_or_a_table() {
        for text in ["warn", "on", "off", "on,hold=20m,spurious=0.5%"] {
            let guard: Guard = text.parse().unwrap();
            assert_eq!(guard.to_string(), text);
            let settings = Settings {
                guard: Some(guard),
                ..Settings::default()
            };
            let json = serde_json::to_string(&settings).unwrap();
            assert_eq!(serde_json::from_str::<Settings>(&json).unwrap(), settings);
            let toml = settings.to_toml().to_string();
            assert_eq!(toml::from_str::<Settings>(&toml).unwrap(), settings);
        }
        // A table is on.
        let guard = |toml: &str| toml::from_str::<Settings>(toml).unwrap().guard();
        assert_eq!(guard("guard = {}"), guard("guard = 'on'"));
        assert_eq!(
            guard("guard = { hold = '20m' }").hold(),
            Duration::from_secs(1200)
        );
        for bad in ["", "On", "on,", "warn,hold=5m", "on,copies=50%", "auto"] {
            assert!(bad.parse::<Guard>().is_err(), "{bad}");
        }
    }

    #[test]
    fn values_that_are_learnt_imply_on() {
        let guard = |toml: &str| toml::from_str::<Settings>(toml).unwrap().guard();
        assert_eq!(guard("initial_rto = '100ms'"), Guard::Warn);
        for auto in ["initial_rto = 'auto'", "rto_min = 'auto'"] {
            assert_eq!(guard(auto), Guard::On(GuardLimits::default()));
        }
        assert_eq!(guard("initial_rto = 'auto'\nguard = 'off'"), Guard::Off);
    }

    #[test]
    fn defaults_are_those_of_the_model() {
        let default = rto_model::tune::law::Settings::new(250);
        for guard in [Guard::Warn, Guard::On(GuardLimits::default())] {
            assert_eq!(guard.rates(), default.guard);
            assert_eq!(guard.hold(), Duration::from_millis(default.hold_ms));
            assert_eq!(guard.spurious().to_string(), "0.5%");
        }
    }
}
