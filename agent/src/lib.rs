//! Per-CIDR TCP retransmission timers for Linux: the library behind the `rto-agent` binary.
//!
//! One module for each concern. Data flows one way: [`config`] parses text into a
//! [`policy::PolicySet`], the [`engine`] turns that into a [`policy::plan::Plan`], and the
//! [`datapath`] writes the plan to the kernel.

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
