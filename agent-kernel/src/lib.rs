//! The kernel as rto-agent sees it: facts and features, and the datapath that holds the policies.

pub mod datapath;
pub mod kernel;
