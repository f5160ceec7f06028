//! Snippets, and shares as text. The advice itself is tested where its evidence is from.

use super::*;
use crate::{config::Config, testing::HOST};

#[test]
fn snippet_is_valid_configuration() {
    let settings = Settings {
        initial_rto: Some(Duration::from_millis(100).into()),
        ..Settings::default()
    };
    let dotted: PolicyName = "eu.west".parse().unwrap();
    let snippet = text::keys(&dotted, &settings);
    let parsed: toml::Table = toml::from_str(&snippet).unwrap();
    assert!(parsed["policy"]["eu.west"].is_table());
    // A new policy is a complete configuration by itself.
    let policy = text::policy(&["10.0.0.0/24".parse().unwrap()], &settings);
    let config = Config::from_text("config.toml".as_ref(), policy, &HOST).unwrap();
    assert_eq!(config.set.entries.len(), 1);
}

#[test]
fn share_is_parsed_and_shown_in_percent() {
    for (text, value) in [
        ("0.1%", 0.001),
        ("1 %", 0.01),
        ("50%", 0.5),
        (" 0.001%", 0.000_01),
    ] {
        assert!((share(text).unwrap() - value).abs() < 1e-9, "{text}");
    }
    for (text, message) in [
        ("0.1", "for example, 0.1%"),
        ("%", "for example, 0.1%"),
        ("0%", "0.001% to 50%"),
        ("51%", "0.001% to 50%"),
        ("NaN%", "0.001% to 50%"),
    ] {
        let error = share(text).unwrap_err();
        assert!(error.contains(message), "{text}: {error}");
    }
    for (share, message) in [
        (0.0, "0%"),
        (0.001, "0.1%"),
        (0.0006, "0.06%"),
        (0.1234, "12%"),
        (0.0312, "3.1%"),
        (0.000_001, "0.0001%"),
        (0.9999, "100%"),
    ] {
        assert_eq!(percent(share), message);
    }
}
