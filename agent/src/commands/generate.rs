//! `rto-agent completions` and `rto-agent man`: generated from the definitions, so never out of
//! date.

use std::{
    fs,
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::{
    cli::{Cli, Completions, Man},
    completion,
};

pub(super) fn completions(args: &Completions) -> anyhow::Result<ExitCode> {
    let script = completion::script(args.shell)?;
    io::stdout().lock().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// The end of each manual page.
const SECTIONS: &str = r#".SH "EXIT STATUS"
.TP
0
Success.
.TP
1
Refused or failed; of \fBstatus\fR, \fBdoctor\fR, \fBverify\fR and \fBcheck\fR: a problem was found.
.TP
2
Wrong usage.
.TP
3
\fBlist\fR: no daemon maintains the entries.
.SH ENVIRONMENT
.TP
\fBRTO_AGENT_CONFIG\fR
The configuration file.
.TP
\fBRTO_AGENT_SOCKET\fR
The daemon's socket.
.TP
\fBRTO_AGENT_LOG\fR
What \fBrun\fR logs, as a filter: warn, info (the default), debug.
.TP
\fBNO_COLOR\fR
If set, output has no colours.
.SH FILES
.TP
\fI/etc/rto-agent/config.toml\fR, \fI/etc/rto-agent/policies.d/*.toml\fR
The configuration; \fBadd --save\fR writes \fI50-cli.toml\fR.
.TP
\fI/run/rto-agent/control.sock\fR
The daemon's socket.
.TP
\fI/var/lib/rto-agent\fR
State that survives a reboot: the last good configuration, learnt values.
.TP
\fI/sys/fs/bpf/rto-agent\fR
The pinned program and maps.
.SH "SEE ALSO"
.BR rto-agent (1),
.BR rto-agent-config (5),
.BR tcp (7),
.BR ss (8)
"#;

pub(super) fn man(args: &Man) -> anyhow::Result<ExitCode> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    if let Some(dir) = &args.dir {
        let verbs = command.get_subcommands();
        let verbs = verbs.filter(|verb| !verb.is_hide_set());
        for command in verbs.chain([&command]) {
            let man = clap_mangen::Man::new(command.clone());
            let path = dir.join(man.get_filename());
            fs::write(&path, page(&man)?).with_context(|| path.display().to_string())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let command = match &args.verb {
        None => command,
        Some(verb) => command
            .find_subcommand(verb)
            .cloned()
            .ok_or_else(|| anyhow::anyhow!("unknown verb {verb:?}; see rto-agent help"))?,
    };
    let page = page(&clap_mangen::Man::new(command))?;
    io::stdout().lock().write_all(&page)?;
    Ok(ExitCode::SUCCESS)
}

fn page(man: &clap_mangen::Man) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    man.render(&mut page)?;
    page.extend_from_slice(SECTIONS.as_bytes());
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_visible_verb_has_man_page() {
        let dir = tempfile::tempdir().unwrap();
        let args = Man {
            verb: None,
            dir: Some(dir.path().to_owned()),
        };
        man(&args).unwrap();
        for verb in Cli::command().get_subcommands() {
            let page = dir.path().join(format!("rto-agent-{}.1", verb.get_name()));
            assert_eq!(page.exists(), !verb.is_hide_set(), "{}", page.display());
        }
        for name in ["rto-agent.1", "rto-agent-status.1"] {
            let page = fs::read_to_string(dir.path().join(name)).unwrap();
            let (title, _) = name.split_once('.').unwrap();
            assert!(page.contains(&format!(".TH {title} 1")), "{page}");
            for section in ["\"EXIT STATUS\"", "ENVIRONMENT", "FILES", "\"SEE ALSO\""] {
                assert!(page.contains(&format!(".SH {section}\n")), "{section}");
            }
        }
    }
}
