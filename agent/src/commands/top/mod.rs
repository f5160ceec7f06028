//! `rto-agent top`: the event loop. [`state`] has the state, [`view`] draws it.

use std::{
    io::{self, IsTerminal as _},
    iter,
    ops::ControlFlow,
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::{SigSet, Signal};
use ratatui::{
    DefaultTerminal,
    crossterm::{event, style},
};

use self::state::{Answers, State};
use super::terminal::is_coloured;
use crate::{
    cli::Top,
    client::{Client, ClientError},
};

mod row;
#[cfg(test)]
mod samples;
mod state;
mod view;

/// Redraws are this frequent because the age of the last answer is shown in seconds.
const TICK: Duration = Duration::from_millis(500);

enum Event {
    Look(Result<Box<Answers>, String>),
    Terminal(io::Result<event::Event>),
    Signal,
    Panic,
}

pub(super) fn run(args: &Top) -> anyhow::Result<ExitCode> {
    let interval = args.interval;
    anyhow::ensure!(
        io::stdout().is_terminal(),
        "top needs a terminal; use rto-agent stats --watch instead"
    );
    style::force_color_output(is_coloured(args.color));
    let client = Client::new(&args.socket.socket);
    // If the daemon is unavailable at the start, this is an error, as for other verbs.
    let first = ask(&client)?;
    let socket = rto_agent_core::printable::path(&args.socket.socket);
    let mut state = State::new(socket, interval, first, Instant::now());

    // Must run before other threads start: they inherit the mask, so that only the waiting thread
    // gets the signals.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block()?;
    let mut screen = Screen::open()?;
    let (sender, received) = mpsc::channel();
    // None of these threads is joined: each may wait for something that no longer comes.
    spawn(&sender, move |sender| poll(&client, interval, sender));
    spawn(&sender, events);
    spawn(&sender, move |sender| {
        let _ = signals.wait(); // Whichever it is.
        let _ = sender.send(Event::Signal); // The table has ended.
    });
    loop {
        screen
            .terminal
            .draw(|frame| view::draw(frame, &state, Instant::now()))?;
        let next = match received.recv_timeout(TICK) {
            Ok(next) => next,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        // Handles all pending events before it draws once.
        for event in iter::once(next).chain(received.try_iter()) {
            if take(&mut state, event)?.is_break() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn take(state: &mut State, event: Event) -> io::Result<ControlFlow<()>> {
    match event {
        Event::Look(Ok(answers)) => state.update(*answers, Instant::now()),
        Event::Look(Err(error)) => state.failed(error),
        Event::Terminal(event) => {
            if let event::Event::Key(key) = event? {
                return Ok(state.key(key));
            }
        }
        Event::Panic => return Err(io::Error::other("a thread of top panicked")),
        Event::Signal => return Ok(ControlFlow::Break(())),
    }
    Ok(ControlFlow::Continue(()))
}

fn spawn(sender: &Sender<Event>, body: impl FnOnce(&Sender<Event>) + Send + 'static) {
    let sender = sender.clone();
    thread::spawn(move || {
        // ratatui's panic hook has already restored the terminal, so nothing more can be drawn.
        if panic::catch_unwind(AssertUnwindSafe(|| body(&sender))).is_err() {
            let _ = sender.send(Event::Panic); // The table has ended.
        }
    });
}

/// Polls the daemon. Runs apart from the keys, because an answer can take long.
fn poll(client: &Client, interval: Duration, sender: &Sender<Event>) {
    loop {
        thread::sleep(interval);
        let answers = ask(client).map(Box::new).map_err(|e| e.to_string());
        if sender.send(Event::Look(answers)).is_err() {
            return;
        }
    }
}

fn ask(client: &Client) -> Result<Answers, ClientError> {
    Ok(Answers {
        stats: client.get("/v1/stats")?,
        tune: client.get("/v1/tune")?,
    })
}

/// Sends keys and changes of the terminal's size.
fn events(sender: &Sender<Event>) {
    loop {
        let event = event::read();
        let last = event.is_err();
        if sender.send(Event::Terminal(event)).is_err() || last {
            return;
        }
    }
}

/// The terminal in raw mode with the alternate screen. Dropping it restores the terminal; at a
/// panic, ratatui's hook does.
struct Screen {
    terminal: DefaultTerminal,
}

impl Screen {
    fn open() -> io::Result<Self> {
        let opened = ratatui::try_init();
        if opened.is_err() {
            // The setup may have failed halfway.
            let _ = ratatui::try_restore();
        }
        Ok(Self { terminal: opened? })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Restoring it twice would move the cursor onto the panic message.
        if !thread::panicking() {
            // Nothing helps if the terminal is gone.
            let _ = ratatui::try_restore();
        }
    }
}
