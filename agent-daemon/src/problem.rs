//! A lasting problem: reported once, and again when it changes.

/// The current problem, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Problem(Option<String>);

impl Problem {
    /// Sets the current problem; calls `say` if it differs from the previous one.
    pub(crate) fn becomes(&mut self, now: Option<String>, say: impl FnOnce(&str)) {
        if let Some(text) = &now
            && self.0.as_ref() != Some(text)
        {
            say(text);
        }
        self.0 = now;
    }

    pub(crate) fn text(&self) -> Option<&String> {
        self.0.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_problem_is_logged_once() {
        let mut problem = Problem::default();
        let mut logged = Vec::new();
        for now in [None, Some("a"), Some("a"), Some("b"), None, Some("b")] {
            problem.becomes(now.map(str::to_owned), |text| logged.push(text.to_owned()));
            assert_eq!(problem.text().map(String::as_str), now);
        }
        assert_eq!(logged, ["a", "b", "b"]);
    }
}
