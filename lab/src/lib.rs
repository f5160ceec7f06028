//! Experiments on emulated links: what a setting of retransmission timers gains and costs, measured.
//!
//! An experiment makes namespaces, a link that loses what it is told to lose ([`link`]), an agent with a
//! configuration of its own, which it drives from outside as a user would ([`ground`]), and child processes
//! that talk over the link ([`ends`]). Its outcome is a [`report::Report`].

pub mod cli;
pub mod commands;
pub mod ends;
pub mod experiment;
pub mod ground;
pub mod interrupt;
pub mod link;
pub mod machine;
pub mod policy;
pub mod report;
pub mod rr;
pub mod summary;
