//! A detachment lasts until `rto-agent attach`, whoever made it, and however its paths are spelt.

use crate::prelude::*;

/// Asserts that nothing is attached, or one program.
fn assert_attached(env: &TestEnv, attached: bool) -> anyhow::Result<()> {
    let programs = programs_at(env.cgroup.path(), SOCK_OPS)?;
    ensure!(programs.len() == usize::from(attached), "{programs:?}");
    let status = env.status()?;
    ensure!(
        status["attachment"]["attached"] == attached && status["healthy"] == attached,
        "{status:#}"
    );
    Ok(())
}

test!(detachment_lasts_however_configuration_is_spelt);
fn detachment_lasts_however_configuration_is_spelt() -> anyhow::Result<()> {
    let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    let link = env.dir().join("link.toml");
    std::os::unix::fs::symlink(env.config(), &link)?;
    let link = link.display().to_string();
    let spellings = ["config.toml", "./config.toml", "../etc/config.toml", &link];
    for by_daemon in [true, false] {
        let signals = [Signal::SIGTERM, Signal::SIGKILL].into_iter().cycle();
        for (config, signal) in spellings.into_iter().zip(signals) {
            let of = format!("{config}, {signal}, by daemon: {by_daemon}");
            let run = |env: &TestEnv, verb: &str| -> anyhow::Result<()> {
                let mut command = env.command(&[verb, "--config", config]);
                let output = command.current_dir(env.dir().join("etc")).output()?;
                ensure!(output.status.success(), "{of}: {output:?}");
                Ok(())
            };
            if by_daemon {
                run(&env, "detach")?;
                env.end(signal)?;
            } else {
                env.end(signal)?;
                run(&env, "detach")?;
            }
            env.start()?;
            assert_attached(&env, false).context(of.clone())?;
            env.restart(signal)?;
            assert_attached(&env, false).context(of.clone())?;
            if by_daemon {
                run(&env, "attach")?;
            } else {
                env.end(signal)?;
                run(&env, "attach")?;
                env.start()?;
            }
            assert_attached(&env, true).context(of.clone())?;
        }
    }
    Ok(())
}

test!(detachment_lasts_however_pins_are_spelt);
fn detachment_lasts_however_pins_are_spelt() -> anyhow::Result<()> {
    let policies = near("\"10.88.0.0/24\"");
    let mut env = TestEnv::with(&policies)?;
    let text = env.config_text(&policies);
    let pins = env.pin_dir().display().to_string();
    let (parent, name) = pins.rsplit_once('/').context("no parent")?;
    for spelt in [
        format!("{pins}/"),
        format!("{parent}//{name}"),
        format!("{parent}/../bpf/{name}"),
    ] {
        env.cli(&["detach"])?;
        env.end(Signal::SIGTERM)?;
        fs::write(
            env.config(),
            text.replace(&format!("{pins:?}"), &format!("{spelt:?}")),
        )?;
        env.start()?;
        assert_attached(&env, false).with_context(|| spelt.clone())?;
        env.cli(&["attach"])?;
        env.restart(Signal::SIGTERM)?;
        assert_attached(&env, true).with_context(|| spelt.clone())?;
    }
    Ok(())
}

test!(unkept_detachment_is_reported_once);
fn unkept_detachment_is_reported_once() -> anyhow::Result<()> {
    let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    fs::remove_dir_all(env.persistent_dir())?;
    fs::write(env.persistent_dir(), "")?;
    let text = env.cli(&["detach"])?;
    ensure!(
        text.contains("until rto-agent attach or the next reboot: ")
            && !text.contains("also after"),
        "{text}"
    );
    env.restart(Signal::SIGKILL)?;
    assert_attached(&env, false)?;
    env.end(Signal::SIGTERM)?;
    let text = env.cli(&["detach"])?;
    ensure!(text.contains("or the next reboot: "), "{text}");
    env.start()?;
    assert_attached(&env, false)
}

test!(attach_under_attach_false_blames_the_configuration);
fn attach_under_attach_false_blames_the_configuration() -> anyhow::Result<()> {
    let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    env.cli(&["detach"])?;
    env.load(&format!("attach = false\n{}", near("\"10.88.0.0/24\"")))?;
    env.cli_refuses(
        &["attach"],
        "attach = false in [agent] detaches this host: set it to true",
    )?;
    env.end(Signal::SIGTERM)?;
    env.cli_refuses(&["attach"], "attach = false in [agent]: set it to true")
}

test!(changed_pin_dir_leaves_no_program_unnamed);
/// A daemon is killed and its `pin_dir` changed: the former program stays attached.
fn changed_pin_dir_leaves_no_program_unnamed() -> anyhow::Result<()> {
    let policies = near("\"10.88.0.0/24\"");
    for by_daemon in [true, false] {
        let mut env = TestEnv::with(&policies)?;
        let former = env.pin_dir().display().to_string();
        let moved = format!("{former}-moved");
        env.end(Signal::SIGKILL)?;
        let text = env.config_text(&policies).replace(&former, &moved);
        fs::write(env.config(), text)?;
        env.start()?;
        ensure!(programs_at(env.cgroup.path(), SOCK_OPS)?.len() == 2);
        let expected = format!("pins in {former})");
        let status = env.wait_status("the former program", |status| {
            status["problems"].to_string().contains(&expected)
        })?;
        ensure!(status["healthy"] == false, "{status:#}");
        let doctor = env.json(&["doctor"])?.to_string();
        ensure!(doctor.contains(&expected), "{doctor}");
        if !by_daemon {
            env.end(Signal::SIGKILL)?;
        }
        env.cli_says(&["detach"], &expected)?;
        ensure!(programs_at(env.cgroup.path(), SOCK_OPS)?.is_empty());
        ensure!(!env.pin_dir().exists());
        if by_daemon {
            env.cli(&["attach"])?;
            ensure!(env.status()?["healthy"] == true, "{:#}", env.status()?);
            // Another daemon's program is named and left.
            let mut other = TestEnv::new()?;
            let cgroup = |env: &TestEnv| env.cgroup.path().display().to_string();
            let text = other
                .config_text(&policies)
                .replace(&cgroup(&other), &cgroup(&env));
            fs::write(other.config(), text)?;
            other.start()?;
            let expected = format!("pins in {})", other.pin_dir().display());
            let status = env.wait_status("the other program", |status| {
                status["warnings"].to_string().contains(&expected)
            })?;
            ensure!(status["healthy"] == true, "{status:#}");
            env.cli_says(
                &["detach"],
                "another daemon seems to manage it, and it is left",
            )?;
            ensure!(programs_at(env.cgroup.path(), SOCK_OPS)?.len() == 1);
            other.end(Signal::SIGTERM)?;
            env.end(Signal::SIGTERM)?;
        }
        let _ = fs::remove_dir_all(&moved); // A detachment has removed it.
    }
    Ok(())
}
