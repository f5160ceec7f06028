//! The program's fallbacks (`rto_agent_common::fallback`) on one processor, as `agent-ebpf` implements them.

use rto_agent_common::fallback::Fallback;

/// The fallbacks of one policy.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fallbacks {
    state: Fallback,
    epoch: u32,
}

impl Fallbacks {
    /// Spurious connections are counted for each epoch.
    pub(super) const fn begin(&mut self, epoch: u32) {
        if self.epoch != epoch {
            (self.epoch, self.state.epoch, self.state.spurious) = (epoch, epoch, 0);
        }
    }

    /// A connection was established; `clean`: without a retransmission.
    pub(super) fn established(&mut self, clean: bool) {
        self.state.lost = 0;
        if clean && !self.is_spurious() {
            self.state.spurious -= i32::from(self.state.spurious > 0);
        }
    }

    /// An attempt has lost its first SYN.
    pub(super) fn first_syn_lost(&mut self, at_us: f64) {
        if self.state.lost == 0 {
            self.state.lost_since_ms = ms(at_us);
        }
        self.state.lost += 1;
    }

    /// A connection had a spurious retransmission.
    pub(super) fn spurious(&mut self) {
        self.state.spurious += self.state.cost();
    }

    pub(super) const fn is_spurious(&self) -> bool {
        self.state.is_spurious(self.epoch)
    }

    /// Whether a connection that begins now gets the kernel's own timer.
    pub(super) fn holds(&self, at_us: f64) -> bool {
        self.is_spurious() || self.state.is_outage(|| ms(at_us))
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a few days at most"
)]
fn ms(at_us: f64) -> u32 {
    (at_us / 1000.0) as u32
}
