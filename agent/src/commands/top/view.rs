//! Draws a [`State`] on a terminal of any size.

use std::time::{Duration, Instant};

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Style, Stylize as _},
    text::{Line, Text},
    widgets::{Block, Clear, Paragraph},
};
use rto_agent_core::{policy::units::format_duration, wire::stats::TOO_MANY_SPURIOUS};

use super::{
    row::{COLUMNS, IMPORTANCE, Row, SPURIOUS},
    state::{Input, State, View},
};
use crate::commands::{
    table,
    terminal::{shortened, wrapped},
};

/// The least width of names on a terminal without room for all columns.
const NAME: usize = 12;

pub(super) fn draw(frame: &mut Frame<'_>, state: &State, now: Instant) {
    let [header, body, footer] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_header(frame, header, state, now);
    match state.view {
        View::Table => draw_table(frame, body, state),
        View::Policy | View::Timers => {
            let columns = Some(body.width.into());
            let text = state.text(columns);
            let lines: Vec<_> = text.lines().map(|line| wrapped(line, 0, columns)).collect();
            let text = lines.join("\n");
            // Only here the height is known.
            let most = text.lines().count().saturating_sub(body.height.into());
            state.scroll.set(state.scroll.get().min(most));
            let scroll = u16::try_from(state.scroll.get()).unwrap_or(u16::MAX);
            frame.render_widget(Paragraph::new(text).scroll((scroll, 0)), body);
        }
    }
    draw_footer(frame, footer, state);
    if state.input == Input::Help {
        draw_help(frame);
    }
}

fn draw_header(frame: &mut Frame<'_>, area: Rect, state: &State, now: Instant) {
    let trouble = state.trouble(now);
    let age = format_duration(Duration::from_secs(state.age(now).as_secs()));
    let looked = match trouble {
        Some(_) => format!("no answer for {age}").red().bold(),
        None => format!("updated {age} ago").into(),
    };
    let every = format!("  every {}, ", format_duration(state.interval));
    let right = Line::from(vec![every.into(), looked]);
    let width = u16::try_from(right.width()).unwrap_or(u16::MAX);
    let [first, second] = Layout::vertical([Constraint::Length(1); 2]).areas(area);
    // The daemon's health is more important than its address.
    let [left_area, right_area] =
        Layout::horizontal([Constraint::Fill(1), Constraint::Length(width)]).areas(first);
    let left = Line::from(vec!["rto-agent top  ".bold(), state.socket.as_str().into()]);
    frame.render_widget(left, left_area);
    frame.render_widget(right, right_area);
    let message = match trouble {
        Some(trouble) => trouble.to_owned().red().bold(),
        None if !state.answers.stats.on => "no statistics: statistics = false in [agent]".yellow(),
        None if state.view != View::Table => meaning(state).cyan(),
        None => meaning(state).dim(),
    };
    frame.render_widget(Line::from(message), second);
}

