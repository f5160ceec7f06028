//! Charts as SVG text: curves over linear or logarithmic axes, with intervals as bands.
//!
//! The charts reference no external resources, and follow the reader's colour scheme.

use std::borrow::Cow;

use maud::{Markup, PreEscaped, html};

/// Width of a chart, and height of its plot, pixels.
const SIZE: (f64, f64) = (640.0, 280.0);
/// Room for labels at the left and at the right of the plot, and below it.
const MARGINS: (f64, f64, f64) = (82.0, 20.0, 50.0);
/// Height of a line of text, and mean width of a letter.
const TEXT: (f64, f64) = (20.0, 7.6);
/// Distance between labels, pixels.
const GAP: f64 = 8.0;
/// Length of a stroke in the legend.
const SAMPLE: f64 = 30.0;
/// Colours that people with colour vision deficiencies can distinguish, too (Okabe and Ito 2008), and dashes.
const STROKES: [(&str, &str); 7] = [
    ("currentColor", "none"),
    ("#d55e00", "9 3"),
    ("#0083cb", "3 3"),
    ("#009e73", "12 3 3 3"),
    ("#cc79a7", "6 6"),
    ("#e69f00", "1 3"),
    ("#56b4e9", "12 3 3 3 3 3"),
];
const STYLE: &str = "svg{color:#222;background:#fff;font:14px sans-serif}text{fill:currentColor}\
    @media(prefers-color-scheme:dark){svg{color:#ddd;background:#16181b}}";

/// A series of a chart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points, ascending by x.
    pub points: Vec<(f64, f64)>,
    /// Intervals of the points: x, least and largest y.
    pub band: Vec<(f64, f64, f64)>,
}

impl Series {
    /// Connect times by outage, in the same unit: the SYN that connects after one outage does so after each longer one
    /// up to the moment of that SYN.
    pub fn steps(name: &str, outages: Vec<(f64, f64)>) -> Self {
        let mut points: Vec<(f64, f64)> = Vec::new();
        for (outage, took) in outages {
            if let Some((before, height)) = points.last().copied().filter(|last| last.1 != took) {
                let step = height.clamp(before, outage);
                points.extend([(step, height), (step, took)]);
            }
            points.push((outage, took));
        }
        Self::line(name, points)
    }

    /// A series without intervals.
    pub fn line(name: &str, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.to_owned(),
            points,
            band: Vec::new(),
        }
    }
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
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Label beside the axis.
    pub label: Cow<'static, str>,
    /// Unit of its values.
    pub unit: Unit,
    /// Values of a vertical axis that have a line with a name.
    pub marks: &'static [(f64, &'static str)],
}

impl Axis {
    /// An axis of times in milliseconds.
    pub fn ms(label: impl Into<Cow<'static, str>>) -> Self {
        Self::of(label, Unit::Milliseconds)
    }

    /// An axis of percentages.
    pub fn percent(label: impl Into<Cow<'static, str>>) -> Self {
        Self::of(label, Unit::Percent)
    }

    /// An axis of numbers without a unit.
    pub fn number(label: impl Into<Cow<'static, str>>) -> Self {
        Self::of(label, Unit::Number)
    }

    /// An axis of values in a unit.
    pub fn of(label: impl Into<Cow<'static, str>>, unit: Unit) -> Self {
        Self {
            label: label.into(),
            unit,
            marks: &[],
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
    /// The series, each with its own stroke.
    pub series: Vec<Series>,
}

/// Draws charts below each other.
pub fn svg(charts: &[Chart]) -> String {
    let mut bottom = 0.0;
    let draw = |chart: &Chart| {
        let (height, drawn) = chart.draw(bottom);
        bottom += height;
        drawn
    };
    let drawn: Vec<Markup> = charts.iter().map(draw).collect();
    let drawn = html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (SIZE.0) " " (bottom) } {
            style { (PreEscaped(STYLE)) }
            @for chart in drawn { (chart) }
        }
    };
    drawn.into_string()
}

/// A direction of a plot: the values at its ends, and where these are.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scale {
    log: bool,
    values: (f64, f64),
    ends: (f64, f64),
}

