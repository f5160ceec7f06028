//! One end of a connection, in a process of its own: `rto-workload ROLE`, where ROLE is JSON (`rto_testbed::workload`).

use std::process::ExitCode;

fn main() -> ExitCode {
    rto_testbed::workload::main(std::env::args().skip(1))
}
