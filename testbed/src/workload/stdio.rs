//! The child's side of a [`crate::channel::ControlChannel`].

use std::io::{self, BufRead as _, Write as _};

use anyhow::Context as _;
use serde::{Serialize, de::DeserializeOwned};

/// Replies with a value.
///
/// # Errors
///
/// If the parent has gone.
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

/// Does what it is told and replies, until there are no more commands.
///
/// # Errors
///
/// If the parent cannot be heard or told.
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

/// Waits until the parent closes stdin or kills this process.
pub fn until_closed() {
    io::stdin().lock().lines().for_each(drop);
}