impl Scale {
    /// Covers all these values.
    fn over(log: bool, values: impl Iterator<Item = f64>, ends: (f64, f64)) -> Self {
        let values = values.filter(|v| v.is_finite() && (!log || *v > 0.0));
        let (least, largest) = values.fold((f64::MAX, f64::MIN), |(least, largest), v| {
            (least.min(v), largest.max(v))
        });
        let values = if least < largest {
            (least, largest)
        } else if least == largest && least > 0.0 {
            (least / 2.0, largest * 2.0)
        } else if least == largest {
            (least, least + 1.0)
        } else {
            (1.0, 10.0)
        };
        Self { log, values, ends }
    }

    /// Leaves some room beyond the values; a linear scale begins at 0.
    fn padded(mut self) -> Self {
        let (least, largest) = self.values;
        self.values = match self.log {
            true => (least / 1.1, largest * 1.1),
            false => (0.0, largest * 1.05),
        };
        self
    }

    fn has(&self, value: f64) -> bool {
        value.is_finite() && (!self.log || value > 0.0)
    }

    fn covers(&self, value: f64) -> bool {
        (self.values.0..=self.values.1).contains(&value)
    }

    fn place(&self, value: f64) -> f64 {
        let (least, largest) = self.values;
        let share = match self.log {
            true => (value / least).ln() / (largest / least).ln(),
            false => (value - least) / (largest - least),
        };
        let place = self.ends.0 + share.clamp(0.0, 1.0) * (self.ends.1 - self.ends.0);
        (place * 10.0).round() / 10.0
    }

    /// Values with a label: multiples of 1, 2 or 5 times a power of ten. A logarithmic scale of less than a decade has
    /// the values of a linear one.
    fn ticks(&self) -> Vec<f64> {
        let (least, largest) = self.values;
        let decades = (largest / least).log10();
        if self.log && decades >= 1.0 {
            let steps: &[f64] = if decades > 3.0 {
                &[1.0]
            } else {
                &[1.0, 2.0, 5.0]
            };
            let powers = std::iter::successors(Some(10f64.powf(least.log10().floor())), |power| {
                Some(power * 10.0)
            });
            let all = powers.flat_map(|power| steps.iter().map(move |step| step * power));
            return all
                .skip_while(|tick| *tick < least * 0.999)
                .take_while(|tick| *tick <= largest * 1.001)
                .collect();
        }
        let raw = (largest - least) / 6.0;
        let power = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0].map(|step| step * power);
        let step = step.into_iter().find(|step| *step >= raw);
        let step = step.unwrap_or(10.0 * power);
        let first = (least / step).ceil();
        (0..=10)
            .map(|n| (first + f64::from(n)) * step)
            .take_while(|tick| *tick <= largest * 1.000_001)
            .collect()
    }

    /// Places of ticks with their labels; a label that would touch the one before it is left out.
    fn labels(&self, unit: Unit, size: impl Fn(&str) -> f64) -> Vec<(f64, Option<String>)> {
        let mut last: Option<(f64, f64)> = None;
        let labels = self.ticks().into_iter().map(|tick| {
            let (place, label) = (self.place(tick), unit.tick(tick));
            let half = size(&label) / 2.0;
            let fits =
                last.is_none_or(|(at, half_before)| (place - at).abs() >= half + half_before + GAP);
            if fits {
                last = Some((place, half));
            }
            (place, fits.then_some(label))
        });
        labels.collect()
    }
}

/// Lines that fit into a chart, of items that need this much room beside their text; each item with its offset.
fn wrap<'a>(items: impl Iterator<Item = &'a str>, more: f64) -> Vec<Vec<(f64, &'a str)>> {
    let mut lines = vec![Vec::new()];
    let mut at = 0.0;
    for item in items {
        let own = width(item) + more;
        if at > 0.0 && at + own > SIZE.0 - MARGINS.0 - MARGINS.1 {
            lines.push(Vec::new());
            at = 0.0;
        }
        if let Some(line) = lines.last_mut() {
            line.push((at, item));
        }
        at += own;
    }
    lines
}

fn width(text: &str) -> f64 {
    text.chars().count() as f64 * TEXT.1
}

/// The path through these points. Of points at the same height the first and the last are enough.
fn path(points: impl Iterator<Item = (f64, f64)>) -> String {
    let points = points.map(|(x, y)| (format!("{x:.1}"), format!("{y:.1}")));
    let mut kept: Vec<(String, String)> = Vec::new();
    for point in points {
        if let [.., before, last] = &mut kept[..]
            && before.1 == last.1
            && last.1 == point.1
        {
            *last = point;
        } else {
            kept.push(point);
        }
    }
    let steps: Vec<String> = kept.iter().map(|(x, y)| format!("{x} {y}")).collect();
    format!("M{}", steps.join("L"))
}

