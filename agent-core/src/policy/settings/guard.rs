//! The `guard` setting.

use std::{fmt, str::FromStr};

/// The reaction to spurious retransmissions of SYNs and SYN-ACKs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Guard {
    /// Only reports what the brakes would have done.
    #[default]
    Warn,
    /// Brakes in the program give new connections the kernel's own timer.
    On,
    /// No reaction.
    Off,
}

impl FromStr for Guard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "warn" => Ok(Self::Warn),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(format!("{text:?} is neither \"warn\", \"on\" nor \"off\"")),
        }
    }
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Warn => "warn",
            Self::On => "on",
            Self::Off => "off",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Settings;

    #[test]
    fn guard_is_a_word() {
        for text in ["warn", "on", "off"] {
            let guard: Guard = text.parse().unwrap();
            assert_eq!(guard.to_string(), text);
        }
        for bad in ["", "On", "on,", "auto"] {
            assert!(bad.parse::<Guard>().is_err(), "{bad}");
        }
    }

    #[test]
    fn values_that_are_learnt_imply_on() {
        let guard = |toml: &str| toml::from_str::<Settings>(toml).unwrap().guard();
        assert_eq!(guard("initial_rto = '100ms'"), Guard::Warn);
        for auto in ["initial_rto = 'auto'", "rto_min = 'auto'"] {
            assert_eq!(guard(auto), Guard::On);
        }
        assert_eq!(guard("initial_rto = 'auto'\nguard = 'off'"), Guard::Off);
    }
}
