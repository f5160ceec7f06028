//! What rto-agent decides without the kernel: policies and their compilation, plans, the
//! configuration, advice, and the types of the API.
//!
//! Data flows one way: [`config`] parses text into a [`policy::PolicySet`], the engine turns that
//! into a [`policy::plan::Plan`], and the datapath writes the plan to the kernel.

pub mod advice;
pub mod config;
pub mod figures;
pub mod path_security;
pub mod policy;
pub mod printable;
pub mod progress;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod wire;
