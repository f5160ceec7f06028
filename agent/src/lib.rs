//! Per-CIDR TCP retransmission timers for Linux: the library behind the `rto-agent` binary.
//!
//! One room for each concern; data flows down once: [`config`] text becomes a
//! [`policy::PolicySet`], the [`engine`] turns it into a [`policy::plan::Plan`], the
//! [`datapath`] writes that to the kernel.

pub mod api;
mod build_info;
pub mod cli;
pub mod commands;
pub mod completion;
pub mod config;
pub mod daemon;
pub mod datapath;
pub mod doctor;
pub mod engine;
pub mod experiment;
pub mod kernel;
mod parallel;
mod path_security;
pub mod policy;
mod printable;
mod problem;
mod progress;
pub mod telemetry;
pub mod tuning;
pub mod wire;
