//! The sock_ops program of rto-agent.
#![no_std]
