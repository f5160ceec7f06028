//! The keys that a type is deserialized from.

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, Visitor, value::Error},
    forward_to_deserialize_any,
};

/// The fields of a struct, by their names in serde.
pub(super) fn of<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    let mut keys: &'static [&'static str] = &[];
    // Deserializes nothing: `Keys` only records which fields the type asks for.
    let _nothing = T::deserialize(Keys(&mut keys)).is_err();
    keys
}

struct Keys<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Keys<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("no struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        *self.0 = fields;
        Err(Error::custom("nothing to read"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::AgentConfig, policy::Settings};

    #[test]
    fn keys_are_the_fields() {
        assert_eq!(of::<Settings>().len(), 15);
        assert!(of::<AgentConfig>().contains(&"rtt_sampling"));
        assert!(of::<u8>().is_empty());
    }
}
