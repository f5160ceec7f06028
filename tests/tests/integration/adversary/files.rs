//! Files that an attacker replaces, or plants beside the configuration.

use std::{
    ffi::OsStr,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{chown, symlink},
        net::UnixListener,
    },
};

use nix::{
    sys::{signal::kill, stat::Mode},
    unistd::mkfifo,
};

use super::Victim;
use crate::prelude::*;

/// Plants something in the directory of the configuration.
type Plant<'a> = &'a dyn Fn() -> anyhow::Result<()>;

fn fifo(path: &Path) -> anyhow::Result<()> {
    Ok(mkfifo(path, Mode::from_bits_truncate(0o600))?)
}

test!(non_file_configuration_is_refused);
/// Opening a FIFO would wait for a writer, and reading a device would not end.
fn non_file_configuration_is_refused() -> anyhow::Result<()> {
    let mut victim = Victim::new()?;
    let planted = victim.env.policies_dir().join("planted.toml");
    let config = victim.env.config();
    let good = fs::read(&config)?;
    for path in [&planted, &config] {
        let _gone = fs::remove_file(path);
        fifo(path)?;
        victim.refuses_its_files("this is a FIFO (named pipe)")?;
        fs::remove_file(path)?;
        symlink("/dev/zero", path)?;
        victim.refuses_its_files("this is a character device")?;
        fs::remove_file(path)?;
        let listener = UnixListener::bind(path)?;
        victim.refuses_its_files("this is a socket")?;
        drop(listener);
        fs::remove_file(path)?;
        fs::create_dir(path)?;
        victim.refuses_its_files("this is a directory")?;
        fs::remove_dir(path)?;
        if *path == config {
            fs::write(path, &good)?;
        }
        victim.env.cli(&["reload"])?;
        victim.is_well(1)?;
    }
    // Nor does a FIFO keep the daemon from stopping, or a start from failing.
    fs::remove_file(&config)?;
    fifo(&config)?;
    victim.env.signal(Signal::SIGHUP)?;
    let refused = |status: &Value| status["last_reload"]["ok"] == false;
    victim.env.wait_status("a refusal", refused)?;
    ensure!(victim.env.end(Signal::SIGTERM)?.code() == Some(0));
    let error = victim.env.start_fails()?;
    ensure!(error.contains("config.toml: this is a FIFO"), "{error}");
    Ok(())
}

