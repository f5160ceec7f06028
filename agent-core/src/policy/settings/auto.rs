//! `initial_rto = "auto"`: a value that the daemon learns.

use std::{fmt, str::FromStr, time::Duration};

use rto_model::tune::law;
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, MapAccess, value::MapAccessDeserializer},
};

use super::text::{self, Text};
use crate::policy::{
    Share,
    units::{format_duration, parse_duration},
};

/// The default limits, which do not depend on HZ.
const DEFAULT: law::Settings = law::Settings::new(0);

/// The `initial_rto` setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitialRtoSetting {
    /// A fixed value.
    Fixed(Duration),
    /// The daemon learns a value for each direction.
    Auto(AutoInitialRto),
}

/// How the initial RTO is learnt. A field that is `None` has the default of [`law::Settings::new`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AutoInitialRto {
    /// Must be true: the value is learnt.
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
}

impl AutoInitialRto {
    /// The least value.
    pub fn least(&self) -> Duration {
        self.min.unwrap_or(Duration::from_micros(DEFAULT.min_us))
    }

    /// The largest value that may be learnt.
    pub fn largest(&self) -> Duration {
        self.max.unwrap_or(Duration::from_micros(DEFAULT.max_us))
    }

    /// The limits for the tuner, at `hz` jiffies a second.
    pub fn to_law(&self, hz: u32) -> law::Settings {
        let default = law::Settings { hz, ..DEFAULT };
        law::Settings {
            min_us: micros(self.least()),
            max_us: micros(self.largest()),
            spurious: self.spurious.map_or(default.spurious, Share::fraction),
            ..default
        }
    }
}

/// The value `true`; `false` is refused.
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
                "a table needs auto = true; write a fixed value as a duration, for example \
                 \"100ms\"",
            )),
        }
    }
}

impl From<Duration> for InitialRtoSetting {
    fn from(value: Duration) -> Self {
        Self::Fixed(value)
    }
}

/// The word, and the equivalent key of a table.
const AUTO: &str = "auto";

impl FromStr for InitialRtoSetting {
    type Err = String;

    /// Reads a duration, or the command line's form of a table: "auto,min=20ms".
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        if parts.next() != Some(AUTO) {
            return parse_duration(text).map(Self::Fixed).map_err(|e| {
                match text.starts_with(|c: char| c.is_ascii_digit()) {
                    true => e.to_string(),
                    false => format!("not \"auto\", and {e}"),
                }
            });
        }
        let mut table = toml::Table::new();
        table.insert(AUTO.to_owned(), true.into());
        for part in parts {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| format!("{part:?} is not KEY=VALUE; separate several by commas"))?;
            if table.insert(key.to_owned(), value.into()).is_some() {
                return Err(format!("{key} is given twice"));
            }
        }
        let table = table.try_into().map(Self::Auto);
        table.map_err(|e| e.message().to_owned())
    }
}

impl fmt::Display for InitialRtoSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = match self {
            Self::Fixed(value) => return f.write_str(&format_duration(*value)),
            Self::Auto(table) => toml::Table::try_from(table).map_err(|_| fmt::Error)?,
        };
        f.write_str(AUTO)?;
        for (key, value) in table.iter().filter(|(key, _)| *key != AUTO) {
            write!(f, ",{key}={}", value.as_str().unwrap_or_default())?;
        }
        Ok(())
    }
}

impl Text for InitialRtoSetting {
    const WANTED: &'static str =
        "a duration, like \"5ms\", \"auto\" or a table, like { auto = true, min = \"20ms\" }";

