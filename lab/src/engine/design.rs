//! The design of a report: its tables, charts and effects, as data.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{
    Record,
    log::{self, Weighted},
};
use crate::{report::Method, summary::quantile};

/// Selected levels by factor; of a factor that is not named, all.
pub type Only = BTreeMap<String, Vec<String>>;

/// The question of an experiment, and how its records are shown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Design {
    /// Name of the experiment and of its files.
    pub name: String,
    /// The question, in a sentence or two.
    pub question: String,
    /// The method: a value for each name.
    pub method: Method,
    /// Levels of factors in their order. Without an entry here, numbers are in ascending order and other levels keep
    /// theirs.
    pub levels: BTreeMap<String, Vec<String>>,
    /// Units of measures and of factors that are numbers: "ms", "us", "%".
    pub units: BTreeMap<String, String>,
    /// The rto_min of the levels; titles that do not mention it get this text.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rto_min: String,
    /// The congestion control of all runs; every title gets it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub congestion: String,
    /// The name of a run if it is not "run": the unit that intervals are computed over.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub run_is: String,
    /// The comparisons; the first one makes the headline.
    pub effects: Vec<EffectSpec>,
    /// Whether the first effect also gets a small table: rows by levels.
    pub pivot: bool,
    /// How close the levels of a factor are to each other.
    pub agreements: Vec<EffectSpec>,
    /// Tables.
    pub tables: Vec<TableSpec>,
    /// Charts.
    pub charts: Vec<ChartSpec>,
    /// Computed and published values that no run measures.
    pub references: Vec<Record>,
}

/// The factor of [`Design::with_congestion`].
pub(crate) const CONGESTION: &str = "congestion";

impl Design {
    /// Names the congestion control; several are a factor of everything that is shown.
    pub(crate) fn with_congestion(&mut self, controls: &[String]) {
        if let [one] = controls {
            self.congestion.clone_from(one);
            return;
        }
        let rows = self.effects.iter_mut().chain(&mut self.agreements);
        let rows = rows.map(|spec| &mut spec.rows);
        let tables = self.tables.iter_mut().map(|spec| &mut spec.rows);
        let charts = self.charts.iter_mut().map(|spec| &mut spec.per);
        for factors in rows.chain(tables).chain(charts) {
            factors.insert(0, CONGESTION.to_owned());
        }
        self.levels.insert(CONGESTION.to_owned(), controls.to_vec());
    }
}

/// A statistic: one number for many values.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Stat {
    /// The mean.
    #[default]
    Mean,
    /// The smallest value that at least this share of the values does not exceed.
    Quantile(f64),
    /// The sum.
    Sum,
    /// The number of values.
    Count,
    /// The share above a value, percent.
    Above(f64),
    /// The sum, in percent of the sum of another measure.
    PercentOf(String),
}

impl Stat {
    /// The median.
    pub const P50: Self = Self::Quantile(0.5);
    /// The largest value.
    pub const LARGEST: Self = Self::Quantile(1.0);

    /// The statistic of a measure; `None` without values, or with too few values for a quantile.
    pub(super) fn of<'a>(
        &self,
        records: impl Iterator<Item = &'a Record> + Clone,
        measure: &str,
    ) -> Option<f64> {
        let values = log::values(records.clone(), measure);
        match self {
            Self::PercentOf(other) => {
                let whole = sum(&log::values(records, other));
                (whole > 0.0).then(|| 100.0 * sum(&values) / whole)
            }
            _ => self.of_values(&values),
        }
    }

    /// The statistic of values.
    pub(crate) fn of_values(&self, values: &[Weighted]) -> Option<f64> {
        if values.is_empty() {
            return None;
        }
        let (count, all) = (values.len() as f64, weight(values.iter()));
        match self {
            Self::Mean => Some(sum(values) / all),
            // The 99th of a hundred values is the second largest, which is not an estimate of the 99th percentile.
            Self::Quantile(share)
                if *share < 1.0 && count * (1.0 - share) < 2.0 && *share > 0.9 =>
            {
                None
            }
            Self::Quantile(share) => weighted_quantile(values, *share),
            Self::Sum => Some(sum(values)),
            Self::Count => Some(all),
            Self::Above(least) => {
                let above = values.iter().filter(|(value, _)| value > least);
                Some(100.0 * weight(above) / all)
            }
            Self::PercentOf(_) => None,
        }
    }
}

