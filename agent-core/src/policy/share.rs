//! Shares as people write them: "5%", "0.5%".

use std::{fmt, str::FromStr};

/// A share from 0 to 100 %, in units of 2^-32, the resolution of the program's hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u64);

/// 100 %.
const WHOLE: u64 = 1 << 32;
/// Most decimals of a text: a millionth of a percent is 43 units, so that different texts are
/// different shares.
const DECIMALS: u32 = 6;
const PERCENT: u64 = 100;

/// Why a text is an invalid share.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid share {0:?}; write a percentage from 0% to 100%, like \"5%\" or \"0.5%\", with {DECIMALS} decimals at most"
)]
pub struct ShareError(String);

impl Share {
    /// 0 %.
    pub const ZERO: Self = Self(0);

    /// A share from hundredths of a percent, up to 65,535 of them.
    pub(crate) const fn of_ten_thousand(hundredths: u16) -> Self {
        Self::of_units(hundredths as u64, 2)
    }

    /// A share from units of 2^-32.
    pub const fn from_parts(parts: u32) -> Self {
        Self(parts as u64)
    }

    /// 100 %.
    pub const ALL: Self = Self(WHOLE);

    /// The bound below which this share of all 32-bit numbers lies; one too low for 100 %.
    pub fn below(self) -> u32 {
        u32::try_from(self.0).unwrap_or(u32::MAX)
    }

    /// The share as a fraction, 0 to 1, rounded to the nearest one with a text.
    pub fn fraction(self) -> f64 {
        let whole = PERCENT * 10u64.pow(DECIMALS);
        let float = |units: u64| u32::try_from(units).map_or(f64::NAN, f64::from);
        float(self.units(DECIMALS)) / float(whole)
    }

    /// A share from units of the last decimal, rounded. (The product is below 2^59.)
    const fn of_units(units: u64, decimals: u32) -> Self {
        let whole = PERCENT * 10u64.pow(decimals);
        Self((units * WHOLE + whole / 2) / whole)
    }

    /// The share in units of the last decimal, rounded.
    const fn units(self, decimals: u32) -> u64 {
        let whole = PERCENT * 10u64.pow(decimals);
        (self.0 * whole + WHOLE / 2) / WHOLE
    }
}

impl FromStr for Share {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, ShareError> {
        parse(text.trim()).ok_or_else(|| ShareError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Share> {
    let number = text.strip_suffix('%')?.trim_end();
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
        Some(_) => return None,
        None => (number, ""),
    };
    let decimals = u32::try_from(fraction.len()).ok()?;
    let digits = format!("{whole}{fraction}");
    let is_number = digits.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !is_number || decimals > DECIMALS {
        return None;
    }
    let units = digits.parse().ok()?;
    (units <= PERCENT * 10u64.pow(decimals)).then(|| Share::of_units(units, decimals))
}

as_text!(Share);

impl fmt::Display for Share {
    /// The shortest text of exactly this share.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_exact = |decimals: &u32| Self::of_units(self.units(*decimals), *decimals) == *self;
        let decimals = (0..DECIMALS).find(is_exact).unwrap_or(DECIMALS);
        let (units, scale) = (self.units(decimals), 10u64.pow(decimals));
        let text = match usize::try_from(decimals) {
            Ok(width) if width > 0 => format!("{}.{:0width$}%", units / scale, units % scale),
            _ => format!("{units}%"),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_shown_as_written() {
        for text in [
            "0%",
            "5%",
            "0.5%",
            "50%",
            "95%",
            "33.333333%",
            "0.000001%",
            "99.999999%",
            "100%",
        ] {
            assert_eq!(text.parse::<Share>().unwrap().to_string(), text);
        }
        for (text, shown) in [("5.0%", "5%"), (" 2 % ", "2%"), ("007.50%", "7.5%")] {
            assert_eq!(text.parse::<Share>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn bad_share_is_refused_with_examples() {
        for bad in [
            "",
            "%",
            "5",
            "0.05",
            ".5%",
            "5.%",
            "-1%",
            "+1%",
            "1e1%",
            "5 percent",
            "100.1%",
            "101%",
            "0.0000001%",
            "99999999999999999999%",
        ] {
            let error = bad.parse::<Share>().unwrap_err().to_string();
            assert!(error.contains("like \"5%\" or \"0.5%\""), "{error}");
        }
    }

    #[test]
    fn share_parts_cover_hash_range() {
        let below = |text: &str| text.parse::<Share>().unwrap().below();
        assert_eq!(below("0%"), 0);
        assert_eq!(below("50%"), 1 << 31);
        assert_eq!(below("25%"), 1 << 30);
        assert_eq!(below("100%"), u32::MAX);
        let share: Share = "33.333333%".parse().unwrap();
        assert_eq!((share.fraction() * 1e8).round(), 33_333_333.0);
        assert_eq!(Share::ALL.to_string(), "100%");
    }

    proptest::proptest! {
        /// Every valid text is kept exactly.
        #[test]
        fn share_text_and_parts_round_trip(units in 0u64..=100_000_000) {
            let share = Share::of_units(units, DECIMALS);
            proptest::prop_assert_eq!(share.to_string().parse::<Share>(), Ok(share));
            if share.0 < WHOLE {
                proptest::prop_assert_eq!(Share::from_parts(share.below()), share);
            }
        }
    }
}