    fn read(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn read_table<'de, A: MapAccess<'de>>(table: A) -> Result<Self, A::Error> {
        AutoInitialRto::deserialize(MapAccessDeserializer::new(table)).map(Self::Auto)
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto(table) if *table != AutoInitialRto::default() => table.serialize(serializer),
            _ => serializer.collect_str(self),
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Settings;

    fn read(toml: &str) -> Result<Settings, String> {
        toml::from_str(toml).map_err(|e| e.message().to_owned())
    }

    #[test]
    fn auto_is_word_or_table() {
        let auto = |toml: &str| *read(toml).unwrap().auto_initial_rto().unwrap();
        assert_eq!(auto("initial_rto = 'auto'"), AutoInitialRto::default());
        assert_eq!(
            auto("initial_rto = { auto = true }"),
            AutoInitialRto::default()
        );
        let all = AutoInitialRto {
            min: Some(Duration::from_millis(50)),
            max: Some(Duration::from_millis(500)),
            spurious: "0.2%".parse().ok(),
            ..AutoInitialRto::default()
        };
        let toml = "{ auto = true, min = '50ms', max = '500ms', spurious = '0.2%' }";
        assert_eq!(auto(&format!("initial_rto = {toml}")), all);
        for (toml, why) in [
            ("initial_rto = { min = '50ms' }", "missing field `auto`"),
            (
                "initial_rto = { auto = false }",
                "write a fixed value as a duration",
            ),
            (
                "initial_rto = { auto = true, mni = '5ms' }",
                "unknown field `mni`",
            ),
            (
                "initial_rto = { auto = true, min = '5' }",
                "a unit is missing, perhaps 5ms",
            ),
            (
                "initial_rto = { auto = true, max = 2 }",
                "a unit is missing, perhaps 2ms",
            ),
            (
                "initial_rto = { auto = true, spurious = 1 }",
                "invalid share \"1\"",
            ),
            ("initial_rto = 'Auto'", "not \"auto\", and invalid duration"),
            (
                "initial_rto = true",
                "expected a duration, like \"5ms\", \"auto\" or a table",
            ),
            (
                "rto_min = 'auto'",
                "only initial_rto can be learnt; write a duration",
            ),
            (
                "rto_min = { auto = true, peer_delack = '5ms' }",
                "only initial_rto can be learnt; write a duration",
            ),
            ("delack_max = { min = '5ms' }", "only initial_rto can be"),
        ] {
            let error = read(toml).unwrap_err();
            assert!(error.contains(why), "{toml}: {error}");
        }
    }

    /// The same text on the command line, in JSON, in TOML and in output.
    #[test]
    fn auto_text_has_keys_after_word() {
        for text in [
            "100ms",
            "auto",
            "auto,max=500ms,min=20ms",
            "auto,max=1s,spurious=0.1%",
        ] {
            let setting: InitialRtoSetting = text.parse().unwrap();
            assert_eq!(setting.to_string(), text);
            let settings = Settings {
                initial_rto: Some(setting),
                ..Settings::default()
            };
            let json = serde_json::to_string(&settings).unwrap();
            assert_eq!(serde_json::from_str::<Settings>(&json).unwrap(), settings);
            let toml = settings.to_toml().to_string();
            assert_eq!(toml.lines().count(), 1, "{toml}");
            assert_eq!(read(&toml).unwrap(), settings);
        }
        for (text, why) in [
            ("auto,", "is not KEY=VALUE"),
            ("auto,min", "\"min\" is not KEY=VALUE"),
            ("auto,min=5", "a unit is missing"),
            ("auto,min=5ms,min=6ms", "min is given twice"),
            ("auto,mni=5ms", "unknown field `mni`"),
            ("auto,auto=true", "auto is given twice"),
            ("automatic", "not \"auto\", and invalid duration"),
        ] {
            let error = text.parse::<InitialRtoSetting>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn omitted_auto_keys_have_the_laws_defaults() {
        let law = AutoInitialRto::default().to_law(250);
        assert_eq!(law, law::Settings::new(250));
        let auto: InitialRtoSetting = "auto,min=30ms,max=600ms,spurious=0.2%".parse().unwrap();
        let InitialRtoSetting::Auto(auto) = auto else {
            panic!("{auto}");
        };
        let law = auto.to_law(1000);
        assert_eq!((law.hz, law.min_us, law.max_us), (1000, 30_000, 600_000));
        assert!((law.spurious - 0.002).abs() < 1e-12);
    }
}
