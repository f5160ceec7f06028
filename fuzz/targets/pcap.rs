//! See `rto_fuzz::pcap`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rto_fuzz::pcap::check(data));
