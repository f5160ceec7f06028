//! The effect of keys on a [`State`].

use std::ops::ControlFlow;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::{history::Scope, state::State};

impl State {
    /// Handles a key; `Break` ends `top`.
    pub(super) fn key(&mut self, key: KeyEvent) -> ControlFlow<()> {
        if key.kind == KeyEventKind::Release {
            return ControlFlow::Continue(());
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            };
        }
        if self.help {
            self.help = false;
            return ControlFlow::Continue(());
        }
        if self.typing {
            self.type_filter(key.code);
            return ControlFlow::Continue(());
        }
        if self.page.is_open && self.page_key(key.code) {
            return ControlFlow::Continue(());
        }
        match key.code {
            KeyCode::Esc if self.open => self.open = false,
            KeyCode::Esc if !self.filter.is_empty() => {
                self.filter.clear();
                self.settle();
            }
            KeyCode::Char('q') | KeyCode::Esc => return ControlFlow::Break(()),
            KeyCode::Up | KeyCode::Char('k') => self.select(self.index.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(self.index + 1),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            KeyCode::Enter => self.open = self.selected().is_some(),
            KeyCode::Char('u') => self.page.is_open = true,
            KeyCode::Char('?') => self.help = true,
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Char('t') => {
                self.scope = match self.scope {
                    Scope::Policy => Scope::Top,
                    Scope::Top => Scope::Policy,
                };
                self.settle();
            }
            // The table is hidden while a policy is open.
            _ if self.open => {}
            KeyCode::Char('s') => {
                self.sort = self.sort.next();
                self.reversed = false;
                self.settle();
            }
            KeyCode::Char('r') => {
                self.reversed = !self.reversed;
                self.settle();
            }
            KeyCode::Char('/') => {
                self.filter.clear();
                self.typing = true;
                self.settle();
            }
            _ => {}
        }
        ControlFlow::Continue(())
    }

    /// Handles a key on the page of timers. Returns false for keys that do the same everywhere.
    fn page_key(&mut self, code: KeyCode) -> bool {
        match code {
            KeyCode::Esc | KeyCode::Char('u') => self.page.is_open = false,
            KeyCode::Up | KeyCode::Char('k') => {
                self.select_on_page(self.selected_on_page().saturating_sub(1));
            }
            KeyCode::Down | KeyCode::Char('j') => self.select_on_page(self.selected_on_page() + 1),
            KeyCode::Home => self.select_on_page(0),
            KeyCode::End => self.select_on_page(usize::MAX),
            KeyCode::Char('q' | '?' | 'p' | 't') => return false,
            _ => {}
        }
        true
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                // Backspace in an empty filter ends typing.
                self.typing = self.filter.pop().is_some();
            }
            KeyCode::Char(c) => self.filter.push(c),
            _ => {}
        }
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        history::Column,
        samples::{look, names, press, selected, state},
    };

    #[test]
    fn a_filter_is_kept_or_dropped() {
        let mut state = state(&[("db-far", 0), ("db-near", 0), ("web", 0)]);
        press(&mut state, "j/q");
        assert_eq!((names(&state).len(), selected(&state)), (0, ""));
        press(&mut state, "\u{8}web");
        assert_eq!((names(&state), selected(&state)), (vec!["web"], "web"));
        press(&mut state, "\n");
        assert!(!state.typing && state.filter == "web");
        press(&mut state, "/d");
        assert_eq!(names(&state), ["db-far", "db-near"]);
        press(&mut state, "\u{1b}");
        assert!(!state.typing && state.filter.is_empty());
        assert_eq!(names(&state).len(), 3);
        press(&mut state, "/\u{8}");
        assert!(!state.typing);
    }

    #[test]
    fn selection_returns_when_the_filter_goes() {
        let mut state = state(&[("db-far", 0), ("db-near", 0), ("web", 0)]);
        press(&mut state, "j/web\n");
        assert_eq!((names(&state), selected(&state)), (vec!["web"], "web"));
        press(&mut state, "\u{1b}");
        assert_eq!((names(&state).len(), selected(&state)), (3, "db-near"));
        // The selection returns unless another policy was chosen in between.
        press(&mut state, "/web\nj\u{1b}");
        assert_eq!((names(&state).len(), selected(&state)), (3, "web"));
    }

    #[test]
    fn keys_that_end() {
        for (keys, ends) in [
            ("q", true),
            ("\u{1b}", true),
            ("\u{3}", true),
            ("/\u{3}", true),
            ("?\u{3}", true),
            ("\nq", true),
            ("\n\u{1b}", false),
            ("\n\u{1b}\u{1b}", true),
            ("?q", false),
            ("?\u{1b}", false),
            ("/q", false),
            ("/\u{1b}", false),
            ("/a\n\u{1b}", false),
            ("/a\n\u{1b}\u{1b}", true),
            ("jkxsrp", false),
        ] {
            let mut state = state(&[("a", 0)]);
            assert_eq!(press(&mut state, keys), ends, "{keys:?}");
        }
    }

    #[test]
    fn a_policy_is_open_until_escape_or_until_it_is_gone() {
        let mut state = state(&[("a", 0), ("b", 0)]);
        press(&mut state, "\n");
        assert_eq!(state.opened().map(|o| o.0.as_str()), Some("a"));
        press(&mut state, "j");
        assert_eq!(state.opened().map(|o| o.0.as_str()), Some("b"));
        press(&mut state, "s/r");
        assert_eq!((state.sort, state.typing), (Column::ConnectionRate, false));
        look(&mut state, 2000, &[("a", 0)]);
        assert!(state.opened().is_none() && selected(&state) == "a");
        press(&mut state, "\n\u{1b}");
        assert!(state.opened().is_none());
    }
}