/// Where the shown text is from, or since when the counts are and the sort order.
fn meaning(state: &State) -> String {
    let began = match state.since_start {
        false => "the policy",
        true => "top",
    };
    match state.view {
        View::Table => {
            let order = match state.ascending() {
                true => "ascending",
                false => "descending",
            };
            let sort = COLUMNS[state.sort].title;
            format!(
                "/S: since the last update; others: since {began} started; sorted by {sort}, {order}"
            )
        }
        View::Policy => format!("rto-agent stats --policy, since {began} started"),
        View::Timers => "rto-agent tune".to_owned(),
    }
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let rows = state.rows();
    if rows.is_empty() {
        let text = match state.answers.stats.policies.is_empty() {
            true => "no policy is active".to_owned(),
            false => format!("no policy's name contains {:?}", state.filter),
        };
        frame.render_widget(Line::from(text), area);
        return;
    }
    let width = usize::from(area.width);
    let name = NAME.max(width / 5);
    let header = COLUMNS
        .each_ref()
        .map(|c| format!("{:>1$}", c.title, c.width));
    let cells: Vec<_> = rows.iter().map(|row| cells(row, name)).collect();
    let (text, _) = table::fitted(
        header.each_ref().map(String::as_str),
        &cells,
        IMPORTANCE,
        Some(width),
    );
    let mut lines = text.lines().map(|line| format!("{line:width$}"));
    let header = lines.next().unwrap_or_default().bold();
    let selected = state.selected(&rows);
    let lines = rows
        .iter()
        .zip(lines)
        .enumerate()
        .map(|(index, (row, line))| {
            let spurious = (COLUMNS[SPURIOUS].value)(row);
            let style = match spurious.is_some_and(|share| share > TOO_MANY_SPURIOUS) {
                true => Style::new().fg(Color::Red).bold(),
                false => Style::new(),
            };
            Line::styled(
                line,
                if index == selected {
                    style.reversed()
                } else {
                    style
                },
            )
        });
    let height = usize::from(area.height).saturating_sub(1);
    let above = (selected + 1).saturating_sub(height);
    let shown = std::iter::once(header.into()).chain(lines.skip(above));
    frame.render_widget(Text::from_iter(shown), area);
}

fn cells(row: &Row<'_>, name: usize) -> [String; COLUMNS.len()] {
    let mut cells = COLUMNS.each_ref().map(|column| {
        let value = (column.value)(row).map_or_else(|| "-".to_owned(), column.text);
        format!("{value:>0$}", column.width)
    });
    cells[0] = shortened(row.name.as_str(), Some(name));
    cells
}

fn draw_footer(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let line = if state.input == Input::Filter {
        Line::from(vec![
            "/".bold(),
            state.filter.as_str().into(),
            "█".into(),
            "  Enter keep  Esc drop".dim(),
        ])
    } else if state.view != View::Table {
        Line::from("Esc back  up/down scroll  t since  ? help  q quit").dim()
    } else {
        let keys = "q quit  Enter open  u timers  s, r sort  / filter  t since  ? help";
        let filter = match state.filter.as_str() {
            "" => String::new(),
            filter => format!("/{filter}  "),
        };
        Line::from(vec![filter.yellow(), keys.dim()])
    };
    frame.render_widget(line, area);
}

