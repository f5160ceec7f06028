//! `rto-agent verify`.

use std::process::ExitCode;

use rto_agent_core::{printable::counted, wire::types::VerifyAnswer};

use super::{exit, print_coloured, table};
use crate::{
    cli::{Verify, WideArg},
    client::Client,
};

pub(super) fn run(args: &Verify) -> anyhow::Result<ExitCode> {
    let answer: VerifyAnswer = Client::new(&args.daemon.socket).post("/v1/verify", &())?;
    let wide = WideArg { wide: false };
    print_coloured(args.daemon.json, &answer, args.color, wide, |_| {
        text(&answer)
    })?;
    Ok(exit(answer.ok))
}

fn text(answer: &VerifyAnswer) -> String {
    let VerifyAnswer {
        entries,
        policies,
        differences,
        ..
    } = answer;
    if answer.ok {
        let all = match entries {
            1 => "the one entry".to_owned(),
            entries => format!("all {entries} entries"),
        };
        return format!(
            "the kernel's maps contain {all} of {}\n",
            counted(*policies, "policy", "policies")
        );
    }
    let mut text: String = differences
        .first
        .iter()
        .map(|one| format!("{one}\n"))
        .collect();
    let shown = differences.first.len() as u64;
    let more = differences.total().saturating_sub(shown);
    if more > 0 {
        text.push_str(&format!("and {more} more\n"));
    }
    text.push_str(&table::remarks("problem", &answer.problems));
    text.push_str(match (answer.repaired, differences.is_empty()) {
        (true, _) => "repaired\n",
        (false, true) => "",
        (false, false) => "NOT repaired; see rto-agent status\n",
    });
    text
}

#[cfg(test)]
mod tests {
    use rto_agent_core::policy::differences::{Difference, Differences};

    use super::*;

    #[test]
    fn verify_lists_differences_and_repairs() {
        let good = VerifyAnswer {
            ok: true,
            entries: 3,
            policies: 1,
            ..VerifyAnswer::default()
        };
        assert_eq!(
            text(&good),
            "the kernel's maps contain all 3 entries of 1 policy\n"
        );
        let one = VerifyAnswer {
            entries: 1,
            ..good.clone()
        };
        assert_eq!(
            text(&one),
            "the kernel's maps contain the one entry of 1 policy\n"
        );
        let mut differences = Differences::default();
        for n in 0..150 {
            let cidr = format!("10.0.{n}.0/24").parse().unwrap();
            differences.push(Difference::EntryExtra { cidr, found: None });
        }
        let bad = VerifyAnswer {
            ok: false,
            differences,
            ..good
        };
        let message = text(&bad);
        assert!(
            message.starts_with("entry 10.0.0.0/24 (of no policy) is not desired\n"),
            "{message}"
        );
        assert!(
            message.ends_with("and 50 more\nNOT repaired; see rto-agent status\n"),
            "{message}"
        );
        let repaired = VerifyAnswer {
            repaired: true,
            ..bad
        };
        assert!(text(&repaired).ends_with("repaired\n"));
    }
}
