//! Pure arithmetic of TCP retransmission schedules as the Linux kernel runs them.
//!
//! No I/O, no unsafe; tables and charts are text. Times are jiffies unless a name says otherwise; a jiffy is 1/HZ seconds.

pub mod chart;
pub mod data;
pub mod predict;
pub mod published;
pub mod syn;
pub mod wheel;
