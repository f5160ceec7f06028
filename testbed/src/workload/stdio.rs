//! The child's side of a [`crate::channel::ControlChannel`].

use std::{
    io::{self, BufRead as _, Write as _},
    os::fd::AsFd as _,
    process, thread,
};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use serde::{Serialize, de::DeserializeOwned};

/// Replies with a value.
pub fn reply(value: &impl Serialize) -> anyhow::Result<()> {
    write(&Ok::<_, String>(value))
}

/// Replies with an error.
pub(super) fn fail(error: &anyhow::Error) -> anyhow::Result<()> {
    write(&Err::<(), _>(format!("{error:#}")))
}

fn write(reply: &impl Serialize) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, reply)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

/// Executes commands and replies to each, until stdin is closed.
pub fn commands<C: DeserializeOwned, T: Serialize>(
    mut run: impl FnMut(C) -> anyhow::Result<T>,
) -> anyhow::Result<()> {
    for line in io::stdin().lock().lines() {
        let line = line?;
        let command = serde_json::from_str(&line).with_context(|| line.clone());
        match command.and_then(&mut run) {
            Ok(value) => reply(&value)?,
            Err(error) => fail(&error)?,
        }
    }
    Ok(())
}

/// Ends this process when the parent closes stdin, which the kernel does for a parent that is killed. This works for
/// roles that never read stdin, too.
pub(super) fn end_with_parent() {
    thread::spawn(|| {
        let stdin = io::stdin();
        // poll(2) reports POLLHUP without being asked; commands are left to the thread that reads them.
        let mut pipe = [PollFd::new(stdin.as_fd(), PollFlags::empty())];
        while poll(&mut pipe, PollTimeout::NONE) == Err(Errno::EINTR) {}
        process::exit(0)
    });
}

/// Waits until the parent closes stdin or kills this process.
pub fn until_closed() {
    io::stdin().lock().lines().for_each(drop);
}
