//! The report of an experiment: as text, JSON, CSV, Markdown, and one HTML file without external resources.

mod html;
mod table;

use std::{fs, path::Path};

use anyhow::Context as _;
use rto_testbed::machine::Machine;
use serde::Serialize;

pub use self::table::Table;
use crate::chart::{self, Chart};

/// The method of an experiment: a value for each name.
pub type Method = Vec<(String, String)>;

/// The report of an experiment.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Name of the experiment and of its files.
    pub name: String,
    /// The question, in a sentence or two.
    pub question: String,
    /// The machine.
    pub machine: Machine,
    /// Seed of all random choices.
    pub seed: u64,
    /// The method.
    pub method: Method,
    /// The findings, in words.
    pub findings: Vec<String>,
    /// The effects, which come before all other tables.
    pub effects: Vec<Table>,
    /// The numbers.
    pub tables: Vec<Table>,
    /// Charts.
    #[serde(skip)]
    pub charts: Vec<Chart>,
}

impl Report {
    /// All tables, effects first.
    pub fn all_tables(&self) -> impl Iterator<Item = &Table> {
        self.effects.iter().chain(&self.tables)
    }

    /// As text for a terminal.
    pub fn text(&self) -> String {
        let head = format!("{}\n{}\n", self.question, self.machine.describe());
        self.body(head, "", |table| {
            format!("\n{}\n{}", table.title, table.text())
        })
    }

    /// As a page of documentation.
    pub fn markdown(&self) -> String {
        let head = format!("{}\n\n{}.\n", self.question, self.machine.describe());
        self.body(head, "- ", |table| {
            format!("\n{}\n\n{}", table.title, table.markdown())
        })
    }

    /// The findings and their basis, then the method, then the numbers.
    fn body(&self, head: String, mark: &str, table: impl Fn(&Table) -> String) -> String {
        let findings = self.findings.iter().map(|one| format!("- {one}\n"));
        let method = self.method.iter();
        let method = method.map(|(name, value)| format!("{mark}{name}: {value}\n"));
        let tables = |tables: &[Table]| tables.iter().map(&table).collect::<String>();
        head + &paragraph(findings.collect())
            + &tables(&self.effects)
            + &paragraph(method.collect())
            + &tables(&self.tables)
    }

    /// Writes `NAME.html`, `NAME.json`, `NAME.md`, and a `NAME-TABLE.csv` for each table; creates the directory if
    /// needed.
    pub fn write(&self, dir: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        let write = |file: String, text: &str| {
            let path = dir.join(file);
            fs::write(&path, text).with_context(|| path.display().to_string())
        };
        write(format!("{}.html", self.name), &html::page(self))?;
        let json = serde_json::to_string_pretty(self)?;
        write(format!("{}.json", self.name), &json)?;
        write(format!("{}.md", self.name), &self.markdown())?;
        for table in self.all_tables() {
            write(format!("{}-{}.csv", self.name, table.name), &table.csv()?)?;
        }
        Ok(())
    }
}

/// Comma-separated values: the names of the fields, and a line for each row.
pub fn csv(rows: &[impl Serialize]) -> anyhow::Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row)?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

/// A paragraph, separated from the text before it; empty if there are no lines.
fn paragraph(lines: String) -> String {
    match lines.is_empty() {
        true => lines,
        false => format!("\n{lines}"),
    }
}

/// Writes only charts: one drawing, or a page like in the reports, depending on the file's extension.
pub fn write_charts(path: &Path, title: &str, charts: &[Chart]) -> anyhow::Result<()> {
    let text = match path.extension().and_then(|ending| ending.to_str()) {
        Some("svg") => chart::svg(charts),
        Some("html") => html::charts_page(title, charts),
        _ => anyhow::bail!("the file name must end in .svg or .html"),
    };
    Ok(fs::write(path, text)?)
}

/// Writes tables of an experiment into a page of documentation, each between `<!-- EXPERIMENT: NAME -->` and `<!-- end:
/// NAME -->`; tables without markers in the page are omitted.
pub fn write_tables(path: &Path, report: &Report) -> anyhow::Result<()> {
    let context = || path.display().to_string();
    let mut text = fs::read_to_string(path).with_context(context)?;
    for table in report.all_tables() {
        let [begin, end] =
            [&*report.name, "end"].map(|kind| format!("<!-- {kind}: {} -->", table.name));
        let Some((before, rest)) = text.split_once(&begin) else {
            continue;
        };
        let (_, after) = rest.split_once(&end).with_context(|| format!("no {end}"))?;
        text = format!(
            "{before}{begin}\n{}\n\n{}{end}{after}",
            table.title,
            table.markdown()
        );
    }
    fs::write(path, text).with_context(context)
}

