//! The exposition formats of metrics, and content negotiation between them.

use std::fmt::Write as _;

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The Prometheus text format 0.0.4.
    Text,
}

impl Exposition {
    /// The format that an `Accept` header prefers (RFC 9110 section 12.5.1); OpenMetrics only if
    /// the header names it.
    pub fn accepted(header: Option<&str>) -> Self {
        let quality = |types: &[&str]| {
            let ranges = header.unwrap_or_default().split(',').map(Range::read);
            let known = ranges.filter(|range| types.contains(&range.media_type));
            known.map(|range| range.quality).fold(0.0, f32::max)
        };
        let open = quality(&["application/openmetrics-text"]);
        if open > 0.0 && open >= quality(&["text/plain", "text/*", "*/*"]) {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    /// The media type for `Content-Type`.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Converts OpenMetrics text to this format.
    pub fn of(self, open_metrics: String) -> String {
        match self {
            Self::OpenMetrics => open_metrics,
            Self::Text => plain(&open_metrics),
        }
    }
}

/// One media range of an `Accept` header.
struct Range<'a> {
    media_type: &'a str,
    quality: f32,
}

impl<'a> Range<'a> {
    fn read(text: &'a str) -> Self {
        let mut parts = text.split(';').map(str::trim);
        let media_type = parts.next().unwrap_or_default();
        let quality = parts.find_map(|parameter| parameter.strip_prefix("q="));
        Self {
            media_type,
            quality: quality.map_or(1.0, |q| q.parse().unwrap_or(0.0)),
        }
    }
}

/// Converts OpenMetrics to the text format: families have the names of their samples, and there are
/// neither units nor an EOF line.
fn plain(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ').map(|(_, help)| help);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap_or((rest, "untyped"));
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                kind => ("", kind),
            };
            // Writing to a string does not fail.
            if let Some(help) = help.take() {
                let _written = writeln!(text, "# HELP {name}{suffix} {help}");
            }
            let _written = writeln!(text, "# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_gets_what_it_prefers() {
        use Exposition::{OpenMetrics, Text};

        // The headers of Prometheus 2.42 and 3.
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (header, expected) in [
            (Some(prometheus), OpenMetrics),
            (Some("application/openmetrics-text"), OpenMetrics),
            (Some("text/plain"), Text),
            (Some("text/html,application/xhtml+xml,*/*;q=0.8"), Text),
            (
                Some("application/openmetrics-text;q=0.2, text/plain;q=0.9"),
                Text,
            ),
            (Some("application/openmetrics-text;q=0"), Text),
            (Some("*/*"), Text),
            (Some(""), Text),
            (None, Text),
        ] {
            assert_eq!(Exposition::accepted(header), expected, "{header:?}");
        }
    }

    #[test]
    fn the_text_format_names_families_as_their_samples() {
        let open = "# HELP a_x X.\n# TYPE a_x counter\na_x_total{p=\"n\"} 1\n\
                    # HELP a_t_seconds T.\n# TYPE a_t_seconds gauge\n# UNIT a_t_seconds seconds\na_t_seconds 2.5\n\
                    # HELP a_build V.\n# TYPE a_build info\na_build_info{version=\"1\"} 1\n# EOF\n";
        let text = "# HELP a_x_total X.\n# TYPE a_x_total counter\na_x_total{p=\"n\"} 1\n\
                    # HELP a_t_seconds T.\n# TYPE a_t_seconds gauge\na_t_seconds 2.5\n\
                    # HELP a_build_info V.\n# TYPE a_build_info gauge\na_build_info{version=\"1\"} 1\n";
        assert_eq!(Exposition::Text.of(open.to_owned()), text);
        assert_eq!(Exposition::OpenMetrics.of(open.to_owned()), open);
    }
}
