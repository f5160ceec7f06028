//! Pure arithmetic of TCP retransmission schedules as the Linux kernel runs them.
//!
//! No I/O, no unsafe. Times are jiffies unless a name says otherwise; a jiffy is 1/HZ seconds.

pub mod data;
pub mod syn;
pub mod wheel;
