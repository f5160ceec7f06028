//! Completion in bash, which splits words differently from the command line.

use std::{
    ffi::OsString,
    io::{self, Write},
    path::Path,
};

use clap_complete::env::{Bash as Words, EnvCompleter};

/// clap_complete's script, extended for words with ':' or '=' in them, like fd00:1::/64 and
/// --policy=near. readline splits these, so the script takes the words from the line, and removes
/// from the answers the part that readline has already.
const SCRIPT: &str = r#"_rto_agent() {
    local line=${COMP_LINE:0:COMP_POINT}
    local -a words
    IFS=$' \t' read -ra words <<<"$line"
    [[ $line == *[[:blank:]] ]] && words+=("")
    local last=$((${#words[@]} - 1))
    local typed=${words[last]}
    local IFS=$'\013'
    COMPREPLY=($(_CLAP_IFS="$IFS" _CLAP_COMPLETE_INDEX="$last" VARIABLE=bash \
        COMPLETER -- "${words[@]}" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"${typed%"$2"}"}")
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]]; then
        compopt -o nospace
    fi
}
complete -o bashdefault -F _rto_agent BIN
"#;

#[derive(Clone, Copy, Debug)]
pub(super) struct Bash;

impl EnvCompleter for Bash {
    fn name(&self) -> &'static str {
        "bash"
    }

    fn is(&self, name: &str) -> bool {
        name == self.name()
    }

    fn write_registration(
        &self,
        variable: &str,
        _: &str,
        bin: &str,
        completer: &str,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let script = SCRIPT.replace("VARIABLE", variable);
        let script = script.replace("COMPLETER", completer).replace("BIN", bin);
        out.write_all(script.as_bytes())
    }

    fn write_complete(
        &self,
        command: &mut clap::Command,
        words: Vec<OsString>,
        current_dir: Option<&Path>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        Words.write_complete(command, words, current_dir, out)
    }
}
