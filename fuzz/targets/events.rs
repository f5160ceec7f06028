//! See `rto_fuzz::events`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rto_fuzz::events::check(data));
