//! Pure arithmetic of TCP retransmission timers as RFC 6298 and the Linux kernel run them.
//!
//! No I/O, no unsafe. Times are jiffies unless a name says otherwise; a jiffy is 1/HZ seconds.
//!
//! - [`syn`], [`retransmit`], [`wheel`]: when what gets no answer is retransmitted.
//! - [`predict`]: what that means for connections in disruptions; [`published`]: what others measured.
//! - [`estimator`], [`study`]: what RTO an estimator makes of RTT samples, and how often it is too short.
//! - [`capture`]: RTT samples of a packet capture.
//! - [`advice`]: which initial RTO and rto_min would suit what was observed.
//! - [`tune`]: timers that tune themselves, what brakes them, and proof that they help.
//! - [`chart`]: any of it, drawn.

pub mod advice;
pub mod capture;
pub mod chart;
pub mod estimator;
pub mod handshake;
pub mod predict;
pub mod published;
pub mod retransmit;
pub mod study;
pub mod syn;
pub mod tune;
pub mod wheel;