impl Chart {
    /// Draws it below `from`; returns its height.
    fn draw(&self, from: f64) -> (f64, Markup) {
        let title = wrap(self.title.split(' '), TEXT.1);
        let legend = wrap(
            self.series.iter().map(|series| &*series.name),
            SAMPLE + 2.0 * GAP,
        );
        let line = |number: usize| from + TEXT.0 * f64::from(u16::try_from(number).unwrap_or(0));
        let (left, right) = (MARGINS.0, SIZE.0 - MARGINS.1);
        let top = line(title.len() + legend.len()) + GAP;
        let bottom = top + SIZE.1;
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = Scale::over(self.log_x, points().map(|point| point.0), (left, right));
        let bands = self.series.iter().flat_map(|series| &series.band);
        let bounds = bands.flat_map(|(_, least, most)| [*least, *most]);
        let ys = points().map(|point| point.1).chain(bounds);
        let y = Scale::over(self.log_y, ys, (bottom, top)).padded();
        let middle = (left + right) / 2.0;
        let strokes = || self.series.iter().zip(STROKES.iter().cycle());
        let mut samples = STROKES.iter().cycle();
        let markup = html! {
            @for (number, words) in title.iter().enumerate() {
                text x=(left) y=(line(number + 1)) font-weight="bold" {
                    (words.iter().map(|(_, word)| *word).collect::<Vec<_>>().join(" "))
                }
            }
            @for (number, names) in legend.iter().enumerate() {
                @for ((at, name), (color, dashes)) in names.iter().zip(&mut samples) {
                    @let y = line(title.len() + number + 1);
                    path d={ "M" (left + at) " " (y - 4.0) "h" (SAMPLE) } stroke=(color)
                        stroke-dasharray=(dashes) stroke-width="2" {}
                    text x=(left + at + SAMPLE + GAP / 2.0) y=(y) { (name) }
                }
            }
            @for (at, label) in x.labels(self.x.unit, width) {
                path d={ "M" (at) " " (top) "V" (bottom) } stroke="currentColor" opacity="0.15" {}
                @if let Some(label) = label {
                    text x=(at) y=(bottom + TEXT.0) text-anchor="middle" { (label) }
                }
            }
            @for (at, label) in y.labels(self.y.unit, |_| TEXT.0 - GAP) {
                path d={ "M" (left) " " (at) "H" (right) } stroke="currentColor" opacity="0.15" {}
                @if let Some(label) = label {
                    text x=(left - GAP) y=(at + 4.0) text-anchor="end" { (label) }
                }
            }
            @for (value, name) in self.y.marks.iter().filter(|mark| y.covers(mark.0)) {
                @let at = y.place(*value);
                path d={ "M" (left) " " (at) "H" (right) } stroke="currentColor"
                    stroke-dasharray="2 4" {}
                text x=(right - 4.0) y=(at - 4.0) text-anchor="end" { (name) }
            }
            text x=(middle) y=(bottom + 2.0 * TEXT.0) text-anchor="middle" { (self.x.label) }
            text transform={ "translate(14 " ((top + bottom) / 2.0) ") rotate(-90)" }
                text-anchor="middle" { (self.y.label) }
            @for (series, (color, dashes)) in strokes() {
                @let drawn = |(at, value): &(f64, f64)| x.has(*at) && y.has(*value);
                @let place = |(at, value): (f64, f64)| (x.place(at), y.place(value));
                @let band = series.band.iter().filter(|band| x.has(band.0));
                @let (low, high): (Vec<_>, Vec<_>) =
                    band.map(|(at, low, high)| ((*at, *low), (*at, *high))).unzip();
                @if !low.is_empty() {
                    path d=(path(low.into_iter().chain(high.into_iter().rev()).map(place)))
                        fill=(color) opacity="0.18" {}
                }
                path d=(path(series.points.iter().copied().filter(drawn).map(place))) fill="none"
                    stroke=(color) stroke-dasharray=(dashes) stroke-width="2" {}
            }
            path d={ "M" (left) " " (top) "V" (bottom) "H" (right) } fill="none"
                stroke="currentColor" {}
        };
        (bottom + MARGINS.2 - from, markup)
    }
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
            series,
        }
    }

    #[test]
    fn marks_are_lines_within_the_axis() {
        let points = vec![(1.0, 100.0), (2.0, 5.0), (3.0, 0.5)];
        let mut marked = chart(vec![Series::line("a", points)]);
        marked.y.marks = &[(1.0, "p99"), (0.1, "p99.9")];
        marked.log_y = true;
        let text = svg(&[marked]);
        assert!(
            text.contains(">p99<") && !text.contains(">p99.9<"),
            "{text}"
        );
    }

    #[test]
    fn every_axis_omits_what_it_cannot_show() {
        let points = [
            (0.0, 1.0),
            (1.0, 2.0),
            (10.0, 0.0),
            (100.0, 5.0),
            (200.0, f64::NAN),
        ];
        for (log_x, log_y) in [(false, false), (false, true), (true, false), (true, true)] {
            let band = vec![(1.0, 0.0, 3.0), (100.0, 4.0, 6.0)];
            let own = Series {
                band,
                ..Series::line("an <arm>", points.to_vec())
            };
            let chart = Chart {
                log_x,
                log_y,
                ..chart(vec![Series::line("another", points.to_vec()), own])
            };
            let text = svg(&[chart.clone(), chart]);
            assert!(
                text.starts_with("<svg") && text.ends_with("</svg>"),
                "{text}"
            );
            assert!(
                text.contains("a &lt;title&gt;") && !text.contains("NaN"),
                "{text}"
            );
            for part in [">another<", ">an &lt;arm&gt;<", "opacity=\"0.18\""] {
                assert_eq!(text.matches(part).count(), 2, "{part}: {text}");
            }
            let curves = text
                .split("<path")
                .filter(|path| path.contains("fill=\"none\" stroke=\"#"));
            let shown = 4 - usize::from(log_x) - usize::from(log_y);
            for curve in curves {
                assert_eq!(curve.matches('L').count(), shown - 1, "{curve}");
            }
        }
    }

    #[test]
    fn ticks_are_round_and_their_labels_apart() {
        let ticks = |log, values| {
            let ends = (0.0, 600.0);
            Scale { log, values, ends }.ticks()
        };
        assert_eq!(ticks(true, (0.9, 30.0)), [1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(ticks(true, (3.0, 60_000.0)), [10.0, 100.0, 1e3, 1e4]);
        assert_eq!(ticks(true, (110.0, 310.0)), [150.0, 200.0, 250.0, 300.0]);
        assert_eq!(ticks(false, (0.0, 20.0)), [0.0, 5.0, 10.0, 15.0, 20.0]);
        for values in [
            (0.9, 30.0),
            (1e-3, 1e6),
            (110.0, 310.0),
            (1.0, 9.0),
            (0.5, 4e9),
        ] {
            for log in [false, true] {
                let ends = (82.0, 702.0);
                let labels = Scale { log, values, ends }.labels(Unit::Milliseconds, width);
                let shown = labels
                    .iter()
                    .filter_map(|(at, label)| Some((at, width(label.as_ref()?))));
                let shown: Vec<_> = shown.collect();
                assert!(shown.len() > 2, "{values:?}");
                for pair in shown.windows(2) {
                    let room = (pair[0].1 + pair[1].1) / 2.0;
                    assert!(pair[1].0 - pair[0].0 > room, "{values:?}: {labels:?}");
                }
            }
        }
    }

    #[test]
    fn values_have_readable_units() {
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
    fn scale_covers_all_values_and_centres_a_constant() {
        let over = |log, values: &[f64]| Scale::over(log, values.iter().copied(), (0.0, 1.0));
        assert_eq!(over(false, &[5.0, f64::NAN, -1.0, 2.0]).values, (-1.0, 5.0));
        assert_eq!(over(true, &[5.0, 0.0, -1.0, 2.0]).values, (2.0, 5.0));
        for constant in [0.01, 1.0, 3.0, 1e6] {
            assert!((over(true, &[constant; 2]).place(constant) - 0.5).abs() < 1e-9);
        }
        assert_eq!(over(false, &[0.0]).values, (0.0, 1.0));
        assert!(svg(&[chart(Vec::new())]).contains("a share"));
    }

    #[test]
    fn long_titles_and_legends_have_more_lines() {
        let words = "word ".repeat(60);
        let lines = wrap(words.trim().split(' '), TEXT.1);
        assert!(lines.len() > 2, "{lines:?}");
        assert!(
            lines
                .iter()
                .all(|line| line[0].0 == 0.0 && line.last().unwrap().0 < SIZE.0)
        );
    }
}
