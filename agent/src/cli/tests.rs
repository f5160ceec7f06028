//! The command line as it is written and helped with.

use std::{ffi::OsString, iter};

use clap::{CommandFactory as _, error::ErrorKind};

use super::*;

fn parsed(line: &str) -> Result<Cli, clap::Error> {
    let args = iter::once("rto-agent").chain(line.split(' '));
    Cli::try_parse_args(args.map(OsString::from))
}

#[test]
fn cli_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn options_before_verb_equal_options_after_it() {
    for line in [
        "--socket /s --json status",
        "--json --socket=/s status",
        "--json status --socket /s",
        "status --socket /s --json",
    ] {
        let Verb::Status(status) = parsed(line).unwrap().verb else {
            panic!("{line}");
        };
        assert_eq!(status.daemon.socket, PathBuf::from("/s"), "{line}");
        assert!(status.daemon.json, "{line}");
    }
    let Verb::Add(add) = parsed("--socket /s add 10.0.0.0/8 --policy p")
        .unwrap()
        .verb
    else {
        panic!();
    };
    assert_eq!(add.cidrs, ["10.0.0.0/8"]);
    assert!(!add.daemon.json);
}

/// As after the verb, for each verb there is.
#[test]
fn verb_refuses_option_of_other_verb() {
    let command = Cli::command();
    let mut refusing = Vec::new();
    for verb in command.get_subcommands() {
        for (option, id) in [("--json", "json"), ("--socket=/s", "socket")] {
            let has = verb.get_arguments().any(|arg| arg.get_id() == id);
            let name = verb.get_name();
            let is_refused = |line: &str| {
                let refused = parsed(line).is_err_and(|e| e.kind() == ErrorKind::UnknownArgument);
                assert_eq!(refused, !has, "{line}");
            };
            is_refused(&format!("{option} {name}"));
            is_refused(&format!("{name} {option}"));
            if !has {
                refusing.push(format!("{option} {name}"));
            }
        }
    }
    for line in [
        "--json run",
        "--json top",
        "--json man",
        "--socket=/s check",
    ] {
        assert!(refusing.contains(&line.to_owned()), "{refusing:?}");
    }
}

/// Tables in full where a verb prints any, and colours where it prints states.
#[test]
fn wide_and_color_options_are_on_these_verbs() {
    let command = Cli::command();
    let having = |id: &str| -> Vec<&str> {
        let verbs = command.get_subcommands();
        let verbs = verbs.filter(|verb| verb.get_arguments().any(|arg| arg.get_id() == id));
        verbs.map(clap::Command::get_name).collect()
    };
    assert_eq!(
        having("wide"),
        [
            "list", "stats", "watch", "advise", "discover", "apply", "detach"
        ]
    );
    assert_eq!(
        having("color"),
        ["check", "top", "status", "verify", "apply", "doctor"]
    );
}

#[test]
fn moved_arguments_keep_their_conflicts() {
    for line in ["--json status --json", "--socket /s status --socket /t"] {
        let error = parsed(line).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ArgumentConflict, "{line}");
    }
    for line in ["--socket", "--socket /s", "--json"] {
        assert_eq!(parsed(line).unwrap_err().exit_code(), 2, "{line}");
    }
    let version = parsed("--json --version").unwrap_err();
    assert_eq!(version.kind(), ErrorKind::DisplayVersion);
}

#[test]
fn advice_takes_one_source() {
    for line in [
        "advise 10.0.0.0/8 --prometheus http://a",
        "advise 10.0.0.0/8 --policy near",
    ] {
        let error = parsed(line).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ArgumentConflict, "{line}");
    }
    let error = parsed("advise").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MissingRequiredArgument);
}

#[test]
fn invalid_duration_is_usage_error() {
    for line in [
        "add 10.0.0.0/8 --initial-rto 100",
        "add 10.0.0.0/8 --rto-min 5sm",
        "add 10.0.0.0/8 --initial-rto auto,min=5",
        "add 10.0.0.0/8 --guard maybe",
        "add 10.0.0.0/8 --initial-rto 100ms --syn-ack-rto fast",
        "add 10.0.0.0/8 --delack-max x",
        "add 10.0.0.0/8 --rto-max 1",
        "add 10.0.0.0/8 --user-timeout 1h1",
        "add 10.0.0.0/8 --policy p --ttl 0s",
        "add 10.0.0.0/8 --policy p --ttl 10",
        "stats --watch --interval 1us",
        "top --interval 2",
        "advise 10.0.0.1 --peer-delack 1s",
    ] {
        let error = parsed(line).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ValueValidation, "{line}");
        assert_eq!(error.exit_code(), 2, "{line}");
    }
}

