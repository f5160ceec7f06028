//! The view of one open policy: histograms of each direction in each arm.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::Stylize as _,
    text::Line,
    widgets::Paragraph,
};
use rto_agent_common::histogram::{bucket_end_us, bucket_of};
use rto_agent_core::{
    policy::PolicyName,
    wire::{
        histogram::HistogramView,
        stats::{ArmStats, DirectionStats, PolicyStats},
    },
};

use super::{
    bars,
    history::{PolicyHistory, float, share},
    state::State,
    table::{number, percent},
};
use crate::commands::stats::short_us;

/// Lines of a direction in addition to its bars: counts, quantiles, the axis.
const BESIDE: u16 = 3;
/// The most lines of a bar; higher bars show no more.
const HIGHEST: u16 = 12;
/// The most columns of a bar.
const WIDEST: usize = 3;

pub(super) fn draw(
    frame: &mut Frame<'_>,
    area: Rect,
    state: &State,
    name: &PolicyName,
    history: &PolicyHistory,
) {
    let stats = history.stats(state.scope);
    let sections = sections(&stats);
    let seen = sections.iter().filter(|(_, stats)| !is_empty(stats));
    let seen = seen.count();
    // One line for the name, and one for each empty section.
    let others = u16::try_from(1 + sections.len() - seen).unwrap_or(u16::MAX);
    let seen = u16::try_from(seen).unwrap_or(u16::MAX);
    let each = area.height.saturating_sub(others) / seen.max(1);
    let each = each.clamp(BESIDE + 1, BESIDE + HIGHEST);
    let height = |stats: &DirectionStats| if is_empty(stats) { 1 } else { each };
    let mut constraints = vec![Constraint::Length(1)];
    let heights = sections.iter().map(|(_, stats)| height(stats));
    constraints.extend(heights.map(Constraint::Length));
    let areas = Layout::vertical(constraints).split(area);
    frame.render_widget(Line::from(name.as_str()).bold(), areas[0]);
    // All sections share an axis, so that directions and arms can be compared.
    let connect_time = Axis::of(sections.iter().map(|(_, stats)| &stats.connect_time));
    let srtt = Axis::of(sections.iter().map(|(_, stats)| &stats.srtt));
    for ((title, stats), area) in sections.iter().zip(&areas[1..]) {
        let [counts, histograms] =
            Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(*area);
        frame.render_widget(self::counts(title, stats), counts);
        let [left, right] = Layout::horizontal([Constraint::Fill(1); 2])
            .spacing(2)
            .areas(histograms);
        if is_empty(stats) {
            continue;
        }
        let measured = match state.sampling {
            0 | 1 => String::new(),
            one_in => format!(" (of 1 in {one_in})"),
        };
        let bars = each - BESIDE;
        draw_histogram(
            frame,
            left,
            bars,
            "connect time",
            &connect_time,
            &stats.connect_time,
        );
        let sampled = state.rtt_sampling != "off";
        if sampled || stats.srtt.count > 0 {
            let what = format!("srtt{measured}");
            draw_histogram(frame, right, bars, &what, &srtt, &stats.srtt);
        } else {
            let why = Line::from("srtt: rtt_sampling = \"off\" in [agent]").dim();
            frame.render_widget(why, right);
        }
    }
}

/// The sections of the page: each direction, and each direction of the control arm that has counts.
fn sections(stats: &PolicyStats) -> Vec<(String, &DirectionStats)> {
    let directions = stats.treated.directions().into_iter();
    let mut sections: Vec<_> = directions
        .map(|(direction, stats)| (direction.to_owned(), stats))
        .collect();
    if let Some((control, title)) = stats.control.as_ref().zip(stats.control_title()) {
        if *control == ArmStats::default() {
            sections.push((title, &control.active));
        } else {
            let directions = control.directions().into_iter();
            let counted = directions.filter(|(_, stats)| !is_empty(stats));
            sections
                .extend(counted.map(|(direction, stats)| (format!("{title}, {direction}"), stats)));
        }
    }
    sections
}

fn is_empty(stats: &DirectionStats) -> bool {
    *stats == DirectionStats::default()
}

fn counts(title: &str, stats: &DirectionStats) -> Line<'static> {
    let text = if is_empty(stats) {
        ": none".to_owned()
    } else {
        let again = share(stats.handshake_retransmissions, stats.connections);
        format!(
            ": {}, {} ({}), {} spurious, {} aborted",
            named(stats.connections, "connection", "connections"),
            named(
                stats.handshake_retransmissions,
                "retransmission",
                "retransmissions"
            ),
            again.map_or_else(|| "-".to_owned(), percent),
            number(float(stats.spurious)),
            number(float(stats.aborted)),
        )
    };
    Line::from(vec![title.to_owned().cyan(), text.into()])
}

