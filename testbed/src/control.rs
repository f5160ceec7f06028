//! Plain timers that run beside a measurement and show whether the machine itself was late during that time.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, ClockNanosleepFlags, clock_gettime, clock_nanosleep},
    unistd::Pid,
};

use crate::{machine::jiffy, process::run_in_real_time};

/// The observations of the plain timers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Number of timers, of one jiffy each.
    pub timers: u32,
    /// Number of timers whose thread woke up more than a jiffy late.
    pub late: u32,
    /// The largest delay.
    pub latest_by: Duration,
    /// The largest delay of the kernel's `jiffies` against the clock. It stays below a jiffy unless the processor that
    /// counts them was taken away.
    pub jiffies_behind: Duration,
}

impl Observed {
    /// Whether a late packet can be blamed on the machine.
    #[must_use]
    pub fn was_late(&self) -> bool {
        self.late > 0
    }

    /// Whether a kernel timer may have fired early. Timers count from `jiffies`; the timer wheel rounds up, which makes
    /// up for `jiffies` that are one behind (`calc_index()` in kernel/time/timer.c, Linux 6.12).
    #[must_use]
    pub fn jiffies_were_behind(&self) -> bool {
        self.jiffies_behind > jiffy()
    }

    fn add(&mut self, other: Self) {
        self.timers += other.timers;
        self.late += other.late;
        self.latest_by = self.latest_by.max(other.latest_by);
        self.jiffies_behind = self.jiffies_behind.max(other.jiffies_behind);
    }
}

impl fmt::Display for Observed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(
            f,
            "at the same time {} of {} plain timers were late by more than a jiffy, by at most \
             {:.2} ms, and the jiffies lagged by {:.2} ms",
            self.late,
            self.timers,
            ms(self.latest_by),
            ms(self.jiffies_behind)
        )
    }
}

/// Runs the plain timers until it is stopped or dropped: on each processor one in a thread of ordinary priority and one
/// in a thread of real-time priority.
#[derive(Debug)]
pub struct Control {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Observed>>,
}

impl Control {
    /// Starts the threads.
    #[must_use]
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let own = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
        let processors = (0..CpuSet::count()).filter(|cpu| own.is_set(*cpu).unwrap_or(false));
        let threads = processors
            .flat_map(|cpu| [false, true].map(|is_real_time| (cpu, is_real_time)))
            .map(|(cpu, is_real_time)| {
                let stop = Arc::clone(&stop);
                thread::spawn(move || run(cpu, is_real_time, &stop))
            })
            .collect();
        Self { stop, threads }
    }

    /// Stops the threads and returns what they observed.
    #[must_use]
    pub fn stop(mut self) -> Observed {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Observed::default();
        for thread in self.threads.drain(..) {
            all.add(thread.join().unwrap_or_default());
        }
        all
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn now(clock: ClockId) -> Duration {
    clock_gettime(clock).map_or(Duration::ZERO, Duration::from)
}

/// Runs one timer after the other. A thread of real-time priority is late only if the processor itself was taken away;
/// it therefore sees what ordinary threads do not: `jiffies` that do not advance.
fn run(cpu: usize, is_real_time: bool, stop: &AtomicBool) -> Observed {
    let mut set = CpuSet::new();
    // If the thread cannot be bound or raised, it still measures on whatever processor and at whatever priority it has.
    let _bound = set
        .set(cpu)
        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
    if is_real_time {
        run_in_real_time();
    }
    let jiffy = jiffy();
    let mut observed = Observed::default();
    while !stop.load(Ordering::Relaxed) {
        let due = now(ClockId::CLOCK_MONOTONIC) + jiffy;
        let until = ClockNanosleepFlags::TIMER_ABSTIME;
        let _slept = clock_nanosleep(ClockId::CLOCK_MONOTONIC, until, &due.into());
        // The coarse clock is updated with each jiffy. It is read first, so that it is never ahead.
        let coarse = now(ClockId::CLOCK_MONOTONIC_COARSE);
        let woken = now(ClockId::CLOCK_MONOTONIC);
        let late_by = woken.saturating_sub(due);
        observed.add(Observed {
            timers: 1,
            late: u32::from(late_by > jiffy),
            latest_by: late_by,
            jiffies_behind: woken.saturating_sub(coarse),
        });
    }
    observed
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn timers_run_until_stopped() {
        let control = Control::start();
        let begin = Instant::now();
        thread::sleep(20 * jiffy());
        let observed = control.stop();
        let most = begin.elapsed().as_nanos() / jiffy().as_nanos() + 1;
        let threads = 2 * thread::available_parallelism().unwrap().get() as u128;
        assert!(observed.timers > 0, "{observed:?}");
        assert!(
            u128::from(observed.timers) <= most * threads,
            "{observed:?}"
        );
        assert!(observed.late <= observed.timers, "{observed:?}");
        assert!(
            observed.late == 0 || observed.latest_by > jiffy(),
            "{observed:?}"
        );
    }

    #[test]
    fn late_timers_and_late_jiffies_are_excuses() {
        let calm = Observed {
            timers: 100,
            jiffies_behind: jiffy() / 2,
            ..Observed::default()
        };
        assert!(!calm.was_late());
        assert!(!calm.jiffies_were_behind());
        let stolen = Observed {
            late: 1,
            jiffies_behind: 3 * jiffy(),
            ..calm
        };
        assert!(stolen.was_late());
        assert!(stolen.jiffies_were_behind());
    }
}
