//! Compares JSON documents in part.

use serde_json::Value;

/// Whether a document has every value of another one. Objects may have more keys; null equals a missing key.
#[must_use]
pub fn has(found: &Value, expected: &Value) -> bool {
    match expected {
        Value::Object(expected) => expected
            .iter()
            .all(|(key, value)| has(&found[key.as_str()], value)),
        _ => found == expected,
    }
}

/// Asserts that a document [`has`] every value of another one.
#[track_caller]
pub fn assert_has(found: &Value, expected: Value) {
    assert!(has(found, &expected), "{expected} is not in {found:#}");
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn other_value_and_missing_key_are_found() {
        let found = json!({ "a": { "b": 1, "c": [2] }, "d": "e" });
        for (expected, is_there) in [
            (json!({ "a": { "c": [2] }, "d": "e", "f": null }), true),
            (json!({ "a": { "b": 2 } }), false),
            (json!({ "a": { "c": [] } }), false),
            (json!({ "d": { "e": 1 } }), false),
        ] {
            assert_eq!(has(&found, &expected), is_there, "{expected}");
        }
    }
}
