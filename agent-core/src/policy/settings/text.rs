//! serde for values in text form. A number is read as its digits, so that the value's own parser
//! reports a missing unit.

use std::{fmt, marker::PhantomData, time::Duration};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, MapAccess, Unexpected, Visitor},
};

use super::{Mode, Mptcp, Share, SynAckRto, SynRetries, format_duration, parse_duration};

/// The value of a setting. Its default means that the setting is not given.
pub(super) trait Value: Sized + Default + PartialEq {
    fn get<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error>;
    fn put<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error>;

    /// Reads an option's value.
    fn read(text: &str) -> Result<Self, String>;

    /// The option's value; `None` if the setting is not given.
    fn text(&self) -> Option<String>;

    /// Whether JSON and TOML omit it.
    fn is_omitted(&self) -> bool {
        *self == Self::default()
    }
}

/// A value in text form.
pub(super) trait Text: Sized {
    const WANTED: &'static str;
    fn read(text: &str) -> Result<Self, String>;
    fn text(&self) -> String;

    fn read_table<'de, A: MapAccess<'de>>(_: A) -> Result<Self, A::Error> {
        Err(A::Error::invalid_type(Unexpected::Map, &Self::WANTED))
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text())
    }
}

impl<T: Text + PartialEq> Value for Option<T> {
    fn get<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Given(PhantomData))
    }

    fn put<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Some(value) => value.write(serializer),
            None => serializer.serialize_none(),
        }
    }

    fn read(text: &str) -> Result<Self, String> {
        T::read(text).map(Some)
    }

    fn text(&self) -> Option<String> {
        self.as_ref().map(Text::text)
    }
}

/// Types with a default of their own.
macro_rules! by_default {
    ($($type:ty),+) => {$(
        impl Value for $type {
            fn get<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Value::get(deserializer).map(Option::unwrap_or_default)
            }

            fn put<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.write(serializer)
            }

            fn read(text: &str) -> Result<Self, String> {
                Text::read(text)
            }

            fn text(&self) -> Option<String> {
                (*self != Self::default()).then(|| Text::text(self))
            }
        }
    )+};
}

by_default!(SynAckRto, SynRetries, Mptcp, Mode);

/// Types that JSON and TOML have.
macro_rules! native {
    ($($type:ty, $read:expr, $text:expr, omitted $omitted:expr;)+) => {$(
        impl Value for $type {
            fn get<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Deserialize::deserialize(deserializer)
            }

            fn put<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.serialize(serializer)
            }

            fn read(text: &str) -> Result<Self, String> {
                $read(text)
            }

            fn text(&self) -> Option<String> {
                $text(self)
            }

            fn is_omitted(&self) -> bool {
                $omitted(self)
            }
        }
    )+};
}

fn boolean(text: &str) -> Result<bool, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is neither true nor false"))
}

fn number(text: &str) -> Result<Option<u8>, String> {
    let number = text.parse().map(Some);
    number.map_err(|_| format!("{text:?} is not a whole number from 0 to {}", u8::MAX))
}

native! {
    bool, boolean, |on: &bool| on.then(|| true.to_string()), omitted |_| false;
    Option<bool>, |text| boolean(text).map(Some), |on: &Option<bool>| on.map(|on| on.to_string()), omitted Option::is_none;
    Option<u8>, number, |n: &Option<u8>| n.map(|n| n.to_string()), omitted Option::is_none;
}

/// Refuses "auto" and its table where only a duration is possible.
const NOT_LEARNT: &str = "only initial_rto can be learnt; write a duration, like \"50ms\" \
                          (docs/operate/tuning.md recommends values of rto_min)";

impl Text for Duration {
    const WANTED: &'static str = "a duration, like \"5ms\"";

    fn read(text: &str) -> Result<Self, String> {
        if text == "auto" || text.starts_with("auto,") {
            return Err(NOT_LEARNT.to_owned());
        }
        parse_duration(text).map_err(|e| e.to_string())
    }

    fn text(&self) -> String {
        format_duration(*self)
    }

    fn read_table<'de, A: MapAccess<'de>>(_: A) -> Result<Self, A::Error> {
        Err(A::Error::custom(NOT_LEARNT))
    }
}

/// A timer's text; `None` for 0.
pub(super) fn timer(duration: Duration) -> Option<String> {
    (!duration.is_zero()).then(|| format_duration(duration))
}

impl Text for SynRetries {
    const WANTED: &'static str = "\"auto\", \"keep\" or a number from 1 to 127";

    fn read(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Fixed(number) => serializer.serialize_u8(*number),
            Self::Auto | Self::Keep => serializer.collect_str(self),
        }
    }
}

macro_rules! text {
    ($type:ty, $wanted:literal) => {
        impl $crate::policy::settings::text::Text for $type {
            const WANTED: &'static str = $wanted;

            fn read(text: &str) -> Result<Self, String> {
                text.parse::<Self>().map_err(|e| e.to_string())
            }

            fn text(&self) -> String {
                self.to_string()
            }
        }
    };
}
pub(super) use text;

text!(SynAckRto, "\"auto\", \"keep\" or a duration, like \"5ms\"");
text!(Share, "a share, like \"5%\"");

struct Given<T>(PhantomData<T>);

impl<'de, T: Text> Visitor<'de> for Given<T> {
    type Value = Option<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::WANTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        T::read(text).map(Some).map_err(E::custom)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Self::Value, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<Self::Value, A::Error> {
        T::read_table(table).map(Some)
    }
}

pub(super) fn serialize<V: Value, S: Serializer>(
    value: &V,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    value.put(serializer)
}

pub(super) fn deserialize<'de, V: Value, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<V, D::Error> {
    V::get(deserializer)
}
