//! A measurement of request/response between two hosts.

pub mod measure;
pub mod outage;
pub mod print;
pub mod records;
mod worker;
