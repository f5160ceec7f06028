//! Pure arithmetic of TCP retransmission timers, as defined by RFC 6298 and implemented in the Linux kernel.
//!
//! No I/O, no unsafe code. Times are jiffies unless a name says otherwise; a jiffy is 1/HZ seconds.
//!
//! - [`syn`], [`retransmit`], [`wheel`]: when unanswered packets are retransmitted.
//! - [`outage`]: how long connect() takes in an outage, with the agent and without.
//! - [`distribution`]: times and their frequencies.
//! - [`estimator`]: the RTO that Linux computes from RTT samples.
//! - [`advice`]: an initial RTO and an rto_min that suit observed round-trip times.
//! - [`tune`]: self-tuning timers, their fallbacks, and the verdict about their benefit.

pub mod advice;
pub mod distribution;
pub mod estimator;
pub mod outage;
pub mod retransmit;
pub mod syn;
pub mod tune;
pub mod wheel;