fn sum(values: &[Weighted]) -> f64 {
    values.iter().map(|(value, weight)| value * weight).sum()
}

fn weight<'a>(values: impl Iterator<Item = &'a Weighted>) -> f64 {
    values.map(|(_, weight)| weight).sum()
}

/// The smallest value that at least this share of the total weight does not exceed.
fn weighted_quantile(values: &[Weighted], share: f64) -> Option<f64> {
    // The usual case.
    if values.iter().all(|(_, weight)| *weight == 1.0) {
        let values: Vec<f64> = values.iter().map(|(value, _)| *value).collect();
        return quantile(&values, share);
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut left = share * weight(sorted.iter());
    let found = sorted.iter().find(|(_, weight)| {
        left -= weight;
        left <= 0.0
    });
    found.or(sorted.last()).map(|(value, _)| *value)
}

impl fmt::Display for Stat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mean => f.write_str("mean"),
            Self::Quantile(0.0) => f.write_str("least"),
            Self::Quantile(1.0) => f.write_str("largest"),
            Self::Quantile(share) => write!(f, "p{}", share * 100.0),
            Self::Sum => f.write_str("sum"),
            Self::Count => f.write_str("count"),
            Self::Above(value) => write!(f, "above {value}"),
            Self::PercentOf(other) => write!(f, "percent of {other}"),
        }
    }
}

impl FromStr for Stat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown =
            || format!("{text}: mean, p50 (or another), least, largest, sum, count, above N");
        Ok(match text {
            "mean" => Self::Mean,
            "least" => Self::Quantile(0.0),
            "largest" => Self::LARGEST,
            "sum" => Self::Sum,
            "count" => Self::Count,
            _ => {
                if let Some(other) = text.strip_prefix("percent of ") {
                    return Ok(Self::PercentOf(other.to_owned()));
                }
                let number = |text: &str| text.parse::<f64>().map_err(|_| unknown());
                if let Some(value) = text.strip_prefix("above ") {
                    return Ok(Self::Above(number(value)?));
                }
                let percent = number(text.strip_prefix('p').ok_or_else(unknown)?)?;
                if !(0.0..=100.0).contains(&percent) {
                    return Err(unknown());
                }
                Self::Quantile(percent / 100.0)
            }
        })
    }
}

impl Serialize for Stat {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Stat {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// A column: one number for each cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// The measure.
    pub measure: String,
    /// The statistic.
    pub stat: Stat,
    /// Its heading.
    pub title: String,
}

impl Column {
    /// A column.
    pub fn new(measure: &str, stat: Stat, title: &str) -> Self {
        Self {
            measure: measure.to_owned(),
            stat,
            title: title.to_owned(),
        }
    }
}

/// A table: a line for each level of its rows, and its columns, repeated for each level across.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TableSpec {
    /// Name, which its file gets.
    pub name: String,
    /// Its heading.
    pub title: String,
    /// Factors of the lines.
    pub rows: Vec<String>,
    /// Factors of the columns.
    pub across: Vec<String>,
    /// Numbers of a cell; exactly one if there are factors across.
    pub columns: Vec<Column>,
    /// Selection of records.
    pub only: Only,
}

/// A chart for each level of some factors: curves over a factor, or the distribution of values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChartSpec {
    /// Its heading; the levels follow.
    pub title: String,
    /// Factors with a separate chart for each level.
    pub per: Vec<String>,
    /// Factors with a curve for each level.
    pub across: Vec<String>,
    /// The factor of the x-axis, or a measure with one value in each record, such as a time; absent: the distribution
    /// of all values.
    pub x: Option<String>,
    /// The measure to draw.
    pub measure: String,
    /// The statistic, for charts over a factor.
    pub stat: Option<Stat>,
    /// Whether both axes of a curve, or the value axis of a distribution, are logarithmic.
    pub log: bool,
    /// Of a curve: show the improvement over this level of the series, as its value divided by the series' own.
    pub against: Option<String>,
    /// Whether a curve is a staircase: connect times by outage.
    pub steps: bool,
    /// Selection of records.
    pub only: Only,
}

