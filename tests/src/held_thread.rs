//! Stops one thread of another process while its other threads run, as happens to a thread that waits for a disk.

use std::{
    fs,
    marker::PhantomData,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use nix::{
    errno::Errno,
    sys::{
        ptrace,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use rto_testbed::process::RealTime;

/// Longest time for a thread to do what it is allowed to do.
const LIMIT: Duration = Duration::from_secs(60);

/// A stopped thread, which only runs during [`HeldThread::advance`] and continues when this is dropped. Until then the
/// calling thread runs at real-time priority if permitted; otherwise the held thread would run on while the caller
/// waits for a processor.
pub struct HeldThread {
    process: Pid,
    thread: Pid,
    _real_time: RealTime,
    /// The kernel accepts ptrace(2) requests only from the thread that attached.
    not_send: PhantomData<*const ()>,
}

impl HeldThread {
    /// Stops the thread with this name.
    pub fn of(process: Pid, name: &str) -> anyhow::Result<Self> {
        let mut found = Vec::new();
        for task in fs::read_dir(format!("/proc/{process}/task"))? {
            let task = task?.path();
            // The thread may have ended.
            let comm = fs::read_to_string(task.join("comm")).unwrap_or_default();
            if comm.trim_end() == name {
                let id = task.file_name().and_then(|id| id.to_str());
                found.extend(id.and_then(|id| id.parse::<i32>().ok()));
            }
        }
        // Unnamed threads inherit the name of the thread that started them, and are younger.
        let first = found.into_iter().min();
        let thread = Pid::from_raw(first.with_context(|| format!("no thread {name}"))?);
        ptrace::seize(thread, ptrace::Options::empty())?;
        let held = Self {
            process,
            thread,
            _real_time: RealTime::begin(),
            not_send: PhantomData,
        };
        held.stop()?;
        Ok(held)
    }

    /// Lets it run until it has used this much CPU time, or has waited for that long; returns the CPU time used.
    pub fn advance(&self, used: Duration) -> anyhow::Result<Duration> {
        let begin = self.time_used()?;
        let limit = Instant::now() + LIMIT;
        let mut runnable = Instant::now();
        ptrace::cont(self.thread, None)?;
        while self.time_used()? < begin + used {
            ensure!(Instant::now() < limit, "it used less than {used:?}");
            std::thread::sleep(Duration::from_micros(200));
            if self.is_runnable()? {
                runnable = Instant::now();
            } else if runnable.elapsed() > used {
                break;
            }
        }
        self.stop()?;
        Ok(self.time_used()? - begin)
    }

    /// Waits until it has ended with its process.
    pub fn ended(&self) -> anyhow::Result<()> {
        let limit = Instant::now() + LIMIT;
        let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
        loop {
            match waitpid(self.thread, Some(flags)) {
                Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) | Err(Errno::ECHILD) => {
                    return Ok(());
                }
                Ok(_) => std::thread::sleep(Duration::from_millis(1)),
                Err(e) => bail!(e),
            }
            ensure!(Instant::now() < limit, "the thread still runs");
        }
    }

    fn stop(&self) -> anyhow::Result<()> {
        ptrace::interrupt(self.thread)?;
        loop {
            match waitpid(self.thread, Some(WaitPidFlag::__WALL))? {
                WaitStatus::PtraceEvent(..) => return Ok(()),
                WaitStatus::Stopped(_, signal) => ptrace::cont(self.thread, signal)?,
                other => bail!("{other:?}"),
            }
        }
    }

    /// CPU time in nanoseconds, the first number of schedstat (proc(5)).
    fn time_used(&self) -> anyhow::Result<Duration> {
        let text = self.read("schedstat")?;
        let used = text.split(' ').next().context("empty")?;
        Ok(Duration::from_nanos(used.parse()?))
    }

    fn is_runnable(&self) -> anyhow::Result<bool> {
        let stat = self.read("stat")?;
        let (_, state) = stat.rsplit_once(") ").context("no state")?;
        Ok(state.starts_with('R'))
    }

    fn read(&self, file: &str) -> anyhow::Result<String> {
        let path = format!("/proc/{}/task/{}/{file}", self.process, self.thread);
        fs::read_to_string(&path).context(path)
    }
}

impl Drop for HeldThread {
    fn drop(&mut self) {
        let _ended = ptrace::detach(self.thread, None);
    }
}
