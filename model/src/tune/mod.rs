//! Self-tuning timers, and the comparison that proves their benefit.
//!
//! - [`quantile`], [`history`], [`law`]: derive a value. [`tuner`]: decides what the daemon does
//!   with it. See `docs/research/tuning.md`.
//! - [`holdout`]: compares a policy's timers with the kernel's own on a share of the connections,
//!   with [`evidence`] (e-values, and intervals for the ratio of rates). See
//!   `docs/research/holdout.md`.

/// An enum whose values have names.
macro_rules! names {
    ($(#[$doc:meta])* $type:ident { $($(#[$of:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub enum $type {
            $($(#[$of])* #[serde(rename = $name)] $variant,)+
        }

        impl $type {
            /// All values.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Its name in JSON, logs and metrics.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

pub mod evidence;
pub mod history;
pub mod holdout;
pub mod law;
pub mod quantile;
pub mod tuner;
