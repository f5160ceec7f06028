//! serde for values in text form. A number is read as its digits, so that the value's own parser
//! reports a missing unit.

use std::{fmt, marker::PhantomData, time::Duration};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeOwned, Error, MapAccess, Unexpected, Visitor, value::MapAccessDeserializer},
};

use super::{
    Guard, InitialRtoSetting, Mode, Mptcp, RtoMinSetting, Share, SynAckRto, SynRetries,
    format_duration, parse_duration,
};
use crate::policy::units::{Scale, parse_scaled};

pub(super) trait Text: Sized {
    const WANTED: &'static str;
    fn read(text: &str) -> Result<Self, String>;

    fn read_table<'de, A: MapAccess<'de>>(_: A) -> Result<Self, A::Error> {
        Err(A::Error::invalid_type(Unexpected::Map, &Self::WANTED))
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error>;
}

impl Text for Duration {
    const WANTED: &'static str = "a duration, like \"5ms\"";

    fn read(text: &str) -> Result<Self, String> {
        parse_duration(text).map_err(|e| e.to_string())
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format_duration(*self))
    }
}

/// A duration other than a timer.
struct Lifetime(Duration);

impl Text for Lifetime {
    const WANTED: &'static str = "a duration, like \"10m\"";

    fn read(text: &str) -> Result<Self, String> {
        let duration = parse_scaled(text, Scale::Lifetime);
        duration.map(Self).map_err(|e| e.to_string())
    }

    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.write(serializer)
    }
}

impl Text for SynRetries {
    const WANTED: &'static str = "\"auto\", \"keep\" or a number from 1 to 127";

    fn read(text: &str) -> Result<Self, String> {
        text.parse()
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
        impl Text for $type {
            const WANTED: &'static str = $wanted;

            fn read(text: &str) -> Result<Self, String> {
                text.parse::<Self>().map_err(|e| e.to_string())
            }

            fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    };
}

text!(SynAckRto, "\"auto\", \"keep\" or a duration, like \"5ms\"");
text!(Mptcp, "\"keep\" or \"apply\"");
text!(Mode, "\"apply\" or \"advise\"");
text!(Guard, "\"warn\", \"on\" or \"off\"");
text!(Share, "a share, like \"5%\"");

/// A value that may be "auto", or a table with further keys.
pub(super) trait Extended: Sized {
    type Table: DeserializeOwned + Serialize + Default + PartialEq;
    fn of_table(table: Self::Table) -> Self;
    fn table(&self) -> Option<&Self::Table>;
}

macro_rules! extended {
    ($type:ty, $wanted:literal) => {
        impl Text for $type {
            const WANTED: &'static str = $wanted;

            fn read(text: &str) -> Result<Self, String> {
                text.parse()
            }

            fn read_table<'de, A: MapAccess<'de>>(table: A) -> Result<Self, A::Error> {
                Deserialize::deserialize(MapAccessDeserializer::new(table)).map(Self::of_table)
            }

            fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                match self.table() {
                    Some(table) if *table != Default::default() => table.serialize(serializer),
                    _ => serializer.collect_str(self),
                }
            }
        }
    };
}

extended!(
    InitialRtoSetting,
    "a duration, like \"5ms\", \"auto\" or a table, like { auto = true, min = \"20ms\" }"
);
extended!(
    RtoMinSetting,
    "a duration, like \"5ms\", \"auto\" or a table, like { auto = true, peer_delack = \"5ms\" }"
);

/// The word, and the equivalent key of a table.
const AUTO: &str = "auto";

/// Parses the command line's form of a table: "auto,min=20ms"; `None` if it does not begin with
/// "auto".
pub(super) fn read_extended<T: Extended>(text: &str) -> Option<Result<T, String>> {
    let mut parts = text.split(',');
    (parts.next()? == AUTO).then(|| {
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
        let table = table.try_into::<T::Table>();
        table.map(T::of_table).map_err(|e| e.message().to_owned())
    })
}

/// Writes the command line's form of a table.
pub(super) fn write_extended<T: Extended>(
    table: &T::Table,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let table = toml::Table::try_from(table).map_err(|_| fmt::Error)?;
    f.write_str(AUTO)?;
    for (key, value) in table.iter().filter(|(key, _)| *key != AUTO) {
        write!(f, ",{key}={}", value.as_str().unwrap_or_default())?;
    }
    Ok(())
}

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

pub(super) fn serialize<T: Text, S: Serializer>(
    value: &Option<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => value.write(serializer),
        None => serializer.serialize_none(),
    }
}

pub(super) fn deserialize<'de, T: Text, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    deserializer.deserialize_any(Given(PhantomData))
}

/// For a type whose default means unset.
pub(super) mod or_default {
    use super::{Deserializer, Serializer, Text};

    pub(in super::super) fn serialize<T: Text, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.write(serializer)
    }

    pub(in super::super) fn deserialize<'de, T: Text + Default, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        super::deserialize(deserializer).map(Option::unwrap_or_default)
    }
}

/// For a duration other than a timer.
pub(super) mod lifetime {
    use super::{Deserializer, Duration, Lifetime, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        value: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        super::serialize(value, serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        let read = super::deserialize::<Lifetime, D>(deserializer)?;
        Ok(read.map(|Lifetime(duration)| duration))
    }
}
