//! The macros of the table of settings.

use rto_agent_common::Policy;

use super::Settings;

/// A key of the configuration, for what is derived from its row.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The key in files and in JSON.
    pub name: &'static str,
    /// The help: paragraphs, of which the first is the short form.
    pub help: &'static str,
    /// The accepted values, for the reference.
    pub values: &'static str,
    /// The default, for the reference. A value of TOML is in backticks.
    pub default: &'static str,
    /// The meaning, for the reference, if it is more than the help.
    pub meaning: Option<&'static str>,
    /// The kernel features that it uses.
    pub features: &'static [&'static str],
    /// Values at each bound, as TOML, that are accepted and refused.
    pub samples: [&'static [&'static str]; 2],
}

/// A setting.
#[derive(Debug)]
pub struct Setting {
    /// Its key.
    pub key: Key,
    /// The option, and what the help calls its value: "BOOL" may be left out, a switch has none.
    pub option: &'static str,
    /// What it has an effect on.
    pub effect: Effect,
    /// The setting without which it has no effect.
    pub with: Option<&'static str>,
    /// Whether the settings have an effect by this one.
    pub acts: fn(&Settings) -> bool,
    /// Copies the setting to other settings.
    pub copy: fn(&mut Settings, &Settings),
    /// Reads the option's value.
    pub read: fn(&mut Settings, &str) -> Result<(), String>,
    /// The option's value; `None` if the setting is not given.
    pub text: fn(&Settings) -> Option<String>,
    /// The value in the kernel's map, at a number of jiffies per second; `None` if there is none.
    pub in_kernel: fn(&Policy, u32) -> Option<String>,
}

/// What a setting has an effect on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Handshakes.
    Handshake,
    /// Established connections.
    Connection,
    /// Nothing, without other settings.
    Nothing,
}

impl Setting {
    /// The option, and the name of its value.
    pub fn flag(&self) -> (&'static str, Option<&'static str>) {
        match self.option.split_once(' ') {
            Some((flag, value)) => (flag, Some(value)),
            None => (self.option, None),
        }
    }

    /// The option with a value: "--rto-min 5ms", "--thin-linear".
    pub fn option_with(&self, value: &str) -> String {
        let (flag, _) = self.flag();
        match value {
            "true" => flag.to_owned(),
            value => format!("{flag} {value}"),
        }
    }

    /// The words among the option's values: of "DURATION|auto", "auto".
    pub fn words(&self) -> impl Iterator<Item = &'static str> {
        let values = self.flag().1.unwrap_or_default().split('|');
        values.filter(|value| value.starts_with(|c: char| c.is_ascii_lowercase()))
    }
}

impl Key {
    /// The paragraphs of the help, each on one line.
    pub fn paragraphs(&self) -> Vec<String> {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        self.help.split("\n\n").map(words).collect()
    }
}

macro_rules! settings {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident: $type:ty as $schema:literal {
            option $option:literal,
            values $values:literal,
            $(default $default:literal,)?
            $(meaning $meaning:literal,)?
            $(effect $effect:ident $(if $acts:expr)?,)?
            $(with $with:literal,)?
            $(kernel $unit:ident $field:ident,)?
            $(features [$($feature:literal),+],)?
            accepted [$($accepted:literal),+ $(,)?],
            refused [$($refused:literal),+ $(,)?],
        }
    )+) => {
        /// What a policy sets. A field that is `None` leaves the kernel's own value.
        #[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        #[serde(deny_unknown_fields, default)]
        pub struct Settings {
            $(
                $(#[doc = $doc])+
                #[serde(with = "text", skip_serializing_if = "text::Value::is_omitted")]
                #[cfg_attr(test, schemars(with = $schema))]
                pub $name: $type,
            )+
        }

        /// All settings, in the order of the reference.
        pub const SETTINGS: &[Setting] = &[$(Setting {
            key: key!(
                $name, [$($doc),+], $values, default!($($default)?), optional!($($meaning)?),
                [$($($feature),+)?], [$($accepted),+], [$($refused),+]
            ),
            option: $option,
            effect: effect!($($effect)?),
            with: optional!($($with)?),
            acts: |settings| {
                let acts: fn(&$type) -> bool = acts!($($effect $($acts)?)?);
                acts(&settings.$name)
            },
            copy: |settings, others| settings.$name.clone_from(&others.$name),
            read: |settings, text| {
                settings.$name = text::Value::read(text)?;
                Ok(())
            },
            text: |settings| text::Value::text(&settings.$name),
            in_kernel: in_kernel!($($unit $field)?),
        }),+];
    };
}

/// A [`Key`].
macro_rules! key {
    (
        $name:ident, [$($doc:literal),+], $values:literal, $default:expr, $meaning:expr,
        [$($feature:literal),*], [$($accepted:literal),+], [$($refused:literal),+]
    ) => {
        $crate::policy::Key {
            name: stringify!($name),
            help: concat!($($doc, "\n"),+),
            values: $values,
            default: $default,
            meaning: $meaning,
            features: &[$($feature),*],
            samples: [&[$($accepted),+], &[$($refused),+]],
        }
    };
}

pub(crate) use key;

macro_rules! default {
    () => {
        "the kernel's own"
    };
    ($value:literal) => {
        $value
    };
}

macro_rules! optional {
    () => {
        None
    };
    ($value:literal) => {
        Some($value)
    };
}

macro_rules! effect {
    () => {
        Effect::Nothing
    };
    ($effect:ident) => {
        Effect::$effect
    };
}

macro_rules! acts {
    () => {
        |_| false
    };
    ($effect:ident) => {
        |value| *value != Default::default()
    };
    ($effect:ident $acts:expr) => {
        $acts
    };
}

/// Reads a field of the kernel's policy; 0 is no value.
macro_rules! in_kernel {
    () => {
        |_, _| None
    };
    (jiffies $field:ident) => {
        |policy, hz| text::timer(super::units::jiffies_duration(policy.$field.into(), hz))
    };
    (us $field:ident) => {
        |policy, _| text::timer(Duration::from_micros(policy.$field.into()))
    };
    (ms $field:ident) => {
        |policy, _| text::timer(Duration::from_millis(policy.$field.into()))
    };
    (flag $flag:ident) => {
        |policy, _| {
            let flag = rto_agent_common::policy_flags::$flag;
            (policy.flags & flag != 0).then(|| "true".to_owned())
        }
    };
    (share $field:ident) => {
        |policy, _| {
            let share = Share::from_parts(policy.$field);
            (share != Share::ZERO).then(|| share.to_string())
        }
    };
}

/// An enum whose values are words.
macro_rules! words {
    (
        $(#[doc = $doc:literal])+
        $name:ident, $wanted:literal { $($(#[$meta:meta])+ $word:ident = $text:literal,)+ }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $name {
            $($(#[$meta])+ $word,)+
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok(Self::$word),)+
                    _ => Err(format!("{text:?} is neither {}", $wanted.replace(" or ", " nor "))),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$word => $text,)+
                })
            }
        }

        text::text!($name, $wanted);
    };
}