/// A comparison of the levels of a factor with one of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EffectSpec {
    /// The measure; less is better.
    pub measure: String,
    /// The statistic.
    pub stat: Stat,
    /// The factor.
    pub across: String,
    /// The base: the level that the others are compared with.
    pub base: String,
    /// Factors that are the same on both sides of the comparison.
    pub rows: Vec<String>,
    /// Whether runs with the same number belong together.
    #[serde(default)]
    pub paired: bool,
    /// Selection of records.
    #[serde(default)]
    pub only: Only,
}

/// Published values: a text is a level of a factor, a number is a value of a measure ("time p50").
pub(crate) fn references(published: &[toml::Table]) -> Vec<Record> {
    let number = |value: &toml::Value| match value {
        toml::Value::Integer(value) => Some(*value as f64),
        value => value.as_float(),
    };
    let references = published.iter().map(|table| {
        let levels = table
            .iter()
            .filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)));
        let numbers = table
            .iter()
            .filter_map(|(name, value)| Some((name, number(value)?)));
        numbers.fold(Record::new(levels, 0), |record, (name, value)| {
            record.with(name, value)
        })
    });
    references.collect()
}

/// The published values of a file of [`crate::published`].
pub(crate) fn published(text: &str) -> Vec<Record> {
    let tables: BTreeMap<String, Vec<toml::Table>> = toml::from_str(text).unwrap_or_default();
    references(tables.get("published").map_or(&[], Vec::as_slice))
}

/// Names of factors, or levels of a factor.
pub(crate) fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

/// A selection of these levels of a factor.
pub(crate) fn only(factor: &str, levels: &[&str]) -> Only {
    Only::from([(factor.to_owned(), texts(levels))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_names_are_parsed() {
        for text in [
            "mean",
            "least",
            "p50",
            "p99.9",
            "largest",
            "sum",
            "count",
            "above 20",
            "percent of sent",
        ] {
            assert_eq!(text.parse::<Stat>().unwrap().to_string(), text);
        }
        for text in ["p101", "p", "median", "above x"] {
            assert!(text.parse::<Stat>().unwrap_err().contains("p50"), "{text}");
        }
    }

    #[test]
    fn stats_are_computed() {
        let values: Vec<Weighted> = (1..=100).map(|n| (f64::from(n), 1.0)).collect();
        let of = |text: &str| text.parse::<Stat>().unwrap().of_values(&values);
        assert_eq!(of("mean"), Some(50.5));
        assert_eq!(
            (of("p50"), of("largest"), of("least")),
            (Some(50.0), Some(100.0), Some(1.0))
        );
        assert_eq!(
            (of("above 90"), of("sum"), of("count")),
            (Some(10.0), Some(5050.0), Some(100.0))
        );
        // One value in a hundred is not enough for the 99th percentile.
        assert_eq!((of("p99"), of("p95")), (None, Some(95.0)));
        assert_eq!(Stat::Mean.of_values(&[]), None);
        // A second with 1000 transactions weighs more than one with ten.
        let mixed = [(1.0, 500.0), (2.0, 500.0), (90.0, 5.0), (95.0, 5.0)];
        let of = |text: &str| text.parse::<Stat>().unwrap().of_values(&mixed);
        assert_eq!((of("p50"), of("p90")), (Some(2.0), Some(2.0)));
        assert_eq!((of("count"), of("largest")), (Some(1010.0), Some(95.0)));
        assert_eq!(of("above 50"), Some(1000.0 / 1010.0));
        let record = |sent: f64, again: f64| {
            Record::new([("n", "1")], 0)
                .with("again", again)
                .with("sent", sent)
        };
        let records = [record(50.0, 1.0), record(150.0, 3.0)];
        assert_eq!(
            Stat::PercentOf("sent".into()).of(records.iter(), "again"),
            Some(2.0)
        );
    }
}
