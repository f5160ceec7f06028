//! Experiments on emulated links: what a setting of retransmission timers gains and costs, measured.
//!
//! An experiment makes a [`topology::Topology`]: namespaces, a link that loses what it is told to lose, and child
//! processes that talk over the link, beside an agent with a configuration of its own, which it drives from outside as
//! a user would (`rto_testbed`). Its outcome is a [`report::Report`].

pub mod cli;
pub mod commands;
pub mod engine;
pub mod experiment;
pub mod interrupt;
pub mod load;
pub mod policy;
pub mod protocol;
pub mod report;
pub mod rr;
pub mod summary;
pub mod topology;
pub mod workload;