fn draw_help(frame: &mut Frame<'_>) {
    const HELP: &str = "\
up, down, k, j   select a policy, scroll
Enter            statistics of the policy, with its control arm; Esc goes back
u                learnt and guarded timers, and verdicts
s, r             sort by the next column, reverse
/                only policies whose name contains this; Esc clears it
t                count since the policy was added or since top started
q, Esc, Ctrl-C   quit

CONN/S   connections established per second
RETR%    SYNs and SYN-ACKs retransmitted, per connection
SPUR%    connections with a spurious SYN or SYN-ACK, sent in vain
>500MS   connects that took longer than 500 ms
P50...   connect times, losses included
RTT      smoothed round-trip time
ABRT/S   connections aborted per second
CONNS    connections established";
    let text = Text::from(HELP);
    let size = |n: usize| u16::try_from(n + 2).unwrap_or(u16::MAX);
    let area = frame.area();
    let area = area.centered(
        Constraint::Length(size(text.width()).min(area.width)),
        Constraint::Length(size(text.height()).min(area.height)),
    );
    let block = Block::bordered().title(" any key closes ");
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(text).block(block), area);
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};
    use rto_agent_core::{testing::timer, wire::tune::TunedPolicy};
    use rto_model::tune::tuner::State as TunerState;

    use super::{
        super::samples::{busy, press, state},
        *,
    };

    /// The screen at this time after the last answer, however slow the machine is.
    fn screen(state: &State, width: u16, height: u16, age: Duration) -> Terminal<TestBackend> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let now = Instant::now();
        let now = now - state.age(now) + age;
        terminal.draw(|frame| draw(frame, state, now)).unwrap();
        terminal
    }

    fn text(state: &State) -> String {
        screen(state, 80, 24, Duration::ZERO).backend().to_string()
    }

    #[test]
    fn top_shows_busy_policies() {
        insta::assert_snapshot!(text(&busy()));
    }

    #[test]
    fn top_help_is_shown() {
        let mut state = busy();
        press(&mut state, "?");
        insta::assert_snapshot!(text(&state));
    }

    #[test]
    fn top_filter_is_shown_while_typed() {
        let mut state = busy();
        press(&mut state, "/ne");
        let text = text(&state);
        assert!(text.contains("/ne█  Enter keep"), "{text}");
        assert!(text.contains("\"near "), "{text}");
        assert!(!text.contains("database"), "{text}");
    }

    #[test]
    fn top_shows_open_policy() {
        let mut state = busy();
        press(&mut state, "j\n");
        insta::assert_snapshot!(text(&state));
        press(&mut state, "jjjj");
        assert!(!text(&state).contains("CONNECTS"));
    }

    #[test]
    fn top_shows_timers_of_filtered_policies() {
        let mut state = busy();
        for name in ["near", "far"] {
            let policy = TunedPolicy {
                since_ms: None,
                timers: vec![timer("active", TunerState::Active)],
                transitions: Vec::new(),
                holdout: None,
            };
            let policies = &mut state.answers.tune.policies;
            policies.insert(name.parse().unwrap(), policy);
        }
        press(&mut state, "/ne\nu");
        let text = text(&state);
        assert!(text.contains("next: lower to 24ms"), "{text}");
        assert!(text.contains("near") && !text.contains("far"), "{text}");
    }

    #[test]
    fn top_reports_unreachable_daemon() {
        let mut state = busy();
        state.failed("no rto-agent daemon answers at /run/x: refused".to_owned());
        let terminal = screen(&state, 80, 24, Duration::from_secs(75));
        let text = terminal.backend().to_string();
        assert!(text.contains("no answer for 75s"), "{text}");
        assert!(text.contains("/run/x: refused"), "{text}");
        assert!(text.contains("near"), "{text}");
        let buffer = terminal.backend().buffer();
        assert_eq!(buffer[(0, 1)].fg, Color::Red);
        assert_eq!(buffer[(79, 0)].fg, Color::Red);
    }

    #[test]
    fn top_without_policies_says_so() {
        assert!(text(&state(&[])).contains("no policy is active"));
        let mut filtered = state(&[("a", 1)]);
        press(&mut filtered, "/b\n");
        assert!(text(&filtered).contains("no policy's name contains \"b\""));
        let mut off = state(&[("a", 1)]);
        off.answers.stats.on = false;
        assert!(text(&off).contains("statistics = false"));
    }

    #[test]
    fn too_many_spurious_retransmissions_are_red() {
        let terminal = screen(&busy(), 80, 24, Duration::ZERO);
        let lines = terminal.backend().to_string();
        for (y, line) in (0..).zip(lines.lines()) {
            let is_red = terminal.backend().buffer()[(0, y)].fg == Color::Red;
            assert_eq!(is_red, line.contains("database"), "{line}");
        }
    }

    #[test]
    fn selected_row_is_visible() {
        let mut state = busy();
        press(&mut state, "jjj");
        let text = screen(&state, 80, 5, Duration::ZERO).backend().to_string();
        assert!(
            text.contains("POLICY") && text.contains("nothing-yet"),
            "{text}"
        );
    }

    #[test]
    fn top_draws_at_any_terminal_size() {
        for keys in ["", "?", "/x", "j\n", "jjj\n", "u"] {
            let mut state = busy();
            press(&mut state, keys);
            for (width, height) in (1..=100).flat_map(|w| (1..=30).step_by(4).map(move |h| (w, h)))
            {
                screen(&state, width, height, Duration::ZERO);
            }
        }
    }
}
