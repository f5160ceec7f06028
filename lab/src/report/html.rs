//! The report as one HTML file.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{Report, Table};
use crate::chart::{self, Chart};

const STYLE: &str = "
body { font-family: sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem }
th, td { padding: 0.15rem 0.6rem; border-bottom: 1px solid #ccc; text-align: right }
th:first-child, td:first-child { text-align: left }
thead th { border-bottom: 2px solid #666 }
h2 { font-size: 1.1rem }
svg { display: block; width: 100%; min-width: 30rem; max-width: 50rem; margin: 1rem 0 }
.wide { overflow-x: auto }
:root { color-scheme: light dark }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #16181b }
  th, td { border-bottom-color: #444 }
  thead th { border-bottom-color: #888 }
}
";

pub(super) fn page(report: &Report) -> String {
    let (first, others) = report.effects.split_at(report.effects.len().min(1));
    let body = html! {
        p { (report.question) }
        p { (report.machine.describe()) "; seed " (report.seed) }
        @for finding in &report.findings { p { b { (finding) } } }
        @for table in first { (markup(table)) }
        (drawings(&report.charts))
        @if !report.method.is_empty() {
            h2 { "Method" }
            ul {
                @for (name, value) in &report.method {
                    li { (name) ": " (value) }
                }
            }
        }
        @for table in others.iter().chain(&report.tables) { (markup(table)) }
    };
    document(&format!("rto-lab {}", report.name), &body)
}

/// Charts without a report.
pub(super) fn charts_page(title: &str, charts: &[Chart]) -> String {
    document(title, &drawings(charts))
}

fn document(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                (body)
            }
        }
    };
    page.into_string()
}

/// Each chart as a separate drawing.
fn drawings(charts: &[Chart]) -> Markup {
    html! {
        @for one in charts { div.wide { (PreEscaped(chart::svg(std::slice::from_ref(one)))) } }
    }
}

fn markup(table: &Table) -> Markup {
    html! {
        h2 { (table.title) }
        div.wide {
            table {
                thead {
                    tr { @for name in &table.columns { th { (name) } } }
                }
                tbody {
                    @for row in &table.rows {
                        tr { @for cell in row { td { (cell) } } }
                    }
                }
            }
        }
    }
}
