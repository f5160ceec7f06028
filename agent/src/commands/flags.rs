//! Converts settings from configuration keys, which the daemon and the files use, to command-line
//! flags.

use rto_agent_core::policy::SETTINGS;

/// Keys that are also ordinary words; they are keys only before " = ".
const WORDS: [&str; 4] = ["force", "guard", "mode", "mptcp"];
const ASSIGNED: &str = " = ";

/// Replaces keys by flags: "rto_min = 5ms" becomes "--rto-min 5ms", "force = true" becomes
/// "--force".
pub(super) fn flags_for_keys(text: &str) -> String {
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

fn line(text: &str) -> String {
    let flag = |word: &str| {
        let setting = SETTINGS.iter().find(|setting| setting.key.name == word)?;
        Some(setting.flag().0)
    };
    let mut message = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c.is_ascii_lowercase()) {
        let (before, after) = rest.split_at(at);
        message.push_str(before);
        let is_end = |c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-';
        let (word, after) = after.split_at(after.find(is_end).unwrap_or(after.len()));
        let value = after.strip_prefix(ASSIGNED);
        rest = after;
        let flag = flag(word).filter(|_| value.is_some() || !WORDS.contains(&word));
        message.push_str(flag.unwrap_or(word));
        if flag.is_none() {
            continue;
        }
        if let Some(value) = value {
            rest = match value.strip_prefix("true") {
                Some(rest) => rest,
                None => {
                    message.push(' ');
                    value
                }
            };
            // A quoted TOML value.
            if let Some((quoted, after)) = rest.strip_prefix('"').and_then(|r| r.split_once('"')) {
                message.push_str(quoted);
                rest = after;
            }
        }
    }
    message.push_str(rest);
    // The user does not know the name that the daemon generates for these settings.
    match message
        .strip_prefix("policy adhoc-")
        .and_then(|s| s.split_once(": "))
    {
        Some((_, error)) => error.to_owned(),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_flags() {
        for (text, message) in [
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
            assert_eq!(flags_for_keys(text), message);
        }
    }
}
