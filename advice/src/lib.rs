//! What the command line and the lab compute from round-trip times, and the daemon does not need.
//!
//! No I/O, no unsafe code.
//!
//! - [`estimator`]: the RTO that Linux computes from RTT samples.
//! - [`capture`]: RTT samples of a packet capture.
//! - [`advice`]: an initial RTO and an rto_min that suit observed round-trip times.

pub mod advice;
pub mod capture;
pub mod estimator;
