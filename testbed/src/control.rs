//! Plain timers that run beside a measurement: they tell whether the machine itself was late in that time.

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

/// What the plain timers saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Timers of one jiffy that ran.
    pub timers: u32,
    /// Those after which the thread ran more than a jiffy late.
    pub late: u32,
    /// The latest of them.
    pub latest_by: Duration,
    /// The most by which the kernel's `jiffies` were behind the clock. It is below a jiffy unless the processor that
    /// counts them was taken away.
    pub jiffies_behind: Duration,
}

impl Observed {
    /// Whether the machine can be blamed for a packet that is late.
    #[must_use]
    pub fn was_late(&self) -> bool {
        self.late > 0
    }

    /// Whether a kernel timer may have been early: it is counted from `jiffies`, and one jiffy of their delay is made up
    /// for by the timer wheel, which rounds up (`calc_index()` in kernel/time/timer.c, Linux 6.12).
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
            "beside it {} of {} plain timers were late by more than a jiffy, by {:.2} ms at most, and jiffies behind \
             by {:.2} ms",
            self.late,
            self.timers,
            ms(self.latest_by),
            ms(self.jiffies_behind)
        )
    }
}

/// Runs the plain timers, on each processor one as any program has it and one of real-time priority, until it is
/// stopped or dropped.
#[derive(Debug)]
pub struct Control {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Observed>>,
}

impl Control {
    /// Starts them.
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

    /// Ends them; what they saw.
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

/// Of real-time priority it is late only where the processor itself was taken away, so that it sees what other
/// programs do not: `jiffies` that stand still.
fn run(cpu: usize, is_real_time: bool, stop: &AtomicBool) -> Observed {
    let mut set = CpuSet::new();
    // Where it cannot be bound or raised it measures where it is, as it is.
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
        // The coarse clock is set with each jiffy; read first, it is never ahead.
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
    fn it_measures_while_it_runs() {
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
    fn what_it_excuses() {
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
