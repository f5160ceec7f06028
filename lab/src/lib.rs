//! Experiments on emulated links: what a setting of retransmission timers gains and costs, measured.

pub mod ground;
pub mod link;
