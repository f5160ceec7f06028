//! What the daemon has decided about a policy, beside its settings: values that it has learnt, brakes, and the share of
//! an experiment.

use std::{collections::BTreeMap, time::Duration};

use super::{PolicyName, Share};

/// By policy; those without any are absent.
pub type Adjustments = BTreeMap<PolicyName, Adjustment>;

/// Of one policy. The default changes nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adjustment {
    /// Of the initial RTO of connections that this host opens.
    pub active: InitialRto,
    /// Of accepted connections.
    pub passive: InitialRto,
    /// The value of `rto_min = "auto"`; `None`: the kernel's own so far.
    pub rto_min: Option<Duration>,
    /// The control arm, instead of `holdout`'s.
    pub control: Option<ControlArm>,
}

/// The initial RTO of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InitialRto {
    /// Which it is.
    pub timer: Timer,
    /// [`rto_agent_common::Policy::epochs`]; 0: without brakes in the program.
    pub epoch: u32,
    /// [`rto_agent_common::Policy::budgets`], whole retransmissions.
    pub budget: u32,
}

impl InitialRto {
    /// The same without a value that was learnt; the kernel's own stays.
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

/// Which timer is in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timer {
    /// That of the settings; where they say "auto", the kernel's own.
    #[default]
    Configured,
    /// The kernel's own.
    Kernel,
    /// This.
    Value(Duration),
}

/// Which connections keep the kernel's own timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlArm {
    /// Their share.
    pub share: Share,
    /// Seed of the hash that draws them.
    pub seed: u32,
    /// It draws peers, not connections.
    pub by_peer: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_forgotten_with_its_brakes_and_the_kernels_own_timer_stays() {
        let braked = |timer| InitialRto {
            timer,
            epoch: 3,
            budget: 5,
        };
        let kernel = braked(Timer::Kernel).without_value();
        let expected = InitialRto {
            timer: Timer::Kernel,
            epoch: 0,
            budget: 0,
        };
        assert_eq!(kernel, expected);
        for timer in [Timer::Configured, Timer::Value(Duration::from_millis(20))] {
            let left = braked(timer).without_value();
            assert_eq!(left, InitialRto::default());
        }
    }
}
