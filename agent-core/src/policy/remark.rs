//! Texts about settings, which name them as configuration files or as `rto-agent add` does.

use std::fmt;

use super::{SETTINGS, Setting};

/// How a text names settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// As in a configuration file: `rto_min = 5ms`.
    File,
    /// As options of `rto-agent add`: `--rto-min 5ms`.
    Options,
}

impl Terms {
    /// A setting.
    pub fn name(self, key: &'static str) -> &'static str {
        match self {
            Self::File => key,
            Self::Options => setting(key).map_or(key, |setting| setting.flag().0),
        }
    }

    /// A setting and its value.
    pub fn with(self, key: &'static str, value: impl fmt::Display) -> String {
        match (self, setting(key)) {
            (Self::Options, Some(setting)) => setting.option_with(&value.to_string()),
            _ => format!("{key} = {value}"),
        }
    }

    /// A setting and a word or a duration, which TOML quotes, to be copied.
    pub fn quoted(self, key: &'static str, value: &str) -> String {
        match self {
            Self::File => self.with(key, format_args!("\"{value}\"")),
            Self::Options => self.with(key, value),
        }
    }
}

fn setting(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.key.name == key)
}

/// A text about settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    file: String,
    options: String,
}

impl Remark {
    /// Writes a text in both terms.
    pub fn new(text: impl Fn(Terms) -> String) -> Self {
        Self {
            file: text(Terms::File),
            options: text(Terms::Options),
        }
    }

    /// The text in these terms.
    pub fn text(&self, terms: Terms) -> &str {
        match terms {
            Terms::File => &self.file,
            Terms::Options => &self.options,
        }
    }
}

impl<T: Into<String>> From<T> for Remark {
    /// A text that names no setting.
    fn from(text: T) -> Self {
        let file = text.into();
        Self {
            options: file.clone(),
            file,
        }
    }
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text(Terms::File))
    }
}