/// The help of a verb, short or long.
fn help(verb: &str, long: bool) -> String {
    let mut command = Cli::command().term_width(100);
    command.build();
    let verb = command.find_subcommand_mut(verb).unwrap();
    let help = if long {
        verb.render_long_help()
    } else {
        verb.render_help()
    };
    help.to_string()
}

#[test]
fn add_help_groups_options() {
    insta::assert_snapshot!("add_short", help("add", false));
    insta::assert_snapshot!("add_long", help("add", true));
}

/// Only the long help has them, and each can be typed as printed.
#[test]
fn every_verb_has_examples() {
    let command = Cli::command();
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        let name = verb.get_name();
        assert!(!help(name, false).contains("Examples:"), "{name}");
        let long = help(name, true);
        let (_, examples) = long.split_once("Examples:").expect(name);
        let examples: Vec<&str> = examples.lines().map(str::trim).collect();
        let lines = examples
            .iter()
            .filter_map(|line| line.strip_prefix("rto-agent "));
        let mut count = 0;
        for line in lines {
            let line = line.split(['#', '|', '>']).next().unwrap().trim();
            let parsed = parsed(line).unwrap_or_else(|e| panic!("{line}: {e}"));
            let arg = line.split(' ').next().unwrap();
            assert_eq!(arg, name, "{line}: {parsed:?}");
            count += 1;
        }
        assert!(count > 0, "{long}");
    }
}

#[test]
fn boolean_setting_needs_no_value() {
    for line in [
        "add 10.0.0.0/8 --thin-linear",
        "add 10.0.0.0/8 --thin-linear true",
        "add --thin-linear --linear-retries 2 10.0.0.0/8",
    ] {
        let Verb::Add(add) = parsed(line).unwrap().verb else {
            panic!("{line}");
        };
        assert_eq!(add.settings.unwrap().0.thin_linear, Some(true), "{line}");
    }
}

#[test]
fn auto_initial_rto_takes_bounds_in_one_word() {
    let line = "add 10.0.0.0/8 --initial-rto auto,min=50ms --guard on --mode advise";
    let Verb::Add(add) = parsed(line).unwrap().verb else {
        panic!("{line}");
    };
    let settings = add.settings.unwrap().0;
    let auto = settings.auto_initial_rto().unwrap();
    assert_eq!(auto.least(), Duration::from_millis(50));
    assert_eq!(settings.guard, Some(rto_agent_core::policy::Guard::On));
    assert_eq!(settings.mode, rto_agent_core::policy::Mode::Advise);
}

#[test]
fn missing_unit_is_suggested() {
    for (line, message) in [
        ("add 10.0.0.0/8 --policy p --ttl 10", "perhaps 10m"),
        ("add 10.0.0.0/8 --rto-min 10", "perhaps 10ms"),
        ("top --interval 2", "perhaps 2s"),
    ] {
        let error = parsed(line).unwrap_err().to_string();
        assert!(error.contains(message), "{line}: {error}");
    }
}

/// By a variable that cargo sets to an empty value for every test: a test must not change its process's environment.
#[test]
fn empty_variables_count_as_unset() {
    let command = parse::without_empty_variables(Cli::command().mut_subcommands(|verb| {
        verb.mut_args(|arg| match arg.get_env().is_some() {
            true => arg.env("CARGO_PKG_HOMEPAGE"),
            false => arg,
        })
    }));
    for verb in command.get_subcommands() {
        assert!(
            verb.get_arguments().all(|arg| arg.get_env().is_none()),
            "{verb}"
        );
    }
}

#[test]
fn usage_errors_begin_with_program_name() {
    for line in [
        "lokup",
        "lookup",
        "add --no",
        "stats --interval 1",
        "add 10.0.0.0/8 --rto-min auto",
    ] {
        let error = parsed(line).unwrap_err();
        let text = parse::usage_error(&error);
        assert!(text.starts_with("rto-agent: "), "{line}: {text}");
        assert!(!text.contains("error:"), "{line}: {text}");
    }
}

/// Doc comments are Markdown, help and manual pages are not.
#[test]
fn help_has_no_markdown_escapes() {
    for verb in Cli::command().get_subcommands() {
        let text = help(verb.get_name(), true);
        assert!(!text.contains("\\["), "{text}");
    }
}
