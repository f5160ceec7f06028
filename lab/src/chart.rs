//! Charts as SVG text: curves and points over linear or logarithmic axes.
//!
//! The charts reference no external resources.

use std::{borrow::Cow, ops::Range};

use plotters::{
    coord::ranged1d::{AsRangedCoord, ValueFormatter},
    prelude::*,
};

/// Size of a chart, pixels.
const SIZE: (u32, u32) = (900, 480);
/// Colours that people with colour vision deficiencies can distinguish, too (Okabe and Ito 2008).
const COLORS: [RGBColor; 7] = [
    BLACK,
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// Why a chart cannot be drawn.
#[derive(Debug, thiserror::Error)]
pub enum ChartError {
    /// There is nothing to draw.
    #[error("{0}: there is nothing to draw")]
    TooLittle(String),
    /// An error of the drawing library.
    #[error("the chart cannot be drawn: {0}")]
    Drawing(String),
}

/// How the points of a series are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Joined by a line.
    Line,
    /// As separate points.
    Points,
}

/// A series of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// How it is drawn.
    pub mark: Mark,
    /// Points, ascending by x.
    pub points: Vec<(f64, f64)>,
}

impl Series {
    /// A series that is drawn as a line.
    #[must_use]
    pub fn line(name: &str, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.to_owned(),
            mark: Mark::Line,
            points,
        }
    }
}

/// Position of the legend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Legend {
    /// Top right.
    #[default]
    UpperRight,
    /// Bottom right.
    LowerRight,
    /// Top left.
    UpperLeft,
}

/// Unit of the values at an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Times in milliseconds; shown in the unit that fits.
    Milliseconds,
    /// Times in microseconds; shown in the unit that fits.
    Microseconds,
    /// Percentages.
    Percent,
    /// No unit.
    Number,
}

impl Unit {
    /// The label of a value: "10 s", "0.5 %".
    fn tick(self, value: f64) -> String {
        let (value, unit) = match self {
            Self::Microseconds => return Self::Milliseconds.tick(value / 1e3),
            Self::Percent => (value, " %"),
            Self::Number => (value, ""),
            Self::Milliseconds if value == 0.0 => (value, ""),
            Self::Milliseconds if value.abs() < 1.0 => (value * 1e3, " us"),
            Self::Milliseconds if value.abs() < 1e3 => (value, " ms"),
            Self::Milliseconds => (value / 1e3, " s"),
        };
        // Further digits are rounding errors.
        let digits = format!("{value:.4}");
        format!(
            "{}{unit}",
            digits.trim_end_matches('0').trim_end_matches('.')
        )
    }
}

/// An axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Label beside the axis.
    pub label: Cow<'static, str>,
    /// Unit of its values.
    pub unit: Unit,
}

impl Axis {
    /// An axis of times in milliseconds.
    #[must_use]
    pub fn ms(label: impl Into<Cow<'static, str>>) -> Self {
        Self {
            label: label.into(),
            unit: Unit::Milliseconds,
        }
    }

    /// An axis of times in microseconds.
    #[must_use]
    pub fn us(label: impl Into<Cow<'static, str>>) -> Self {
        Self {
            label: label.into(),
            unit: Unit::Microseconds,
        }
    }

    /// An axis of percentages.
    #[must_use]
    pub fn percent(label: impl Into<Cow<'static, str>>) -> Self {
        Self {
            label: label.into(),
            unit: Unit::Percent,
        }
    }

    /// An axis of numbers without a unit.
    #[must_use]
    pub fn number(label: impl Into<Cow<'static, str>>) -> Self {
        Self {
            label: label.into(),
            unit: Unit::Number,
        }
    }
}

/// A chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// Title above the chart.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// Whether the x axis is logarithmic; values at or below 0 are then omitted.
    pub log_x: bool,
    /// Whether the y axis is logarithmic; otherwise it begins at 0.
    pub log_y: bool,
    /// Position of the legend.
    pub legend: Legend,
    /// The series, each in its own colour.
    pub series: Vec<Series>,
}