test!(planted_files_change_nothing);
fn planted_files_change_nothing() -> anyhow::Result<()> {
    let victim = Victim::new()?;
    let dir = victim.env.policies_dir();
    // Ignored, however many there are.
    for i in 0..500 {
        fs::write(dir.join(format!(".hidden{i}.toml")), "nonsense")?;
        fs::write(dir.join(format!("backup{i}.toml~")), "nonsense")?;
    }
    fifo(&dir.join("pipe"))?;
    victim.env.cli(&["reload"])?;
    victim.is_well(1)?;
    let planted = dir.join("planted.toml");
    let sparse =
        || -> anyhow::Result<()> { Ok(fs::File::create(&planted)?.set_len((64 << 20) + 1)?) };
    let unreadable = || -> anyhow::Result<()> {
        fs::write(&planted, "")?;
        chown(&planted, Some(NOBODY), Some(NOBODY))?;
        Ok(fs::set_permissions(
            &planted,
            fs::Permissions::from_mode(0o600),
        )?)
    };
    let plants: [(&str, Plant<'_>, &str); 5] = [
        (
            "a dangling link",
            &|| Ok(symlink("nowhere", &planted)?),
            "No such file or directory",
        ),
        (
            "a link to itself",
            &|| Ok(symlink("planted.toml", &planted)?),
            "Too many levels of symbolic links",
        ),
        (
            "a large file",
            &sparse,
            "more than the limit of a configuration file",
        ),
        (
            "not text",
            &|| Ok(fs::write(&planted, b"\xff\xfe")?),
            "configuration files are UTF-8 text",
        ),
        ("another's", &unreadable, "the file must belong to root"),
    ];
    for (what, plant, why) in plants {
        plant()?;
        let error = victim.env.cli_fails(&["reload"]).context(what)?;
        ensure!(error.contains(why), "{what}: {error}");
        ensure!(error.contains("stays active"), "{what}: {error}");
        fs::remove_file(&planted)?;
    }
    victim.env.cli(&["reload"])?;
    victim.is_well(1)
}

test!(names_that_are_not_utf8);
/// In the names of a file and of the configuration's directory, with control sequences that a terminal would execute.
fn names_that_are_not_utf8() -> anyhow::Result<()> {
    let mut env = TestEnv::new()?;
    let etc = env.dir().join(OsStr::from_bytes(b"\xff\x1b[2J"));
    fs::create_dir_all(etc.join("policies.d"))?;
    fs::write(
        etc.join("config.toml"),
        env.config_text(&near("\"10.88.0.0/24\"")),
    )?;
    let planted = etc
        .join("policies.d")
        .join(OsStr::from_bytes(b"\xfe\x1b]0;x\x07.toml"));
    fs::write(&planted, "[policy.near]\ncidrs = [\"10.89.0.0/24\"]\n")?;
    let script = format!(
        "exec \"$0\" run --config \"$(printf '{}/\\377\\033[2J')/config.toml\"",
        env.dir().display()
    );
    env.start_under(&["bash".to_owned(), "-c".to_owned(), script])?;
    let victim = Victim::of(env)?;
    let env = &victim.env;
    victim.is_well(2)?;
    let list = env.json(&["list"])?;
    let path = list["entries"][1]["source"]["path"].as_str();
    let path = path.with_context(|| format!("{list:#}"))?;
    ensure!(
        path.ends_with("\u{fffd}\\u{1b}[2J/policies.d/\u{fffd}\\u{1b}]0;x\\u{7}.toml"),
        "{path}"
    );
    fs::write(&planted, "[policy.near]\ncidrs = [\"10.89.0.1/24\"]\n")?;
    env.cli_fails(&["reload"])?;
    for args in [
        &["list"][..],
        &["list", "--json"],
        &["lookup", "10.89.0.1"],
        &["lookup", "10.89.0.1", "--json"],
        &["status"],
        &["status", "--json"],
        &["reload"],
    ] {
        let output = env.try_cli(args)?;
        let error = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(error).context("not UTF-8")?;
        let acts = |c: char| c.is_control() && c != '\n';
        ensure!(
            !text.is_empty() && !text.contains(acts),
            "{args:?}: {text:?}"
        );
    }
    ensure!(victim.cidrs()?.len() == 2);
    fs::remove_file(&planted)?;
    env.cli(&["reload"])?;
    victim.is_well(1)
}

test!(a_storm_of_sighups);
/// Each causes a reload; changes made during the storm succeed.
fn a_storm_of_sighups() -> anyhow::Result<()> {
    const ADDED: usize = 30;
    let victim = Victim::new()?;
    let env = &victim.env;
    let (pid, dir) = (env.pid()?, env.policies_dir());
    let storm = || {
        for i in 0..500 {
            kill(pid, Signal::SIGHUP)?;
            if i % 10 == 0 {
                thread::yield_now();
                fs::write(dir.join("x.toml"), format!("# {i}\n"))?;
            }
        }
        Ok(())
    };
    rto_tests::beside(storm, || {
        for i in 0..ADDED {
            let body =
                serde_json::json!({ "cidrs": [format!("10.90.{i}.0/24")], "policy": "near" });
            let answer = env.socket_request("POST", "/v1/entries", &body.to_string())?;
            ensure!(answer["changed"]["added"] == 1, "{answer:#}");
        }
        Ok(())
    })?;
    victim.is_well(1 + ADDED)?;
    ensure!(victim.cidrs()?.len() == 1 + ADDED);
    Ok(())
}
