//! `rto-agent top`: the event loop. [`state`] has the state, [`keys`] changes it, [`view`] draws
//! it.

use std::{
    io::{self, IsTerminal as _},
    iter,
    ops::ControlFlow,
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::{SigSet, Signal};
use ratatui::{
    DefaultTerminal,
    crossterm::{event, style},
};
use rto_agent_core::wire::stats::StatsAnswer;

use self::{
    state::{Answers, State},
    tuning::ask,
};
use super::terminal::is_coloured;
use crate::{cli::Top, client::Client};

mod bars;
mod details;
mod history;
mod keys;
#[cfg(test)]
pub(super) mod samples;
mod state;
mod table;
mod timers;
mod tuning;
mod view;

/// Redraws are this frequent because the age of the last answer is shown in seconds.
const TICK: Duration = Duration::from_millis(500);

enum Event {
    Look(Result<Box<StatsAnswer>, String>),
    Page(Result<Box<Answers>, String>),
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
    let first = client.get("/v1/stats")?;
    let socket = rto_agent_core::printable::path(&args.socket.socket);
    let mut state = State::new(socket, interval, first, Instant::now());

    // Must run before other threads start: they inherit the mask, so that only the waiting thread
    // gets the signals.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block()?;
    let mut screen = Screen::open()?;
    let (sender, received) = mpsc::channel();
    // None of these threads is joined: each may wait for something that no longer comes.
    let (page, is_page_open) = mpsc::channel();
    let mut was_open = false;
    spawn(&sender, move |sender| {
        poll(&client, interval, &is_page_open, sender);
    });
    spawn(&sender, events);
    spawn(&sender, move |sender| {
        let _which = signals.wait();
        let _gone = sender.send(Event::Signal);
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
        if state.page.is_open != was_open {
            was_open = state.page.is_open;
            // If the thread is gone, answers stop too, which the screen shows.
            let _gone = page.send(was_open);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn take(state: &mut State, event: Event) -> io::Result<ControlFlow<()>> {
    match event {
        Event::Look(Ok(answer)) => state.update(*answer, Instant::now()),
        Event::Page(Ok(answers)) => state.update_page(*answers),
        Event::Look(Err(error)) | Event::Page(Err(error)) => state.failed(error),
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
            let _gone = sender.send(Event::Panic);
        }
    });
}

/// Polls the daemon, also for the page of timers while it is open. Runs apart from the keys,
/// because an answer can take long.
fn poll(client: &Client, interval: Duration, pages: &Receiver<bool>, sender: &Sender<Event>) {
    let mut is_page_open = false;
    let mut next = Instant::now() + interval;
    loop {
        match pages.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(is_open) => is_page_open = is_open,
            Err(RecvTimeoutError::Timeout) => {
                let answer = client.get("/v1/stats").map_err(|e| e.to_string());
                if sender.send(Event::Look(answer)).is_err() {
                    return;
                }
                next = Instant::now() + interval;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if is_page_open {
            let answers = ask(client).map(Box::new).map_err(|e| e.to_string());
            if sender.send(Event::Page(answers)).is_err() {
                return;
            }
        }
    }
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
            let _restored = ratatui::try_restore();
        }
        Ok(Self { terminal: opened? })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Restoring it twice would move the cursor onto the panic message.
        if !thread::panicking() {
            // Nothing helps if the terminal is gone.
            let _restored = ratatui::try_restore();
        }
    }
}
