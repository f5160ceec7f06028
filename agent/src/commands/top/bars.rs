//! Bars with a resolution of an eighth of a character.

const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Lines from top to bottom with a bar for each value. The largest value fills the height; only 0
/// has no bar.
pub(super) fn lines(values: &[f64], height: u16) -> Vec<String> {
    let most = values.iter().copied().fold(0.0, f64::max);
    let height = u32::from(height);
    let levels = height * 8;
    let reached =
        |value: f64, level: u32| value > 0.0 && value * f64::from(levels) > most * f64::from(level);
    (0..height)
        .rev()
        .map(|line| {
            let level = |value: f64| (0..8).filter(|l| reached(value, line * 8 + l)).count();
            values.iter().map(|v| EIGHTHS[level(*v)]).collect()
        })
        .collect()
}

/// One line with a bar for each of the latest values, the last one at the right.
pub(super) fn sparkline(values: impl DoubleEndedIterator<Item = f64>, width: usize) -> String {
    let mut latest: Vec<f64> = values.rev().take(width).collect();
    latest.reverse();
    format!("{:>width$}", lines(&latest, 1).concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_grow_with_values() {
        assert_eq!(lines(&[0.0, 0.01, 4.0, 8.0], 1), [" ▁▄█"]);
        assert_eq!(lines(&[1.0, 2.0, 3.0, 4.0], 2), ["  ▄█", "▄███"]);
        assert_eq!(lines(&[0.0, 0.0], 1), ["  "]);
        assert_eq!(lines(&[1.0], 0), Vec::<String>::new());
    }

    #[test]
    fn the_latest_values_are_seen() {
        let values = [9.0, 1.0, 2.0];
        assert_eq!(sparkline(values.into_iter(), 2), "▄█");
        assert_eq!(sparkline(values.into_iter(), 5), "  █▁▂");
        assert_eq!(sparkline(values.into_iter(), 0), "");
    }
}
