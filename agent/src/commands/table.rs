//! Tables for text output.

use comfy_table::{ContentArrangement, Table, presets::NOTHING};
use rto_agent_core::{
    policy::{
        compile::{EffectiveSetting, settings_text},
        plan::ChangeSummary,
    },
    printable::{self, counted},
    wire::types::{ChangeAnswer, WalkView},
};

/// A table without borders, as `ip` and `systemctl` print them. Drops the least important columns
/// that do not fit, and prints how many were dropped.
pub(super) fn fitting<'a>(
    header: impl AsRef<[&'a str]>,
    rows: &[impl AsRef<[String]>],
    importance: impl AsRef<[usize]>,
    columns: Option<usize>,
) -> String {
    let (text, dropped) = fitted(header, rows, importance, columns);
    text + &more(dropped, ": --wide")
}

/// The line about columns that were dropped, if any, and how to see them.
pub(super) fn more(dropped: usize, how: &str) -> String {
    match dropped {
        0 => String::new(),
        _ => format!("({} more{how})\n", counted(dropped, "column", "columns")),
    }
}

/// The table, and how many columns were dropped.
pub(super) fn fitted<'a>(
    header: impl AsRef<[&'a str]>,
    rows: &[impl AsRef<[String]>],
    importance: impl AsRef<[usize]>,
    columns: Option<usize>,
) -> (String, usize) {
    const GAP: usize = 2;
    let (header, importance) = (header.as_ref(), importance.as_ref());
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row.as_ref()[column].chars().count());
        cells.max().unwrap_or(0).max(header[column].len()) + GAP
    };
    let mut left = columns.map_or(usize::MAX, |columns| columns + GAP);
    let fits = importance.iter().copied().take_while(|column| {
        let rest = left.checked_sub(width(*column));
        left = rest.unwrap_or(left);
        rest.is_some()
    });
    let mut shown: Vec<usize> = fits.collect();
    shown.sort_unstable();
    let mut table = Table::new();
    table
        .load_style(NOTHING)
        .set_header(shown.iter().map(|column| header[*column]))
        .set_content_arrangement(ContentArrangement::Disabled);
    for row in rows {
        table.add_row(shown.iter().map(|column| &row.as_ref()[*column]));
    }
    (text(&table), header.len() - shown.len())
}

/// The table with its trailing blanks cut off.
fn text(table: &Table) -> String {
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end().strip_prefix(' ').unwrap_or(line.trim_end()));
        text.push('\n');
    }
    text
}

/// Notes or warnings, one line each.
pub(super) fn remarks<T: std::fmt::Display>(
    what: &str,
    all: impl IntoIterator<Item = T>,
) -> String {
    let all = all.into_iter();
    all.map(|one| format!("{what}: {one}\n")).collect()
}

/// The effective values of a policy, one line each.
pub(super) fn effects(effects: &[EffectiveSetting], hz: u32, indent: &str) -> String {
    let width = effects.iter().map(|e| e.setting.len()).max().unwrap_or(0);
    effects
        .iter()
        .map(|e| format!("{indent}{:width$}  {}\n", e.setting, e.describe(hz)))
        .collect()
}

/// A change as text.
pub(super) fn change(answer: &ChangeAnswer) -> String {
    let ChangeSummary {
        added,
        changed,
        removed,
        policies_added,
        policies_changed,
        policies_removed,
    } = answer.changed;
    let mut parts = Vec::new();
    if added + changed + removed > 0 {
        parts.push(format!(
            "{added} added, {changed} changed, {removed} removed"
        ));
    }
    if answer.lifetimes_changed > 0 {
        let lifetimes = counted(answer.lifetimes_changed, "lifetime", "lifetimes");
        parts.push(format!("{lifetimes} changed"));
    }
    if policies_added + policies_changed + policies_removed > 0 {
        parts.push(format!(
            "policies: {policies_added} added, {policies_changed} changed, {policies_removed} removed"
        ));
    }
    if parts.is_empty() {
        parts.push("nothing changed".to_owned());
    }
    let mut text = String::new();
    for line in answer.would_change.iter().flatten() {
        text.push_str(line);
        text.push('\n');
    }
    if answer.would_change.is_some() {
        text.push_str("dry run, nothing was changed; a reload would make these changes:\n");
    }
    text.push_str(&parts.join("\n"));
    text.push('\n');
    if !answer.effects.is_empty() {
        text.push_str(&format!("{}\n", settings_text(&answer.effects)));
    }
    text.push_str(&remarks("note", &answer.notes));
    text
}

/// The results of a walk over the open sockets.
pub(super) fn walk(walk: &WalkView, columns: Option<usize>) -> String {
    let mut text = String::new();
    if walk.policies.is_empty() && walk.former.is_none() {
        text.push_str("no open socket is covered by a policy\n");
    } else {
        let named = walk
            .policies
            .iter()
            .map(|(name, counts)| (name.to_string(), counts));
        let former = walk
            .former
            .iter()
            .map(|counts| ("(gone)".to_owned(), counts));
        let rows = named.chain(former).map(|(name, counts)| {
            [
                name,
                counts.seen.to_string(),
                counts.changed.to_string(),
                counts.kept.to_string(),
                counts.refused.to_string(),
            ]
        });
        let rows: Vec<_> = rows.collect();
        let header = ["POLICY", "SOCKETS", "CHANGED", "KEPT", "REFUSED"];
        text.push_str(&fitting(header, &rows, [0, 1, 2, 4, 3], columns));
    }
    text.push_str(&format!(
        "{} of {}, {} ms\n",
        walk.namespaces_done,
        counted(walk.namespaces, "network namespace", "network namespaces"),
        walk.took_ms
    ));
    for skipped in &walk.skipped {
        text.push_str(&format!(
            "left out: namespace {} ({}): {}\n",
            skipped.inode,
            printable::path(&skipped.place),
            skipped.reason
        ));
    }
    text.push_str(&remarks("problem", &walk.problems));
    text.push_str(&remarks("note", &walk.notes));
    text
}