/// Draws charts below each other.
///
/// # Errors
///
/// If one of them has nothing to draw.
pub fn svg(charts: &[Chart]) -> Result<String, ChartError> {
    let mut text = String::new();
    {
        let count = u32::try_from(charts.len()).unwrap_or(u32::MAX).max(1);
        let size = (SIZE.0, SIZE.1.saturating_mul(count));
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE).map_err(drawing)?;
        for (chart, area) in charts.iter().zip(area.split_evenly((charts.len(), 1))) {
            chart.draw(&area)?;
        }
        area.present().map_err(drawing)?;
    }
    Ok(text)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

impl Chart {
    fn draw(&self, area: &Area<'_>) -> Result<(), ChartError> {
        let x = self.range(self.log_x, |(x, _)| *x);
        let y = self.range(self.log_y, |(_, y)| *y);
        let (Some(x), Some(y)) = (x, y) else {
            return Err(ChartError::TooLittle(self.title.clone()));
        };
        // The axis must not hide the lowest point, nor the frame the highest.
        let log_y = y.start / 1.1..y.end * 1.1;
        let linear_y = 0.0..y.end * 1.05;
        match (self.log_x, self.log_y) {
            (true, true) => self.draw_on(area, x.log_scale(), log_y.log_scale()),
            (true, false) => self.draw_on(area, x.log_scale(), linear_y),
            (false, true) => self.draw_on(area, x, log_y.log_scale()),
            (false, false) => self.draw_on(area, x, linear_y),
        }
    }

    /// The smallest and the largest value that can be drawn.
    fn range(&self, log: bool, value: fn(&(f64, f64)) -> f64) -> Option<Range<f64>> {
        let points = self.series.iter().flat_map(|series| &series.points);
        let values = points.map(value).filter(|v| v.is_finite());
        let values = values.filter(|v| !log || *v > 0.0);
        let (least, largest) = values.fold((f64::MAX, f64::MIN), |(least, largest), v| {
            (least.min(v), largest.max(v))
        });
        (least <= largest).then(|| {
            if least < largest {
                least..largest
            } else if least > 0.0 {
                // All values are equal.
                least / 2.0..largest * 2.0
            } else {
                least..least + 1.0
            }
        })
    }

    fn draw_on<X, Y>(&self, area: &Area<'_>, x: X, y: Y) -> Result<(), ChartError>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            // Room for the last label of the axis.
            .margin_right(40)
            .x_label_area_size(48)
            .y_label_area_size(86)
            .build_cartesian_2d(x, y)
            .map_err(drawing)?;
        chart
            .configure_mesh()
            .x_desc(&*self.x.label)
            .y_desc(&*self.y.label)
            .x_label_formatter(&|value| self.x.unit.tick(*value))
            .y_label_formatter(&|value| self.y.unit.tick(*value))
            .draw()
            .map_err(drawing)?;
        for (series, color) in self.series.iter().zip(COLORS.iter().cycle()) {
            let points = series.points.iter().copied();
            let points = points.filter(|(x, y)| {
                (*x > 0.0 || !self.log_x)
                    && (*y > 0.0 || !self.log_y)
                    && x.is_finite()
                    && y.is_finite()
            });
            let drawn = match series.mark {
                Mark::Line => chart.draw_series(LineSeries::new(points, color)),
                Mark::Points => {
                    chart.draw_series(points.map(|at| Circle::new(at, 3, color.filled())))
                }
            };
            drawn
                .map_err(drawing)?
                .label(&series.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], *color));
        }
        chart
            .configure_series_labels()
            .position(match self.legend {
                Legend::UpperRight => SeriesLabelPosition::UpperRight,
                Legend::LowerRight => SeriesLabelPosition::LowerRight,
                Legend::UpperLeft => SeriesLabelPosition::UpperLeft,
            })
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()
            .map_err(drawing)
    }
}