/// A count with its noun, in three digits.
fn named(count: u64, one: &str, many: &str) -> String {
    let noun = if count == 1 { one } else { many };
    format!("{} {noun}", number(float(count)))
}

/// The buckets from the first to the last that any direction has samples in.
struct Axis {
    first: usize,
    last: usize,
}

impl Axis {
    fn of<'a>(histograms: impl Iterator<Item = &'a HistogramView> + Clone) -> Self {
        let buckets = || histograms.clone().flat_map(|h| &h.buckets);
        Self {
            first: buckets().map(|b| bucket_of(b.from_us)).min().unwrap_or(0),
            last: buckets().map(|b| bucket_of(b.from_us)).max().unwrap_or(0),
        }
    }

    /// The count of each bucket, including empty ones in between; adjacent buckets are added if the
    /// width is not enough.
    fn counts(&self, histogram: &HistogramView, width: usize) -> Vec<f64> {
        let buckets = self.last - self.first + 1;
        let together = buckets.div_ceil(width.max(1));
        let mut counts = vec![0.0; buckets.div_ceil(together)];
        for bucket in &histogram.buckets {
            let at = bucket_of(bucket.from_us).saturating_sub(self.first) / together;
            if let Some(count) = counts.get_mut(at) {
                *count += float(bucket.count);
            }
        }
        counts
    }

    /// Both ends of the axis, as far apart as the bars are wide.
    fn labels(&self, width: usize) -> String {
        let before = self.first.checked_sub(1).and_then(bucket_end_us);
        let from = short_us(float(before.unwrap_or(0)));
        let to =
            bucket_end_us(self.last).map_or_else(|| "any".to_owned(), |us| short_us(float(us)));
        let gap = width.saturating_sub(from.len() + to.len()).max(2);
        format!("{from}{:gap$}{to}", "")
    }
}

fn draw_histogram(
    frame: &mut Frame<'_>,
    area: Rect,
    height: u16,
    what: &str,
    axis: &Axis,
    histogram: &HistogramView,
) {
    let quantile = |share| histogram.quantile_us(share).map(short_us);
    let Some((p50, p99)) = quantile(0.5).zip(quantile(0.99)) else {
        frame.render_widget(Line::from(format!("{what}: none")), area);
        return;
    };
    let width = usize::from(area.width);
    let counts = axis.counts(histogram, width);
    let wide = (width / counts.len()).clamp(1, WIDEST);
    let widened: Vec<_> = counts
        .iter()
        .flat_map(|c| std::iter::repeat_n(*c, wide))
        .collect();
    let title = format!("{what} p50 {p50}, p99 {p99}");
    let mut lines = vec![Line::from(title)];
    let bars = bars::lines(&widened, height);
    lines.extend(bars.into_iter().map(|bar| Line::from(bar).green()));
    lines.push(Line::from(axis.labels(widened.len())).dim());
    frame.render_widget(Paragraph::new(lines), area);
}

#[cfg(test)]
mod tests {
    use rto_agent_common::histogram::{BUCKETS, Histogram};

    use super::*;

    fn of(times_us: &[u64]) -> HistogramView {
        let mut histogram = Histogram::default();
        for us in times_us {
            histogram.buckets[bucket_of(*us)] += 1;
        }
        (&histogram).into()
    }

    #[test]
    fn an_axis_has_the_buckets_of_all_and_those_between() {
        let (a, b) = (of(&[100, 100]), of(&[120, 250]));
        let axis = Axis::of([&a, &b, &of(&[])].into_iter());
        assert_eq!(axis.counts(&a, 80), [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(
            axis.counts(&b, 80),
            [0.0, 1.0, 0.0, 0.0, 0.0, 1.0].map(f64::from)
        );
        assert_eq!(axis.counts(&b, 3), [1.0, 0.0, 1.0]);
        assert_eq!(axis.counts(&b, 0), [2.0]);
        assert_eq!(axis.labels(20), "96.0us         256us");
        assert_eq!(axis.labels(0), "96.0us  256us");
    }

    #[test]
    fn an_axis_can_have_every_bucket_or_none() {
        let all = of(&[0, u64::MAX]);
        let axis = Axis::of([&all, &of(&[]), &of(&[])].into_iter());
        assert_eq!(axis.counts(&all, 200).len(), BUCKETS);
        assert_eq!(axis.labels(0), "0.00us  any");
        let none = Axis::of([&of(&[]), &of(&[]), &of(&[])].into_iter());
        assert_eq!(none.counts(&of(&[]), 10), [0.0]);
    }
}
