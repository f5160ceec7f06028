//! See `rto_fuzz::api`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rto_fuzz::api::check(data));
