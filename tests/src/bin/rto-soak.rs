//! Runs in each of the two machines of `cargo xtask soak`: `rto-soak ROLE`, where ROLE is JSON ([`rto_tests::soak`]).

use std::process::ExitCode;

fn main() -> ExitCode {
    rto_tests::soak::main(std::env::args().skip(1))
}
