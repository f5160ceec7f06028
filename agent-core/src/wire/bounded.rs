//! Lists with a maximum length: the memory of a request depends on the number of its strings, not
//! on their length.

use std::fmt;

use serde::{
    Deserializer,
    de::{Error as _, SeqAccess, Visitor},
};

/// Most CIDRs in a request.
pub const MAX_CIDRS: usize = 1 << 19;

pub(super) fn cidrs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    deserializer.deserialize_seq(AtMost(MAX_CIDRS))
}

struct AtMost(usize);

impl<'de> Visitor<'de> for AtMost {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {} CIDRs", self.0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(text) = list.next_element()? {
            if all.len() == self.0 {
                return Err(A::Error::custom(format!(
                    "a request may have at most {} CIDRs; put more into a file in policies.d",
                    self.0
                )));
            }
            all.push(text);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_beyond_limit_is_refused() {
        let list = |n: usize| format!("[{}]", vec!["\"\""; n].join(","));
        let read = |text: &str| cidrs(&mut serde_json::Deserializer::from_str(text));
        assert_eq!(read(&list(MAX_CIDRS)).unwrap().len(), MAX_CIDRS);
        let error = read(&list(MAX_CIDRS + 1)).unwrap_err().to_string();
        assert!(error.contains("at most 524288 CIDRs"), "{error}");
    }
}
