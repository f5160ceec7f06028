//! Draws a [`State`] on a terminal of any size.

use std::time::{Duration, Instant};

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::Stylize as _,
    text::{Line, Text},
    widgets::{Block, Clear, Paragraph},
};
use rto_agent_core::policy::units::format_duration;

use super::{
    details,
    history::Scope,
    state::State,
    table::{self, shortened},
    timers,
};

pub(super) fn draw(frame: &mut Frame<'_>, state: &State, now: Instant) {
    let [header, body, footer] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_header(frame, header, state, now);
    if state.page.is_open {
        timers::draw(frame, body, state);
    } else if let Some((name, history)) = state.opened() {
        details::draw(frame, body, state, name, history);
    } else {
        table::draw(frame, body, state);
    }
    draw_footer(frame, footer, state);
    if state.help {
        draw_help(frame, state);
    }
}

fn draw_header(frame: &mut Frame<'_>, area: Rect, state: &State, now: Instant) {
    let trouble = state.trouble(now);
    let age = format_duration(Duration::from_secs(state.age(now).as_secs()));
    let looked = match trouble {
        Some(_) => format!("no answer for {age}").red().bold(),
        None => format!("updated {age} ago").into(),
    };
    let mut right = vec![
        format!("  every {}, ", format_duration(state.interval)).into(),
        looked,
    ];
    if state.paused {
        right.push("  PAUSED".yellow().bold());
    }
    let right = Line::from(right);
    let width = u16::try_from(right.width()).unwrap_or(u16::MAX);
    let [first, second] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(1)]).areas(area);
    // The daemon's health is more important than its address.
    let [left_area, right_area] =
        Layout::horizontal([Constraint::Fill(1), Constraint::Length(width)]).areas(first);
    let title = "rto-agent top  ";
    let room = usize::from(left_area.width).saturating_sub(title.len());
    let left = Line::from(vec![title.bold(), shortened(&state.socket, room).into()]);
    frame.render_widget(left, left_area);
    frame.render_widget(right, right_area);
    let said = match trouble {
        Some(trouble) => trouble.to_owned().red().bold(),
        None if !state.on => "no statistics: statistics = false in [agent]".yellow(),
        None if state.page.is_open => {
            "learnt and guarded timers, arms and experiments; the selected policy is shown below"
                .dim()
        }
        None => meaning(state).dim(),
    };
    frame.render_widget(Line::from(said), second);
}

/// Since when the counts are, and the sort order.
fn meaning(state: &State) -> String {
    let began = match state.scope {
        Scope::Policy => "the policy",
        Scope::Top => "top",
    };
    let order = if state.ascending() {
        "ascending"
    } else {
        "descending"
    };
    let sort = state.sort.title();
    format!("/S: since the last update; others: since {began} started; sorted by {sort}, {order}")
}

fn draw_footer(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let line = if state.typing {
        Line::from(vec![
            "/".bold(),
            state.filter.as_str().into(),
            "█".into(),
            "  Enter keep  Esc drop".dim(),
        ])
    } else if state.page.is_open || state.opened().is_some() {
        Line::from("Esc back  up/down policy  t since  p pause  ? help  q quit").dim()
    } else {
        let keys = "q quit  Enter open  u timers  s, r sort  / filter  t since  p pause  ? help";
        let filter = match state.filter.as_str() {
            "" => String::new(),
            filter => format!("/{filter}  "),
        };
        Line::from(vec![filter.yellow(), keys.dim()])
    };
    frame.render_widget(line, area);
}

