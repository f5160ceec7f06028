//! Pure arithmetic of TCP retransmission timers, as defined by RFC 6298 and implemented in the Linux kernel.
//!
//! No I/O, no unsafe code. Times are jiffies unless a name says otherwise; a jiffy is 1/HZ seconds.
//!
//! - [`syn`], [`retransmit`], [`wheel`]: when unanswered packets are retransmitted.
//! - [`outage`]: how long connect() takes in an outage, with the agent and without.
//! - [`predict`]: the effect on connections in disruptions; [`published`]: published measurements.
//! - [`estimator`], [`study`]: the RTO that an estimator computes from RTT samples, and how often it is too short.
//! - [`capture`]: RTT samples from a packet capture.
//! - [`advice`]: an initial RTO and an rto_min that suit observed round-trip times.
//! - [`tune`]: self-tuning timers, their brakes, and experiments that prove their benefit.
//! - [`chart`]: charts of these results.

pub mod advice;
pub mod capture;
pub mod chart;
pub mod estimator;
pub mod handshake;
pub mod outage;
pub mod predict;
pub mod published;
pub mod retransmit;
pub mod study;
pub mod syn;
pub mod tune;
pub mod wheel;
