//! Completion in a shell: its script calls the binary, which knows the command line and asks the daemon for policies
//! and CIDRs.

use std::{
    env,
    ffi::{OsStr, OsString},
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{Arg, Command, CommandFactory as _};
use clap_complete::{
    ArgValueCompleter, CompletionCandidate, Shell,
    env::{Elvish, Fish, Powershell, Shells, Zsh},
};
use rto_agent_core::{
    config::{DEFAULT_SOCKET, SAVED_FILE},
    policy::{PolicyName, SETTINGS},
    wire::types::{ListAnswer, SourceView},
};
use rto_agent_daemon::build_info;

use self::bash::Bash;
use crate::{cli::Cli, client::Client};

mod bash;

/// The environment variable that a completion script sets when it calls the binary.
const VARIABLE: &str = "RTO_AGENT_COMPLETE";
const PROGRAM: &str = "rto-agent";
/// Short, because the user waits for the completions after pressing the key.
const PATIENCE: Duration = Duration::from_secs(1);
/// A longer list does not help the user.
const MOST: usize = 500;

const SHELLS: Shells<'static> = Shells(&[&Bash, &Elvish, &Fish, &Powershell, &Zsh]);

/// Answers a shell's completion script, if one called this process.
pub fn answer() -> Option<ExitCode> {
    let shell = env::var(VARIABLE).ok()?;
    let words = env::args_os().skip_while(|word| word != "--").skip(1);
    let words: Vec<OsString> = words.collect();
    let completer = SHELLS.completer(&shell)?;
    let mut text = Vec::new();
    let written = completer.write_complete(
        &mut command(&words),
        words,
        env::current_dir().ok().as_deref(),
        &mut text,
    );
    // An error message would appear in the middle of the line that the user is typing.
    let written = written.and_then(|()| io::stdout().lock().write_all(&text));
    Some(ExitCode::from(u8::from(written.is_err())))
}

/// The script that a shell sources so that it completes by [`answer`].
pub fn script(shell: Shell) -> io::Result<Vec<u8>> {
    let completer = SHELLS.completer(&shell.to_string());
    let completer = completer.ok_or(io::ErrorKind::Unsupported)?;
    let mut script = Vec::new();
    completer.write_registration(VARIABLE, PROGRAM, PROGRAM, PROGRAM, &mut script)?;
    Ok(script)
}

/// The command line without hidden arguments, and with values that clap does not know.
fn command(words: &[OsString]) -> Command {
    let daemon = Daemon::of(words);
    let cli = Cli::command();
    let verbs = cli.get_subcommands().filter(|verb| !verb.is_hide_set());
    let verbs: Vec<Command> = verbs
        .map(|verb| {
            let name = verb.get_name().to_owned();
            let verb = verb.clone();
            let verb =
                verb.mut_subcommands(|verb| verb.mut_args(|arg| values(&name, arg, &daemon)));
            verb.mut_args(|arg| values(&name, arg, &daemon))
        })
        .collect();
    Command::new(PROGRAM)
        .version(build_info::VERSION)
        .args(cli.get_arguments().cloned())
        .subcommands(verbs)
}

/// Adds the possible values to an argument.
fn values(verb: &str, arg: Arg, daemon: &Daemon) -> Arg {
    let id = arg.get_id().as_str();
    if let Some(setting) = SETTINGS.iter().find(|setting| setting.key.name == id) {
        let words: Vec<_> = setting.words().map(str::to_owned).collect();
        return match words.is_empty() {
            true => arg,
            false => arg.add(Values::Known(words).completer()),
        };
    }
    let daemon = daemon.clone();
    match (verb, id) {
        ("man", "verb") => {
            let cli = Cli::command();
            let verbs = cli.get_subcommands().filter(|verb| !verb.is_hide_set());
            let verbs = verbs.map(|verb| verb.get_name().to_owned()).collect();
            arg.add(Values::Known(verbs).completer())
        }
        ("add", "policy") => arg.add(Values::Policies(daemon, false).completer()),
        (_, "policy" | "policy-option") => arg.add(Values::Policies(daemon, true).completer()),
        ("remove", "cidrs") => arg.add(Values::Cidrs(daemon).completer()),
        ("watch", "cidr") | ("list", "cidr") | ("advise", "target") => {
            let daemon = Daemon {
                wants: Wanted::All,
                ..daemon
            };
            arg.add(Values::Cidrs(daemon).completer())
        }
        _ => arg,
    }
}

/// Which CIDRs complete an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// Active entries.
    All,
    /// Entries of `50-cli.toml`.
    Saved,
    /// Entries of the files that are masked.
    Masked,
}

/// The daemon that the command line names.
#[derive(Clone, Debug)]
struct Daemon {
    socket: PathBuf,
    wants: Wanted,
}

