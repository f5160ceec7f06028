//! The sock_ops program of rto-agent: the parts that need no kernel.
//!
//! The program itself is the binary of this crate (feature `program`, target
//! `bpfel-unknown-none`); `cargo xtask ebpf` builds it.
#![no_std]

pub mod counter;
pub mod ops;
pub mod verdict;
