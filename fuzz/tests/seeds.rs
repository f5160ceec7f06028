//! Runs the checks of the fuzzer on every seed.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a helper of tests, outside of #[test] functions"
)]

use std::{fs, path::Path};

fn all(target: &str, check: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("seeds")
        .join(target);
    let mut count = 0;
    for seed in fs::read_dir(&dir).unwrap() {
        let path = seed.unwrap().path();
        // The name of the seed for which a check fails.
        println!("{}", path.display());
        let seed = fs::read(&path).unwrap();
        check(&seed);
        // The same seed, truncated.
        for part in 1..16 {
            check(&seed[..seed.len() * part / 16]);
        }
        count += 1;
    }
    assert!(count >= 3, "{count} seeds in {}", dir.display());
}

#[test]
fn api() {
    all("api", rto_fuzz::api::check);
}

#[test]
fn config() {
    all("config", rto_fuzz::config::check);
}

#[test]
fn events() {
    all("events", rto_fuzz::events::check);
}

#[test]
fn pcap() {
    all("pcap", rto_fuzz::pcap::check);
}
