//! The engine's thread: its queue and its timers. Map writes block, and the socket must keep answering during them.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rto_agent_core::{
    progress::{self, Progress},
    wire::types::ReloadRequest,
};
use rto_agent_kernel::{datapath, kernel::clock::boottime_ms};
use tracing::{error, warn};

use super::{
    audit::{Cause, Source},
    change::{Engine, Persist},
    config::EngineConfig,
    detach,
    error::EngineError,
    handle::{Channels, Done, Message, Reply},
    health,
    kernel::Open,
    memory, open_sockets, reload, requests,
    store::LastGood,
    systemd, tuner,
};

/// Time the engine gets to end after a stop. The daemon's own steps use the rest of two seconds.
pub const STOP_LIMIT: Duration = Duration::from_millis(1500);

/// Interval between checks of the attachment, the host's sysctls and a part of the maps.
pub(super) const HEALTH_INTERVAL: Duration = Duration::from_secs(5);

/// Interval between attempts to remove expired entries. (The program ignores them, 69 s late at
/// most.)
const EXPIRY_RETRY: Duration = Duration::from_secs(1);

/// Time the probe and the walk together get to finish after a stop. Shorter than the daemon's own
/// limit for the engine, so that the engine can still detach.
const JOBS_LIMIT: Duration = STOP_LIMIT.saturating_sub(Duration::from_millis(500));

/// The engine with its queue of messages and its timers.
pub struct Actor {
    engine: Engine,
    messages: mpsc::Receiver<Message>,
    progress: Progress,
    /// When expired entries are looked for again, if the kernel refused to remove them.
    expiry_after: Option<Instant>,
    /// See [`systemd::step_interval`].
    step_interval: Duration,
    /// [`HEALTH_INTERVAL`], except in tests.
    health_interval: Duration,
}

impl Actor {
    /// Brings the kernel in line with the configuration, attaches, and publishes the first
    /// snapshot.
    ///
    /// # Errors
    ///
    /// If the program cannot be attached. Whatever an earlier run left in force stays in force.
    pub fn start(
        config: EngineConfig,
        last_good: LastGood,
        channels: Channels,
    ) -> anyhow::Result<Self> {
        let open: Open = Arc::new(|options| Ok(Box::new(datapath::open(options)?)));
        Self::start_with(open, config, last_good, channels)
    }

    /// As [`Self::start`], with another way to open the kernel.
    fn start_with(
        open: Open,
        config: EngineConfig,
        last_good: LastGood,
        channels: Channels,
    ) -> anyhow::Result<Self> {
        let Channels {
            messages,
            sender,
            snapshots,
            progress,
        } = channels;
        progress.count_this_thread();
        progress::step();
        let engine = Engine::start(open, config, last_good, &sender, snapshots)?;
        memory::trim_heap();
        Ok(Self {
            engine,
            messages,
            progress,
            expiry_after: None,
            step_interval: systemd::step_interval(),
            health_interval: HEALTH_INTERVAL,
        })
    }

