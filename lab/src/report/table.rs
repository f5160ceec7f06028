//! A table of a report.

use comfy_table::{CellAlignment, ContentArrangement, TableStyle, presets};
use serde::{Serialize, Serializer};
use serde_json::Value;

/// A table; its cells are text, and numbers have no units, because the columns' names contain them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Table {
    /// Name, which its file gets.
    pub name: String,
    /// Its heading.
    pub title: String,
    /// Names of its columns.
    pub columns: Vec<String>,
    /// Its lines.
    #[serde(serialize_with = "numbers")]
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub fn new(name: &str, title: &str, columns: &[&str]) -> Self {
        let columns = columns.iter().map(|&name| name.to_owned()).collect();
        Self::with_columns(name, title, columns)
    }

    /// An empty table whose columns are determined at run time.
    pub fn with_columns(name: &str, title: &str, columns: Vec<String>) -> Self {
        Self {
            name: name.to_owned(),
            title: title.to_owned(),
            columns,
            rows: Vec::new(),
        }
    }

    /// Adds a line.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// For a terminal: without rules, numbers aligned to the right.
    pub fn text(&self) -> String {
        self.drawn(presets::NOTHING)
    }

    /// As Markdown.
    pub fn markdown(&self) -> String {
        self.drawn(presets::ASCII_MARKDOWN)
    }

    fn drawn(&self, style: TableStyle) -> String {
        let mut table = comfy_table::Table::new();
        table
            .load_style(style)
            .set_header(&self.columns)
            .set_content_arrangement(ContentArrangement::Disabled);
        for row in &self.rows {
            table.add_row(row);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let lines = table.lines().map(|line| format!("{}\n", line.trim_end()));
        lines.collect()
    }

    /// As comma-separated values, with a heading.
    pub fn csv(&self) -> anyhow::Result<String> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(&self.columns)?;
        for row in &self.rows {
            writer.write_record(row)?;
        }
        Ok(String::from_utf8(writer.into_inner()?)?)
    }
}

/// Serialises numeric cells as numbers, and empty cells as null.
fn numbers<S: Serializer>(rows: &[Vec<String>], to: S) -> Result<S::Ok, S::Error> {
    let cell = |cell: &String| match (cell.is_empty(), cell.parse::<f64>()) {
        (true, _) => Value::Null,
        (false, Ok(number)) if number.is_finite() => Value::from(number),
        (false, _) => Value::from(cell.as_str()),
    };
    to.collect_seq(
        rows.iter()
            .map(|row| row.iter().map(cell).collect::<Vec<_>>()),
    )
}
