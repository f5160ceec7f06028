//! `rto-lab connect`.

use clap::Args;
use rto_testbed::workload::rr::{Options, Sizes};

use super::rr::{self, Extent, Output};
use crate::{interrupt, rr::measure::Test};

/// `rto-lab connect`.
#[derive(Debug, Args)]
pub struct Connect {
    /// Any TCP server [default port: 4700]; for an `rto-lab rr --server` the records also include its host
    #[arg(value_name = "HOST[:PORT]")]
    to: String,
    #[command(flatten)]
    extent: Extent,
    #[command(flatten)]
    output: Output,
}

pub(super) fn run(args: &Connect) -> anyhow::Result<()> {
    interrupt::handle()?;
    let (sizes, options) = (Sizes::SMALL, Options::default());
    let plan = args.extent.of(Test::Connect, &args.to, sizes, options)?;
    rr::client(plan, &args.output)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::cli::Cli;

    #[test]
    fn wrong_usage() {
        for bad in [
            "",
            "a --count 3 --duration 1s",
            "a --count 0",
            "a --json --csv",
            "a --fresh",
            "a --duration 31days",
        ] {
            let words = format!("rto-lab connect {bad}");
            let refused = Cli::try_parse_from(words.split_whitespace()).unwrap_err();
            assert_eq!(refused.exit_code(), 2, "{bad}");
        }
        Cli::try_parse_from("rto-lab connect a --out b --fresh --interval".split(' ')).unwrap();
    }
}
