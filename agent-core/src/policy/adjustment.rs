//! The daemon's decisions about a policy, beyond its settings: learnt values, and fallbacks.

use std::{collections::BTreeMap, time::Duration};

use super::PolicyName;

/// Adjustments by policy; a policy without any is absent.
pub type Adjustments = BTreeMap<PolicyName, Adjustment>;

/// The decisions about one policy. The default changes nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adjustment {
    /// For the initial RTO of connections that this host opens.
    pub active: InitialRto,
    /// For the SYN-ACK RTO of accepted connections.
    pub passive: InitialRto,
    /// [`rto_agent_common::Policy::repath_jiffies`].
    pub repath_jiffies: u16,
    /// Fallback (harm): all new connections keep the kernel's own timers.
    pub harm: bool,
}

impl Adjustment {
    /// Without its values. A fallback, and what the operator has frozen, stays.
    #[must_use]
    pub fn without_values(&self) -> Self {
        Self {
            active: self.active.without_value(),
            passive: self.passive.without_value(),
            repath_jiffies: 0,
            harm: self.harm,
        }
    }
}

/// The initial RTO of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InitialRto {
    /// The timer in force.
    pub timer: Timer,
    /// [`rto_agent_common::Policy::epochs`]; 0: without fallbacks in the program.
    pub epoch: u32,
}

impl InitialRto {
    /// Replaces a learnt value by the kernel's own timer.
    #[must_use]
    pub fn without_value(self) -> Self {
        match self.timer {
            Timer::Kernel => Self {
                timer: Timer::Kernel,
                ..Self::default()
            },
            Timer::Configured | Timer::Value(_) => Self::default(),
        }
    }
}

/// The source of a timer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timer {
    /// The settings; for "auto", the kernel's own timer.
    #[default]
    Configured,
    /// The kernel's own.
    Kernel,
    /// A value that the daemon has decided.
    Value(Duration),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_value_clears_value_and_epoch() {
        let guarded = |timer| InitialRto { timer, epoch: 3 };
        let kernel = guarded(Timer::Kernel).without_value();
        let expected = InitialRto {
            timer: Timer::Kernel,
            epoch: 0,
        };
        assert_eq!(kernel, expected);
        for timer in [Timer::Configured, Timer::Value(Duration::from_millis(20))] {
            let left = guarded(timer).without_value();
            assert_eq!(left, InitialRto::default());
        }
    }
}
