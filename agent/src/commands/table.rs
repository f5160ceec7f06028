//! Tables for people.

use comfy_table::{ContentArrangement, Table, presets::NOTHING};

use crate::{
    api::types::ChangeAnswer,
    policy::{compile::Effect, plan::ChangeSummary},
};

/// A table without lines, as `ip` and `systemctl` print them.
pub(super) fn new<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table
        .load_style(NOTHING)
        .set_header(header)
        .set_content_arrangement(ContentArrangement::Disabled);
    table
}

/// The table with its trailing blanks cut off.
pub(super) fn text(table: &Table) -> String {
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end().strip_prefix(' ').unwrap_or(line.trim_end()));
        text.push('\n');
    }
    text
}

/// The settings of an entry in one cell: "initial_rto 100ms (25j), syn_retries auto".
pub(super) fn settings(effects: &[Effect]) -> String {
    let one = |e: &Effect| {
        let value = if e.asked == e.effective {
            e.asked.clone()
        } else if e.asked == "auto" {
            format!("auto ({})", e.effective)
        } else {
            format!("{}->{}", e.asked, e.effective)
        };
        format!("{} {value}", e.setting)
    };
    effects.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// What a policy's values become, a line each.
pub(super) fn effects(effects: &[Effect], hz: u32, indent: &str) -> String {
    let width = effects.iter().map(|e| e.setting.len()).max().unwrap_or(0);
    effects
        .iter()
        .map(|e| format!("{indent}{:width$}  {}\n", e.setting, e.describe(hz)))
        .collect()
}

/// A change in words.
pub(super) fn change(answer: &ChangeAnswer, hz: u32) -> String {
    let mut text = format!("{}\n", answer.changed);
    let ChangeSummary {
        policies_added,
        policies_changed,
        policies_removed,
        ..
    } = answer.changed;
    if policies_added + policies_changed + policies_removed > 0 {
        text.push_str(&format!(
            "policies: {policies_added} added, {policies_changed} changed, {policies_removed} removed\n"
        ));
    }
    text.push_str(&effects(&answer.effects, hz, ""));
    for note in &answer.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}