    /// Serves messages until it is stopped, then leaves the kernel as `on_exit` says.
    pub fn run(mut self) -> anyhow::Result<()> {
        let engine = &mut self.engine;
        let status = engine.snapshots.borrow().clone();
        engine.systemd.ready(&super::status::status_line(&status));
        engine.apply_to_open(&Source::Start.into());
        health::consider_probe(engine);
        let mut next_health = Instant::now() + self.health_interval;
        // After a stop, queued messages are dropped.
        while progress::checkpoint().is_ok() {
            let message = self.messages.recv_timeout(self.until_next(next_health));
            match message {
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Ok(message) => self.handle(message),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            if progress::checkpoint().is_err() {
                break;
            }
            let engine = &mut self.engine;
            if Instant::now() >= next_health {
                reload::keep_last_good(engine);
                health::check(engine);
                next_health = Instant::now() + self.health_interval;
            }
            self.expire();
            let engine = &mut self.engine;
            if until_tick(engine).is_some_and(|wait| wait.is_zero()) {
                tuner::tick(engine);
            }
            if let Some((reply, answer)) = detach::finish_restore(engine) {
                publish_and_answer(engine, reply, answer);
            }
            if detach::finish_draining(engine) {
                engine.publish();
            }
            if let Some(cause) = engine.walks.take_again() {
                engine.apply_to_open(&cause);
            }
        }
        self.stop()
    }

    fn until_next(&self, next_health: Instant) -> Duration {
        let now = Instant::now();
        let mut wait = next_health.saturating_duration_since(now);
        if let Some(end) = self.engine.desired().runtime.next_expiry_ms() {
            let due = Duration::from_millis(end.saturating_sub(boottime_ms()));
            let again = self
                .expiry_after
                .map(|after| after.saturating_duration_since(now));
            wait = wait.min(due.max(again.unwrap_or_default()));
        }
        let others = [
            self.engine.detachment.until_next(),
            until_tick(&self.engine),
        ];
        let others = others.into_iter().flatten();
        others.fold(wait.min(self.step_interval), Duration::min)
    }

    fn handle(&mut self, message: Message) {
        let engine = &mut self.engine;
        match message {
            Message::Add(request, by, reply) => {
                let answer = requests::add(engine, *request, by);
                answer_change(engine, reply, answer);
            }
            Message::Remove(request, by, reply) => {
                let answer = requests::remove(engine, request, by);
                answer_change(engine, reply, answer);
            }
            Message::Reload(request, by, reply) => {
                let answer = reload::reload_requested(engine, &request, &Cause::request(by));
                answer_change(engine, reply, answer);
                memory::trim_heap();
            }
            Message::Attach(by, reply) => {
                let answer = detach::attach(engine, &Cause::request(by));
                publish_and_answer(engine, reply, answer);
            }
            Message::Detach(request, by, reply) => {
                match detach::detach(engine, &request, by, reply) {
                    Some((reply, answer)) => publish_and_answer(engine, reply, answer),
                    // `finish_restore()` answers.
                    None => engine.publish(),
                }
            }
            Message::Apply(request, by, reply) => {
                let answer = open_sockets::walk(engine, &request, by);
                publish_and_answer(engine, reply, answer);
            }
            Message::Probed(verdict, by, reply) => {
                engine.probing.record(verdict, &format!("doctor, {by}"));
                publish_and_answer(engine, reply, Ok(()));
            }
            // The client has disconnected, and the comparison takes long.
            Message::Verify(reply) if reply.is_closed() => {}
            Message::Verify(reply) => {
                let answer = health::verify(engine);
                publish_and_answer(engine, reply, Ok(answer));
            }
            Message::Watch(policy, reply) => {
                let answer = open_sockets::watch(engine, policy.as_ref());
                publish_and_answer(engine, reply, answer);
            }
            Message::Tune(action, policy, by, reply) => {
                let answer = tuner::tune(engine, action, &policy, by);
                publish_and_answer(engine, reply, answer);
            }
            Message::Metrics(problem) => {
                let known = &mut engine.problems.metrics;
                if problem.as_ref() != known.text() {
                    known.becomes(problem, |text| warn!("{text}"));
                    engine.publish();
                }
            }
            Message::Unwatched => engine.events.end_if_unwatched(),
            Message::Done(Done::Walk { number, view }) => {
                engine.walks.done(number, view.map(|view| *view));
            }
            Message::Done(Done::Probe(verdict)) => {
                engine.probing.done(verdict);
                engine.publish();
            }
            Message::Done(Done::Compare(compared)) => {
                if engine.comparing.done(compared) && engine.detachment.by.is_none() {
                    health::verify(engine);
                    engine.publish();
                }
            }
            Message::Sighup => {
                let request = ReloadRequest::default();
                let reloaded = reload::reload_requested(engine, &request, &Source::Signal.into());
                // `not_reloaded()` has logged why the files were rejected.
                if let Err(e) = reloaded
                    && !matches!(e, EngineError::NotReloaded(_))
                {
                    warn!("{e}");
                }
                engine.publish();
                memory::trim_heap();
            }
            Message::FilesChanged => reload::files_changed(engine),
            // What is due after each message is done then.
            Message::Resumed | Message::Stop => {}
        }
    }

    /// Removes expired entries, from the kernel first. The file holds their expiry times, so they
    /// stay expired even if it cannot be written.
    fn expire(&mut self) {
        let engine = &mut self.engine;
        if self
            .expiry_after
            .is_some_and(|after| Instant::now() < after)
        {
            return;
        }
        let Some(next) = engine.desired().expired(boottime_ms()) else {
            return;
        };
        let expired = engine.change(&next, &Persist::Later, &Source::Ttl.into());
        let problem = expired.err().map(|e| {
            format!("expired entries could not be removed, which is tried again every second: {e}")
        });
        self.expiry_after = problem.is_some().then(|| Instant::now() + EXPIRY_RETRY);
        if problem.is_some() || engine.problems.expiry.text().is_some() {
            engine
                .problems
                .expiry
                .becomes(problem, |text| error!("{text}"));
            engine.publish();
        }
    }

    fn stop(mut self) -> anyhow::Result<()> {
        let begin = self.progress.stopped_at().unwrap_or_else(Instant::now);
        let engine = &mut self.engine;
        engine.walks.cancel();
        engine.events.end();
        engine.control.save_last(&mut engine.store.tuning);
        engine.probing.finish(begin + JOBS_LIMIT);
        engine.walks.finish(begin + JOBS_LIMIT);
        detach::leave(engine)
    }
}

/// Time until the tuner's next tick.
fn until_tick(engine: &Engine) -> Option<Duration> {
    let wait = engine.control.until_tick()?;
    engine.detachment.is_attached().then_some(wait)
}

/// Answers a change, which publishes itself. After a failure the maps may differ.
fn answer_change<T>(engine: &mut Engine, reply: Reply<T>, answer: Result<T, EngineError>) {
    if answer.is_err() {
        engine.publish();
    }
    // A client that disconnected before its answer is not an error.
    let _ = reply.send(answer);
}

/// Publishes the result, then answers.
fn publish_and_answer<T>(engine: &mut Engine, reply: Reply<T>, answer: Result<T, EngineError>) {
    engine.publish();
    let _ = reply.send(answer); // As above.
}

#[cfg(test)]
mod tests;
