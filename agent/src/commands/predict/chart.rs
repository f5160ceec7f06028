//! Predictions drawn: idle time by disruption, on logarithmic and on linear axes, and the improvement.

use std::{fs, ops::Range, path::Path, time::Duration};

use anyhow::{Context as _, bail, ensure};
use plotters::{
    coord::ranged1d::{AsRangedCoord, ValueFormatter},
    prelude::*,
};

use crate::policy::predict::Prediction;

/// Of each of the three, pixels.
const SIZE: (u32, u32) = (900, 480);
/// Points of a curve.
const POINTS: u32 = 400;

/// Disruptions from the least to the largest, evenly spread on a logarithmic axis: timers make steps, which
/// a few points would hide.
pub(super) fn disruptions(given: &[Duration]) -> Vec<Duration> {
    let (Some(least), Some(largest)) = (given.iter().min(), given.iter().max()) else {
        return Vec::new();
    };
    let (from, to) = (least.as_secs_f64().ln(), largest.as_secs_f64().ln());
    (0..=POINTS)
        .map(|n| {
            Duration::from_secs_f64((from + (to - from) * f64::from(n) / f64::from(POINTS)).exp())
        })
        .collect()
}

/// Writes the charts to a file that ends in .svg or .html. Nothing is fetched by either.
///
/// # Errors
///
/// If its name ends otherwise, there is but one disruption, or it cannot be written.
pub(super) fn write(path: &Path, title: &str, predictions: &[Prediction]) -> anyhow::Result<()> {
    let svg = svg(title, predictions)?;
    let text = match path.extension().and_then(|e| e.to_str()) {
        Some("svg") => svg,
        Some("html") => format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <title>rto-agent predict</title></head>\n<body>\n{svg}\n</body></html>\n"
        ),
        _ => bail!(
            "--chart {}: its name must end in .svg or .html",
            path.display()
        ),
    };
    fs::write(path, text).with_context(|| format!("--chart {}", path.display()))
}

fn svg(title: &str, predictions: &[Prediction]) -> anyhow::Result<String> {
    let x = range(predictions, |p| p.disruption_ms);
    ensure!(x.start < x.end, "a chart needs more than one disruption");
    let kernel = range(predictions, |p| p.kernel_ms);
    let policy = range(predictions, |p| p.policy_ms);
    let y = kernel.start.min(policy.start)..kernel.end.max(policy.end);
    let gain = |p: &Prediction| p.kernel_ms / p.policy_ms;
    let gains = range(predictions, gain);
    use SeriesLabelPosition::{LowerRight, UpperRight};

    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (SIZE.0, 3 * SIZE.1)).into_drawing_area();
        area.fill(&WHITE).map_err(drawn)?;
        let areas = area.split_evenly((3, 1));
        let kernel: (_, _, fn(&Prediction) -> f64) = ("kernel", &BLACK, |p| p.kernel_ms);
        let policy: (_, _, fn(&Prediction) -> f64) = ("with it", &RED, |p| p.policy_ms);
        let logarithmic = ((x.clone()).log_scale(), y.clone().log_scale());
        let caption = format!("{title}: idle, ms, by disruption, ms");
        draw(
            &areas[0],
            &caption,
            logarithmic,
            predictions,
            &[kernel, policy],
            LowerRight,
        )?;
        let linear = (0.0..x.end, 0.0..y.end);
        let caption = "the same on linear axes";
        draw(
            &areas[1],
            caption,
            linear,
            predictions,
            &[kernel, policy],
            LowerRight,
        )?;
        let caption = "improvement: kernel's idle time by that with it (below 1: worse)";
        let improvement = (x.log_scale(), 0.0..gains.end.max(1.0) * 1.05);
        let one: (_, _, fn(&Prediction) -> f64) = ("1: no difference", &BLACK, |_| 1.0);
        let gain: (_, _, fn(&Prediction) -> f64) =
            ("improvement", &RED, |p| p.kernel_ms / p.policy_ms);
        draw(
            &areas[2],
            caption,
            improvement,
            predictions,
            &[one, gain],
            UpperRight,
        )?;
        area.present().map_err(drawn)?;
    }
    Ok(text)
}

type Curve<'a> = (&'a str, &'a RGBColor, fn(&Prediction) -> f64);

fn draw<X, Y>(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    caption: &str,
    (x, y): (X, Y),
    predictions: &[Prediction],
    curves: &[Curve<'_>],
    legend: SeriesLabelPosition,
) -> anyhow::Result<()>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 18))
        .margin(12)
        // The last label of the axis.
        .margin_right(40)
        .x_label_area_size(36)
        .y_label_area_size(70)
        .build_cartesian_2d(x, y)
        .map_err(drawn)?;
    chart.configure_mesh().draw().map_err(drawn)?;
    for (name, color, value) in curves {
        let points = predictions.iter().map(|p| (p.disruption_ms, value(p)));
        let color = **color;
        chart
            .draw_series(LineSeries::new(points, &color))
            .map_err(drawn)?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color));
    }
    chart
        .configure_series_labels()
        .position(legend)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()
        .map_err(drawn)
}

/// From the least to the largest.
fn range(predictions: &[Prediction], value: impl Fn(&Prediction) -> f64) -> Range<f64> {
    let values = predictions.iter().map(value);
    let (least, largest) = values.fold((f64::MAX, f64::MIN), |(least, largest), v| {
        (least.min(v), largest.max(v))
    });
    least..largest
}

fn drawn(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow::anyhow!("the chart cannot be drawn: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_go_from_the_least_to_the_largest() {
        let ms = Duration::from_millis;
        let all = disruptions(&[ms(500), ms(10), ms(2000)]);
        assert_eq!(all.len(), 401);
        let near = |a: Duration, b: Duration| a.abs_diff(b) < Duration::from_micros(1);
        assert!(near(all[0], ms(10)) && near(all[400], ms(2000)));
        assert!(all.is_sorted());
        assert_eq!(disruptions(&[]), Vec::new());
    }

    #[test]
    fn by_the_ending_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let prediction = |disruption_ms, policy_ms| Prediction {
            disruption_ms,
            kernel_ms: 208.0,
            policy_ms,
            worse: false,
        };
        let two = [prediction(10.0, 16.0), prediction(200.0, 212.0)];
        for (name, begin) in [("a.svg", "<svg"), ("a.html", "<!DOCTYPE html>")] {
            let path = dir.path().join(name);
            write(&path, "rto_min <8ms>", &two).unwrap();
            let text = fs::read_to_string(path).unwrap();
            assert!(text.starts_with(begin), "{text}");
            assert!(text.contains("</svg>") && text.contains("improvement"));
            assert!(text.contains("&lt;8ms&gt;"), "{text}");
            assert!(text.matches("<polyline").count() >= 6, "{text}");
        }
        let error = write(&dir.path().join("a.png"), "", &two).unwrap_err();
        assert!(error.to_string().contains(".svg or .html"), "{error}");
        let error = write(&dir.path().join("b.svg"), "", &two[..1]).unwrap_err();
        assert!(error.to_string().contains("more than one"), "{error}");
    }
}
