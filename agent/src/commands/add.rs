//! `rto-agent add`.

use std::{process::ExitCode, time::Duration};

use rto_agent_core::wire::types::{AddRequest, ChangeAnswer};

use super::{print, table};
use crate::{cli::Add, client::Client};

pub(super) fn run(args: Add) -> anyhow::Result<ExitCode> {
    let own_settings = args.settings.is_some();
    let request = AddRequest {
        cidrs: args.cidrs,
        policy: args.policy,
        settings: args.settings.map(|args| args.0),
        ttl: args.ttl,
        save: args.save,
    };
    let answer = Client::new(&args.daemon.socket).post("/v1/entries", &request);
    let answer: ChangeAnswer = answer?;
    print(args.daemon.json, &answer, || {
        text(&answer, args.save, own_settings)
    })
}

fn text(answer: &ChangeAnswer, saved: bool, own_settings: bool) -> String {
    let mut text = table::change(answer);
    if let Some(policy) = answer.policy.as_ref().filter(|_| own_settings) {
        text.push_str(&format!(
            "policy {policy}, created from these settings (rto-agent stats --policy {policy})\n"
        ));
    }
    if let Some(s) = answer.expires_in_s {
        let ttl = humantime::format_duration(Duration::from_secs(s));
        text.push_str(&format!("expires in {ttl}\n"));
    } else if !saved {
        text.push_str("until reboot (--save makes them permanent)\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use rto_agent_core::policy::plan::ChangeSummary;

    use super::*;

    #[test]
    fn added_entries_are_shown_with_their_ttl() {
        let added = ChangeSummary {
            added: 2,
            policies_added: 1,
            ..ChangeSummary::default()
        };
        let longer = ChangeAnswer {
            lifetimes_changed: 1,
            expires_in_s: Some(5400),
            ..ChangeAnswer::default()
        };
        let both = ChangeAnswer {
            changed: added,
            lifetimes_changed: 2,
            ..ChangeAnswer::default()
        };
        assert_eq!(
            text(&longer, false, false),
            "1 lifetime changed\nexpires in 1h 30m\n"
        );
        assert_eq!(
            text(&both, false, false),
            "2 added\n2 lifetimes changed\npolicies: 1 added\nuntil reboot (--save makes them permanent)\n"
        );
        let nothing = ChangeAnswer::default();
        assert_eq!(text(&nothing, true, false), "nothing changed\n");
        let made = ChangeAnswer {
            policy: "adhoc-00ff11aa".parse().ok(),
            ..ChangeAnswer::default()
        };
        let shown = text(&made, true, true);
        assert!(shown.contains("policy adhoc-00ff11aa, created from these settings"));
        assert_eq!(text(&made, true, false), "nothing changed\n");
    }
}