fn drawing(error: impl std::fmt::Display) -> ChartError {
    ChartError::Drawing(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: Vec<Series>) -> Chart {
        Chart {
            title: "a <title>".to_owned(),
            x: Axis::ms("a time"),
            y: Axis::percent("a share"),
            log_x: true,
            log_y: false,
            legend: Legend::default(),
            series,
        }
    }

    #[test]
    fn every_mark_on_every_axis() {
        let points = vec![(0.0, 1.0), (1.0, 2.0), (10.0, 0.0), (100.0, 5.0)];
        for (log_x, log_y) in [(false, false), (false, true), (true, false), (true, true)] {
            let series = [Mark::Line, Mark::Points].map(|mark| Series {
                name: format!("{mark:?}"),
                mark,
                points: points.clone(),
            });
            let chart = Chart {
                log_x,
                log_y,
                ..chart(series.to_vec())
            };
            let text = svg(&[chart.clone(), chart]).unwrap();
            assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
            assert!(text.contains("a &lt;title&gt;"), "{text}");
            for name in ["Line", "Points"] {
                assert_eq!(text.matches(&format!("{name}\n")).count(), 2, "{text}");
            }
            let circles = 4 - usize::from(log_x) - usize::from(log_y);
            assert_eq!(text.matches("<circle").count(), 2 * circles, "{text}");
        }
    }

    #[test]
    fn axes_have_labels_and_readable_units() {
        let points = vec![(0.25, 0.5), (10_000.0, 20.0)];
        let text = svg(&[chart(vec![Series::line("x", points)])]).unwrap();
        for label in ["a time", "a share", "10 s", "100 ms", "20 %"] {
            assert!(text.contains(&format!("{label}\n")), "{label}: {text}");
        }
        assert!(!text.contains("10000"), "{text}");
        for (unit, value, tick) in [
            (Unit::Milliseconds, 0.0, "0"),
            (Unit::Milliseconds, 0.25, "250 us"),
            (Unit::Milliseconds, 1.0, "1 ms"),
            (Unit::Milliseconds, 999.0, "999 ms"),
            (Unit::Milliseconds, 1000.0, "1 s"),
            (Unit::Milliseconds, 1500.0, "1.5 s"),
            (Unit::Microseconds, 500.0, "500 us"),
            (Unit::Microseconds, 1500.0, "1.5 ms"),
            (Unit::Microseconds, 2e6, "2 s"),
            (Unit::Percent, 0.1 + 0.2, "0.3 %"),
            (Unit::Number, 100.0, "100"),
        ] {
            assert_eq!(unit.tick(value), tick);
        }
    }

    #[test]
    fn axis_covers_all_values_and_centres_a_constant() {
        let range = |log, values: &[f64]| {
            let points = values.iter().map(|v| (*v, *v)).collect();
            chart(vec![Series::line("x", points)]).range(log, |(x, _)| *x)
        };
        assert_eq!(range(false, &[5.0, f64::NAN, -1.0, 2.0]), Some(-1.0..5.0));
        assert_eq!(range(true, &[5.0, 0.0, -1.0, 2.0]), Some(2.0..5.0));
        for constant in [0.01, 1.0, 3.0, 1e6] {
            let range = range(true, &[constant; 2]).unwrap();
            let middle = (range.start * range.end).sqrt();
            assert!(range.start < constant && (middle / constant - 1.0).abs() < 1e-9);
        }
        assert_eq!(range(false, &[0.0]), Some(0.0..1.0));
        assert_eq!(range(true, &[0.0]), None);
    }

    #[test]
    fn constants_can_be_drawn_and_nothing_cannot() {
        for y in [0.0, 3.0] {
            let flat = chart(vec![Series::line("x", vec![(1.0, y), (2.0, y)])]);
            assert!(svg(&[flat]).is_ok(), "{y}");
        }
        for points in [vec![], vec![(f64::NAN, f64::NAN)]] {
            let error = svg(&[chart(vec![Series::line("x", points)])]).unwrap_err();
            assert!(error.to_string().contains("a <title>: "), "{error}");
        }
    }
}