fn draw_help(frame: &mut Frame<'_>, state: &State) {
    const HELP: &str = "\
up, down, k, j   select a policy
Enter            histograms and control arm (not in the table); Esc goes back
u                learnt and guarded timers, arms and experiments
s, r             sort by the next column, reverse
/                only policies whose name contains this; Esc clears it
t                count since the policy was added or since top started
p                pause the display
q, Esc, Ctrl-C   quit

CONN/S   connections established per second
RETR%    SYNs and SYN-ACKs retransmitted, per connection
SPUR%    of these, spurious: the answer was already on its way
HS       duration of handshakes
RTT      smoothed round-trip time
ABRT/S   connections aborted per second
CONNS    connections established
HISTORY  CONN/S in the last intervals";
    let help = if state.page.is_open {
        timers::HELP
    } else {
        HELP
    };
    let text = Text::from(help);
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
    use ratatui::{Terminal, backend::TestBackend, style::Color};

    use super::{
        super::{
            history::Column,
            samples::{busy, press, state, tuned, with_control},
            state::Answers,
        },
        *,
    };

    /// The screen at this time after the last answer, however slow the machine is.
    fn screen(state: &State, width: u16, height: u16, age: Duration) -> Terminal<TestBackend> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let now = state.looked() + age;
        terminal.draw(|frame| draw(frame, state, now)).unwrap();
        terminal
    }

    fn text(state: &State) -> String {
        screen(state, 80, 24, Duration::ZERO).backend().to_string()
    }

    #[test]
    fn the_table() {
        insta::assert_snapshot!(text(&busy()));
    }

    #[test]
    fn the_help() {
        let mut state = busy();
        press(&mut state, "?");
        insta::assert_snapshot!(text(&state));
    }

    #[test]
    fn a_filter_being_typed() {
        let mut state = busy();
        press(&mut state, "rp/ne");
        insta::assert_snapshot!(text(&state));
    }

    #[test]
    fn an_open_policy() {
        let mut state = busy();
        press(&mut state, "j\n");
        insta::assert_snapshot!(text(&state));
    }

    #[test]
    fn an_open_policy_with_a_control_arm() {
        let mut state = with_control(50);
        press(&mut state, "\n");
        insta::assert_snapshot!(text(&state));
        let mut idle = with_control(0);
        press(&mut idle, "\n");
        assert!(text(&idle).contains("control (5%): none"));
    }

    #[test]
    fn the_timers_of_a_policy_and_its_experiment() {
        let mut state = tuned();
        press(&mut state, "uj");
        insta::assert_snapshot!(text(&state));
    }

    #[test]
    fn a_wide_terminal_has_all_columns_of_timers() {
        let mut state = tuned();
        press(&mut state, "ujj");
        let terminal = screen(&state, 110, 24, Duration::ZERO);
        insta::assert_snapshot!(terminal.backend().to_string());
        let buffer = terminal.backend().buffer();
        let is_red = |y| (0..110).any(|x| buffer[(x, y)].fg == Color::Red);
        let lines = terminal.backend().to_string();
        for (y, line) in (0..).zip(lines.lines()) {
            let is_bad = ["guarded harm", "frozen", "harm proven", "  harm  "]
                .iter()
                .any(|bad| line.contains(bad));
            assert_eq!(is_red(y), is_bad, "{line}");
        }
    }

    #[test]
    fn the_help_of_the_timers() {
        let mut state = tuned();
        press(&mut state, "u?");
        insta::assert_snapshot!(text(&state));
    }

    #[test]
    fn without_timers_a_sentence() {
        let mut state = state(&[("a", 1)]);
        press(&mut state, "u");
        assert!(text(&state).contains("waiting for the daemon"));
        state.update_page(Answers::default());
        assert!(text(&state).contains("no policy has a learnt or guarded timer"));
        let mut state = tuned();
        press(&mut state, "/none\nu");
        assert!(text(&state).contains("no policy's name contains \"none\""));
    }

    #[test]
    fn a_daemon_that_is_gone() {
        let mut state = busy();
        state.failed("no rto-agent daemon answers at /run/x: refused".to_owned());
        let terminal = screen(&state, 80, 24, Duration::from_secs(75));
        let text = terminal.backend().to_string();
        let top: Vec<_> = text.lines().take(4).collect();
        insta::assert_snapshot!(top.join("\n"));
        let buffer = terminal.backend().buffer();
        assert_eq!(buffer[(0, 1)].fg, Color::Red);
        assert_eq!(buffer[(79, 0)].fg, Color::Red);
    }

    #[test]
    fn nothing_to_show() {
        let empty = state(&[]);
        assert!(text(&empty).contains("no policy is active"));
        let mut filtered = state(&[("a", 1)]);
        press(&mut filtered, "/b\n");
        assert!(text(&filtered).contains("no policy's name contains \"b\""));
        let mut off = state(&[("a", 1)]);
        off.on = false;
        let terminal = screen(&off, 80, 24, Duration::ZERO);
        assert!(
            terminal
                .backend()
                .to_string()
                .contains("statistics = false")
        );
    }

    #[test]
    fn too_many_spurious_retransmissions_are_red() {
        let state = busy();
        let terminal = screen(&state, 80, 24, Duration::ZERO);
        let buffer = terminal.backend().buffer();
        let red: Vec<_> = (0..24)
            .filter(|y| (0..80).any(|x| buffer[(x, *y)].fg == Color::Red))
            .collect();
        let rows = state.rows();
        let expected: Vec<_> = (3..)
            .zip(&rows)
            .filter(|(_, row)| row.value(Column::Spurious).is_some_and(|v| v > 0.01))
            .map(|(y, _)| y)
            .collect();
        assert_eq!((red.len(), red), (1, expected));
    }

    #[test]
    fn no_size_is_too_small() {
        // Every small width, and some larger ones.
        let widths = || (1..=30).chain((31..=100).step_by(9));
        let heights = || (1..=15).chain((16..=40).step_by(6));
        for keys in ["", "?", "p/x", "j\n", "jjj\n", "u", "uj", "ujj?"] {
            let mut state = busy();
            press(&mut state, keys);
            let mut control = with_control(50);
            press(&mut control, keys);
            let mut tuned = tuned();
            press(&mut tuned, keys);
            for (width, height) in widths().flat_map(|w| heights().map(move |h| (w, h))) {
                screen(&state, width, height, Duration::ZERO);
                if width % 10 == 0 {
                    screen(&control, width, height, Duration::ZERO);
                    screen(&tuned, width, height, Duration::ZERO);
                }
            }
        }
    }
}