#[cfg(test)]
mod tests {
    use crate::chart::{Axis, Series};

    use super::*;

    fn report() -> Report {
        let mut table = Table::new("idle", "Idle, ms", &["lost for, ms", "kernel", "<agent>"]);
        table.row(["10".to_owned(), "208.0".to_owned(), "16.0".to_owned()]);
        table.row(["200".to_owned(), "208.0".to_owned(), String::new()]);
        let mut effects = Table::new(
            "effects",
            "What it changes, ms",
            &["lost, ms", "difference"],
        );
        effects.row(["10".to_owned(), "-192".to_owned()]);
        Report {
            name: "trial".to_owned(),
            question: "Does it pay?".to_owned(),
            machine: Machine {
                kernel: "6.18.5".to_owned(),
                hz: 250,
                architecture: "x86_64".to_owned(),
                processor: "a processor".to_owned(),
                cores: 2,
            },
            seed: 1,
            method: vec![("runs".to_owned(), "11 of each".to_owned())],
            findings: vec!["It does, below 100 ms.".to_owned()],
            effects: vec![effects],
            tables: vec![table],
            charts: vec![Chart {
                title: "idle".to_owned(),
                x: Axis::ms("disruption"),
                y: Axis::ms("idle"),
                log_x: false,
                log_y: false,
                series: vec![Series::line("kernel", vec![(1.0, 2.0), (2.0, 3.0)])],
            }],
        }
    }

    #[test]
    fn report_is_shown_as_text() {
        insta::assert_snapshot!(report().text());
    }

    #[test]
    fn charts_alone_look_like_a_report() {
        let dir = tempfile::tempdir().unwrap();
        let charts = report().charts;
        let written = |name: &str| {
            let path = dir.path().join(name);
            write_charts(&path, "<trial>", &charts).map(|()| fs::read_to_string(path).unwrap())
        };
        assert!(written("a.svg").unwrap().starts_with("<svg"));
        let page = written("a.html").unwrap();
        assert!(
            page.starts_with("<!DOCTYPE html>") && page.contains("</svg>"),
            "{page}"
        );
        assert!(page.contains("<h1>&lt;trial&gt;</h1>"), "{page}");
        // The same style as in the reports.
        assert!(page.contains("border-collapse: collapse"), "{page}");
        let refused = written("a.png").unwrap_err().to_string();
        assert!(refused.contains(".svg or .html"), "{refused}");
    }

    #[test]
    fn tables_are_written_between_their_markers() {
        let dir = tempfile::tempdir().unwrap();
        let page = dir.path().join("page.md");
        fs::write(
            &page,
            "a\n<!-- trial: idle -->\nold\n<!-- end: idle -->\nb\n",
        )
        .unwrap();
        write_tables(&page, &report()).unwrap();
        let text = fs::read_to_string(&page).unwrap();
        let (before, rest) = text
            .split_once("<!-- trial: idle -->\nIdle, ms\n\n")
            .unwrap();
        assert!(
            before == "a\n" && rest.ends_with("|\n<!-- end: idle -->\nb\n"),
            "{text}"
        );
        assert!(rest.contains("| 10 ") && !rest.contains("old"), "{text}");
        fs::write(&page, "<!-- trial: idle -->").unwrap();
        assert!(write_tables(&page, &report()).is_err());
    }

    #[test]
    fn report_files_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("new");
        report().write(&out).unwrap();
        let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
        let html = read("trial.html");
        assert!(html.starts_with("<!DOCTYPE html>"), "{html}");
        assert!(html.contains("&lt;agent&gt;") && html.contains("<svg"));
        // The findings come first.
        for text in [&html, &read("trial.md"), &report().text()] {
            let at = |part: &str| text.find(part).unwrap();
            let places = ["It does", "What it changes", "11 of each", "Idle, ms"].map(at);
            assert!(places.is_sorted(), "{text}");
        }
        for fetched in ["src=", "href=", "url(", "@import"] {
            assert!(!html.contains(fetched), "{fetched}");
        }
        assert_eq!(
            read("trial-idle.csv"),
            "\"lost for, ms\",kernel,<agent>\n10,208.0,16.0\n200,208.0,\n"
        );
        assert!(read("trial.md").contains("| 10 "), "{}", read("trial.md"));
        let json: serde_json::Value = serde_json::from_str(&read("trial.json")).unwrap();
        assert_eq!(json["machine"]["hz"], 250);
        assert_eq!(
            json["tables"][0]["rows"][1],
            serde_json::json!([200.0, 208.0, null])
        );
    }
}
