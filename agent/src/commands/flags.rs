//! Converts settings from configuration keys, which the daemon and the files use, to command-line
//! flags.

use clap::Args as _;
use rto_agent_core::policy::Settings;

/// Keys that are also ordinary words; they are keys only before " = ".
const WORDS: [&str; 4] = ["force", "guard", "mode", "mptcp"];
const ASSIGNED: &str = " = ";

/// Replaces keys by flags: "rto_min = 5ms" becomes "--rto-min 5ms", "force = true" becomes
/// "--force".
pub(super) fn flags_for_keys(text: &str) -> String {
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

fn line(text: &str) -> String {
    let command = Settings::augment_args(clap::Command::new(""));
    let is_key = |word: &str| command.get_arguments().any(|arg| arg.get_id() == word);
    let mut said = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c.is_ascii_lowercase()) {
        let (before, after) = rest.split_at(at);
        said.push_str(before);
        let is_end = |c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-';
        let (word, after) = after.split_at(after.find(is_end).unwrap_or(after.len()));
        let value = after.strip_prefix(ASSIGNED);
        rest = after;
        if !is_key(word) || WORDS.contains(&word) && value.is_none() {
            said.push_str(word);
            continue;
        }
        said.push_str(&flag(word));
        if let Some(value) = value {
            rest = match value.strip_prefix("true") {
                Some(rest) => rest,
                None => {
                    said.push(' ');
                    value
                }
            };
            // A quoted TOML value.
            if let Some((quoted, after)) = rest.strip_prefix('"').and_then(|r| r.split_once('"')) {
                said.push_str(quoted);
                rest = after;
            }
        }
    }
    said.push_str(rest);
    // The user does not know the name that the daemon generates for these settings.
    match said
        .strip_prefix("policy adhoc-")
        .and_then(|s| s.split_once(": "))
    {
        Some((_, error)) => error.to_owned(),
        None => said,
    }
}

/// Formats settings as arguments of `rto-agent add`.
pub(super) fn of(settings: &Settings) -> String {
    let table = settings.to_toml();
    let flags = table.iter().map(|(key, value)| {
        let value = match (value.as_str(), value.as_inline_table()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(table)) => extended(table),
            (None, None) => value.to_string().trim().to_owned(),
        };
        match value.as_str() {
            "true" => flag(key),
            value => format!("{} {value}", flag(key)),
        }
    });
    flags.collect::<Vec<_>>().join(" ")
}

/// Formats a table as on the command line: "auto,min=20ms".
fn extended(table: &toml_edit::InlineTable) -> String {
    const AUTO: &str = "auto";
    let mut text = if table.contains_key(AUTO) { AUTO } else { "on" }.to_owned();
    for (key, value) in table.iter().filter(|(key, _)| *key != AUTO) {
        text.push_str(&format!(",{key}={}", value.as_str().unwrap_or_default()));
    }
    text
}

fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_flags() {
        for (text, said) in [
            (
                "initial_rto = 100ms: below 200ms on a prefix shorter than /8 needs force = true, because",
                "--initial-rto 100ms: below 200ms on a prefix shorter than /8 needs --force, because",
            ),
            (
                "policy adhoc-00ff11aa: linear_retries = 2: linear mode is not enabled; add \
                 thin_linear = true",
                "--linear-retries 2: linear mode is not enabled; add --thin-linear",
            ),
            (
                "rto_min = 5ms without delack_max: add one, for example rto_min = \"100ms\"",
                "--rto-min 5ms without --delack-max: add one, for example --rto-min 100ms",
            ),
            (
                "no policy is active: net.ipv4.tcp_retries2 = 15",
                "no policy is active: net.ipv4.tcp_retries2 = 15",
            ),
        ] {
            assert_eq!(flags_for_keys(text), said);
        }
    }

    #[test]
    fn settings_become_flags() {
        let json = r#"{"initial_rto":"100ms","thin_linear":true,"syn_retries":6,"force":true}"#;
        let settings: Settings = serde_json::from_str(json).unwrap();
        assert_eq!(
            of(&settings),
            "--initial-rto 100ms --thin-linear --syn-retries 6 --force"
        );
        let json = r#"{"initial_rto":{"auto":true,"min":"50ms"},"rto_min":"auto","guard":"on"}"#;
        let settings: Settings = serde_json::from_str(json).unwrap();
        assert_eq!(
            of(&settings),
            "--initial-rto auto,min=50ms --rto-min auto --guard on"
        );
    }
}
