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
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            for config in spellings {
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

test!(detachment_that_is_not_kept_says_so_and_nothing_else);
fn detachment_that_is_not_kept_says_so_and_nothing_else() -> anyhow::Result<()> {
    let mut env = TestEnv::with(&near("\"10.88.0.0/24\""))?;
    fs::remove_dir_all(env.persistent_dir())?;
    fs::write(env.persistent_dir(), "")?;
    let said = env.cli(&["detach"])?;
    ensure!(
        said.contains("until rto-agent attach or the next reboot: ")
            && !said.contains("also after"),
        "{said}"
    );
    env.restart(Signal::SIGKILL)?;
    assert_attached(&env, false)?;
    env.end(Signal::SIGTERM)?;
    let said = env.cli(&["detach"])?;
    ensure!(said.contains("or the next reboot: "), "{said}");
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
