//! A policy's name.

use std::{fmt, str::FromStr, sync::Arc};

use rto_agent_common::POLICY_NAME_LEN;
use sha2::{Digest as _, Sha256};

use super::Settings;

const AD_HOC: &str = "adhoc-";
/// Hexadecimal digits of a name derived from settings.
const DIGITS: [usize; 3] = [8, 16, 56];
const UNMATCHED: &str = "unmatched";

/// Letters, digits, `.`, `_` and `-`, beginning with a letter or digit; at most 63 bytes (the
/// kernel's table stores 64 with the terminating NUL).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyName(Arc<str>);

/// Why a text is an invalid policy name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid policy name {0:?}; use letters, digits, '.', '_' and '-', beginning with a letter or \
     digit, {max} characters at most",
    max = POLICY_NAME_LEN - 1
)]
pub struct NameError(String);

impl PolicyName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name that `rto-agent add` derives from settings. Equal settings have the same name,
    /// different settings different names: if other settings already have the short name, a longer
    /// one is used. (A collision of 32 bits can be found in a fraction of a second.)
    pub fn for_settings(settings: &Settings, is_of_others: impl Fn(&Self) -> bool) -> Self {
        let digest = digest(settings);
        let names = DIGITS.map(|digits| Self(format!("{AD_HOC}{}", &digest[..digits]).into()));
        let [.., longest] = &names;
        let free = names.iter().find(|name| !is_of_others(name));
        free.unwrap_or(longest).clone()
    }

    /// Whether [`PolicyName::for_settings`] derives this name from these settings.
    pub fn is_made_of(&self, settings: &Settings) -> bool {
        let digits = self.0.strip_prefix(AD_HOC);
        digits.is_some_and(|digits| {
            DIGITS.contains(&digits.len()) && digest(settings).starts_with(digits)
        })
    }

    /// The seed of the hash that assigns connections to the policy's arms: the same on every host, so that a peer is in
    /// the same arm everywhere.
    pub fn control_seed(&self) -> u32 {
        let digest = Sha256::digest(self.0.as_bytes());
        digest
            .iter()
            .take(4)
            .fold(0, |seed, byte| seed << 8 | u32::from(*byte))
    }

    /// Marks the owner of a slot without a name; never equal to a valid name.
    pub fn nameless() -> Self {
        Self("".into())
    }

    /// The name for counters of connections that no entry covers; not available to policies.
    pub fn unmatched() -> Self {
        Self(UNMATCHED.into())
    }

    /// The name of the slot for the settings of control arms; never equal to a valid name.
    pub fn control() -> Self {
        Self("(control)".into())
    }

    /// The name, padded as in the kernel's table.
    pub fn padded(&self) -> [u8; POLICY_NAME_LEN] {
        let mut bytes = [0; POLICY_NAME_LEN];
        bytes[..self.0.len()].copy_from_slice(self.0.as_bytes());
        bytes
    }
}

/// The digest of the settings' JSON. Later versions must omit unset new settings, so that digests
/// stay the same.
fn digest(settings: &Settings) -> String {
    let text = serde_json::to_string(settings).unwrap_or_default();
    let digest = Sha256::digest(text);
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

impl FromStr for PolicyName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let first = text.bytes().next();
        let good = first.is_some_and(|b| b.is_ascii_alphanumeric())
            && text.len() < POLICY_NAME_LEN
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        if good {
            Ok(Self(text.into()))
        } else {
            Err(NameError(text.to_owned()))
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

as_text!(PolicyName);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_names_are_validated() {
        let long = "x".repeat(63);
        for good in ["a", "same-zone", "eu.west_1", "7", &long] {
            assert_eq!(good.parse::<PolicyName>().unwrap().as_str(), good);
        }
        let longer = "x".repeat(64);
        for bad in ["", "-a", ".a", "a b", "a/b", "ä", &longer] {
            assert!(bad.parse::<PolicyName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn equal_settings_have_equal_adhoc_name() {
        let a = Settings {
            thin_linear: Some(true),
            ..Settings::default()
        };
        let b = Settings {
            thin_linear: Some(false),
            ..Settings::default()
        };
        let name = |settings| PolicyName::for_settings(settings, |_| false);
        assert_eq!(name(&a), name(&a));
        assert_ne!(name(&a), name(&b));
        assert!(name(&a).as_str().parse::<PolicyName>().is_ok());
    }

    #[test]
    fn adhoc_name_of_other_settings_is_not_reused() {
        let a = Settings {
            thin_linear: Some(true),
            ..Settings::default()
        };
        let short = PolicyName::for_settings(&a, |_| false);
        let long = PolicyName::for_settings(&a, |name| *name == short);
        assert!(long.as_str().starts_with(short.as_str()) && long != short);
        let longest = PolicyName::for_settings(&a, |_| true);
        for name in [&short, &long, &longest] {
            assert!(name.as_str().parse::<PolicyName>().is_ok());
            assert!(name.is_made_of(&a), "{name}");
            assert!(!name.is_made_of(&Settings::default()), "{name}");
        }
        for other in ["near", "adhoc-", "adhoc-0"] {
            assert!(!other.parse::<PolicyName>().unwrap().is_made_of(&a));
        }
    }

    /// Hosts of different versions must agree.
    #[test]
    fn control_seed_depends_on_name_only() {
        let seed = |name: &str| name.parse::<PolicyName>().unwrap().control_seed();
        // The first bytes of SHA-256("abc"), FIPS 180-2, appendix B.1.
        assert_eq!(seed("abc"), 0xba78_16bf);
        assert_ne!(seed("near"), seed("nearer"));
        assert!(
            PolicyName::control()
                .as_str()
                .parse::<PolicyName>()
                .is_err()
        );
    }
}