impl Daemon {
    fn of(words: &[OsString]) -> Self {
        let socket = env::var_os("RTO_AGENT_SOCKET").filter(|socket| !socket.is_empty());
        let mut socket = socket.unwrap_or_else(|| DEFAULT_SOCKET.into());
        for (i, word) in words.iter().enumerate() {
            if word == "--socket"
                && let Some(value) = words.get(i + 1)
            {
                socket.clone_from(value);
            } else if let Some(value) = word.to_str().and_then(|w| w.strip_prefix("--socket=")) {
                socket = value.into();
            }
        }
        let has = |option: &str| words.iter().any(|word| word == option);
        let wants = match (has("--undo"), has("--save")) {
            (true, _) => Wanted::Masked,
            (_, true) => Wanted::Saved,
            _ => Wanted::All,
        };
        Self {
            socket: socket.into(),
            wants,
        }
    }

    /// `None` if no daemon answers.
    fn list(&self) -> Option<ListAnswer> {
        let client = Client::new(&self.socket).within(PATIENCE);
        client.get("/v1/entries").ok()
    }
}

/// The source of an argument's values.
enum Values {
    Known(Vec<String>),
    /// The flag says whether "unmatched" is a value too.
    Policies(Daemon, bool),
    Cidrs(Daemon),
}

impl Values {
    fn completer(self) -> ArgValueCompleter {
        ArgValueCompleter::new(move |current: &OsStr| {
            let current = current.to_str().unwrap_or_default();
            let all = self.all().into_iter();
            let matching = all.filter(|(value, _)| value.starts_with(current));
            let candidates = matching.take(MOST);
            candidates
                .map(|(value, help)| CompletionCandidate::new(value).help(help.map(Into::into)))
                .collect()
        })
    }

    /// Values with their descriptions, for shells that can show them.
    fn all(&self) -> Vec<(String, Option<String>)> {
        match self {
            Self::Known(values) => values.iter().map(|value| (value.clone(), None)).collect(),
            Self::Policies(daemon, with_unmatched) => {
                let policies = daemon.list().unwrap_or_default().policies;
                let unmatched = with_unmatched.then(PolicyName::unmatched);
                let names = policies.into_keys().chain(unmatched);
                names.map(|name| (name.to_string(), None)).collect()
            }
            Self::Cidrs(daemon) => {
                let list = daemon.list().unwrap_or_default();
                if daemon.wants == Wanted::Masked {
                    let masked = list.masked.iter();
                    return masked.map(|cidr| (cidr.to_string(), None)).collect();
                }
                let is_saved = |source: &SourceView| matches!(source, SourceView::File { path, .. } if path.ends_with(SAVED_FILE));
                let entries = list.entries.into_iter();
                let entries = entries.filter(|entry| {
                    daemon.wants == Wanted::All
                        || is_saved(&entry.source)
                        || entry.overrides.as_ref().is_some_and(is_saved)
                });
                entries
                    .map(|entry| (entry.cidr.to_string(), Some(entry.policy.to_string())))
                    .collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(line: &str) -> Vec<String> {
        let words: Vec<OsString> = line.split(' ').map(Into::into).collect();
        let last = words.len() - 1;
        let mut command = command(&words);
        let candidates = clap_complete::engine::complete(&mut command, words, last, None).unwrap();
        let values = candidates.iter().map(CompletionCandidate::get_value);
        values
            .map(|value| value.to_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn completion_omits_hidden_verbs() {
        for (line, all) in [
            ("rto-agent lo", &["lookup"][..]),
            ("rto-agent __", &[]),
            ("rto-agent predi", &[]),
            ("rto-agent remove --un", &["--undo"]),
            ("rto-agent run --log-format=j", &["--log-format=json"]),
            ("rto-agent add --syn-ack-rto ", &["auto", "keep"]),
            ("rto-agent add --mptcp a", &["apply"]),
            ("rto-agent add --thin-linear t", &["true"]),
            ("rto-agent completions z", &["zsh"]),
            ("rto-agent man sta", &["stats", "status"]),
            ("rto-agent --soc", &["--socket"]),
            ("rto-agent --socket=/nowhere stats -p u", &["unmatched"]),
            ("rto-agent remove --socket /nowhere 1", &[]),
        ] {
            let mut found = completed(line);
            found.sort_unstable();
            assert_eq!(found, all, "{line}");
        }
    }

    #[test]
    fn completion_asks_socket_of_command_line() {
        for (line, socket) in [
            ("rto-agent --socket /a remove", "/a"),
            ("rto-agent remove --socket=/b", "/b"),
        ] {
            let words: Vec<OsString> = line.split(' ').map(Into::into).collect();
            assert_eq!(Daemon::of(&words).socket, PathBuf::from(socket));
        }
    }

    #[test]
    fn completion_script_exists_for_each_shell() {
        for shell in clap::ValueEnum::value_variants() {
            let script = String::from_utf8(script(*shell).unwrap()).unwrap();
            assert!(script.contains(VARIABLE), "{script}");
            assert!(!script.contains("probe"), "{script}");
        }
    }
}
