//! Experiments on emulated links, which measure what settings of retransmission timers gain and cost.
//!
//! An experiment creates a [`topology::Topology`]: namespaces, a link that loses packets as configured, and child
//! processes that communicate over the link. Next to it runs an agent with its own configuration, which the experiment
//! controls from outside like a user (`rto_testbed`). The result is a [`report::Report`].

pub mod advise;
pub mod capture;
pub mod chart;
pub mod cli;
pub mod commands;
pub mod engine;
pub mod estimator;
pub mod experiment;
pub mod handshake;
pub mod interrupt;
pub mod load;
pub mod outage;
pub mod policy;
pub mod predict;
pub mod program;
pub mod protocol;
pub mod published;
pub mod report;
pub mod rr;
mod sampler;
mod sender;
mod server;
pub mod study;
pub mod summary;
pub mod topology;
pub mod workload;
