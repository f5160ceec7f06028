//! The SYN schedule: when a connecting socket retransmits its SYN.
//!
//! The kernel alone retransmits a SYN after one second, and then every second for `tcp_syn_linear_timeouts` timeouts
//! (Linux 6.5; none before). After that the interval doubles up to the maximum RTO (`tcp_retransmit_timer()`, Linux
//! 6.18). These moments are called slots here. With a shorter initial RTO alone, the interval soon becomes longer than
//! the kernel's, so that connect() is late after an outage of a few seconds.
//!
//! [`Attempt::next`] is the rule: the kernel's own intervals, but shorter ones where they are long, and none that
//! passes over a slot. The eBPF program, the model and the lab all use it. Times are jiffies since the first SYN.

use crate::wheel;

/// The maximum of TCP_SYNCNT (`MAX_TCP_SYNCNT`).
pub const MAX_SYNCNT: u32 = 127;

/// Slots that are considered: more than there are before connect() gives up by default, with a
/// `tcp_syn_linear_timeouts` of up to 60. After that the kernel's own intervals stay.
const SLOTS: u32 = 72;

/// Retransmissions beyond the kernel's own number after which no more are added between the slots.
const ADDED: u32 = 18;

/// A later time than any timer's.
const NEVER: u32 = u32::MAX >> 1;

/// What the kernel alone would do with a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Jiffies per second.
    pub hz: u32,
    /// The initial RTO, jiffies: `hz`, unless connect() gives up by the policy's timer.
    pub initial_rto: u32,
    /// `net.ipv4.tcp_syn_linear_timeouts`; 0 before Linux 6.5.
    pub linear: u32,
    /// TCP_SYNCNT of the socket, or `net.ipv4.tcp_syn_retries` of its namespace.
    pub retries: u32,
    /// The maximum RTO, jiffies.
    pub rto_max: u32,
    /// The application's TCP_USER_TIMEOUT, milliseconds; 0: none.
    pub user_timeout_ms: u32,
}

/// The kernel's slots around a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    /// The number of slots up to now.
    pub passed: u32,
    /// The last of them; 0: none.
    pub last: u32,
    /// The next slot, which is at the latest when the kernel gives up.
    pub next: u32,
}

impl Timeouts {
    /// The kernel's own timeouts of a SYN, with its defaults.
    #[must_use]
    pub const fn kernel(hz: u32, retries: u32, linear: u32) -> Self {
        Self {
            hz,
            initial_rto: hz,
            linear,
            retries,
            rto_max: 120 * hz,
            user_timeout_ms: 0,
        }
    }

    /// The interval after this number of timeouts, jiffies.
    #[inline(always)]
    const fn interval(&self, timeouts: u32) -> u32 {
        rto_syn_interval(self.initial_rto, timeouts, self.linear, self.rto_max)
    }

    /// The largest RTO with which the kernel would go on in time if nothing shaped its intervals any more, after this
    /// number of its own slots, jiffies: twice its own interval.
    #[inline(always)]
    #[must_use]
    pub const fn hold(&self, passed: u32) -> u32 {
        self.interval(passed).saturating_mul(2)
    }

    /// `tcp_model_timeout()`, Linux 6.18, jiffies.
    #[inline(always)]
    const fn model_timeout(&self) -> u64 {
        let rto = self.initial_rto as u64;
        let most = match self.rto_max.checked_div(self.initial_rto) {
            Some(fold @ 1..) => fold.ilog2(),
            _ => 0,
        };
        let doublings = least(self.retries, most);
        ((2 << doublings) - 1) * rto + (self.retries - doublings) as u64 * self.rto_max as u64
    }

    /// Whether the attempt ends at a timeout that follows `timeouts` others, by their number or by time
    /// (`tcp_write_timeout()`, Linux 6.18). The time is not checked before the first retransmission.
    #[inline(always)]
    #[must_use]
    pub const fn has_ended(&self, timeouts: u32, at: u32) -> bool {
        timeouts >= self.retries + self.linear
            || (timeouts > 0 && self.user_timeout_ms == 0 && at as u64 >= self.model_timeout())
    }

    /// When the application's TCP_USER_TIMEOUT ends the attempt.
    #[inline(always)]
    const fn user_timeout(&self) -> u32 {
        match self.user_timeout_ms {
            0 => NEVER,
            ms => bounded(ms as u64 * self.hz as u64 / 1000 + 1),
        }
    }

    /// The slots around `now`, of an attempt whose first timer was armed in jiffy `start`.
    #[inline(always)]
    #[must_use]
    pub const fn slots(&self, start: u32, now: u32) -> Slots {
        self.slots_after(start, now, self.passed(start, now))
    }

    /// The number of slots up to `now` in the upper half, and the last of them.
    #[inline(always)]
    #[must_use]
    pub const fn passed(&self, start: u32, now: u32) -> u64 {
        rto_syn_slots_passed(start, now, self.initial_rto, self.linear, self.rto_max)
    }

    /// [`Self::slots`], if [`Self::passed`] is known.
    #[inline(always)]
    #[must_use]
    pub const fn slots_after(&self, start: u32, now: u32, passed: u64) -> Slots {
        let (passed, last) = (upper(passed), lower(passed));
        let next = wheel::fires(start, last, self.interval(passed));
        Slots {
            passed,
            last,
            next: if next > now { next } else { NEVER },
        }
    }

    /// When connect() gives up, of an attempt whose first timer was armed in jiffy `start` (`tcp_write_timeout()`,
    /// `retransmits_timed_out()`, Linux 6.18).
    #[inline(always)]
    #[must_use]
    pub const fn gives_up(&self, start: u32) -> u32 {
        let user_timeout = self.user_timeout();
        let most = self.retries + self.linear;
        // TCP_USER_TIMEOUT replaces the time.
        let time = if self.user_timeout_ms == 0 {
            bounded(self.model_timeout())
        } else {
            NEVER
        };
        let (mut timeouts, mut at) = (0, wheel::fires(start, 0, self.initial_rto));
        // The time is not checked before the first retransmission.
        while timeouts < SLOTS && timeouts < most && (timeouts == 0 || at < time) {
            if at >= user_timeout {
                return user_timeout;
            }
            timeouts += 1;
            at = wheel::fires(start, at, self.interval(timeouts));
        }
        if timeouts < SLOTS {
            at
        } else {
            // Still in a long linear phase.
            least(
                user_timeout,
                bounded(self.model_timeout() + self.initial_rto as u64),
            )
        }
    }
}

/// [`Timeouts::interval`]. Global functions for the verifier: [`wheel::shift`].
#[cfg_attr(target_arch = "bpf", unsafe(no_mangle), inline(never))]
const extern "C" fn rto_syn_interval(
    initial_rto: u32,
    timeouts: u32,
    linear: u32,
    rto_max: u32,
) -> u32 {
    let doublings = timeouts.saturating_sub(linear);
    // More doublings than there are between one jiffy and the maximum RTO.
    let rto = (initial_rto as u64) << least(doublings, 20);
    if rto < rto_max as u64 {
        lower(rto)
    } else {
        rto_max
    }
}

/// [`Timeouts::passed`].
#[cfg_attr(target_arch = "bpf", unsafe(no_mangle), inline(never))]
const extern "C" fn rto_syn_slots_passed(
    start: u32,
    now: u32,
    initial_rto: u32,
    linear: u32,
    rto_max: u32,
) -> u64 {
    let (mut passed, mut last) = (0, 0);
    let mut next = wheel::fires(start, 0, initial_rto);
    while passed < SLOTS && next <= now {
        last = next;
        passed += 1;
        let interval = rto_syn_interval(initial_rto, passed, linear, rto_max);
        next = wheel::fires(start, last, interval);
    }
    both(passed, last)
}

/// A connecting socket when its SYN timer has fired, before the kernel retransmits and doubles `icsk_rto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fired {
    /// Jiffies since the first SYN.
    pub now: u32,
    /// The policy's initial RTO, jiffies.
    pub initial_rto: u32,
    /// `icsk_rto`, jiffies.
    pub rto: u32,
    /// The socket's maximum RTO, jiffies.
    pub rto_max: u32,
    /// `icsk_retransmits`.
    pub retransmits: u32,
    /// When connect() must give up ([`Timeouts::gives_up`]).
    pub gives_up: u32,
    /// Whether the interval can be shaped.
    pub is_shaped: bool,
    /// Whether the doubling is limited to [`Timeouts::hold`] (Linux 6.15).
    pub is_held: bool,
}

/// What an attempt remembers between its timeouts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attempt {
    /// Lower half of the jiffy in which the first SYN's timer was armed.
    pub start: u32,
    /// The last retransmission that a server answers which has lost its SYN-ACK, jiffies since the first SYN; 0: none
    /// yet. Duplicates are answered every 500 ms at most (`tcp_oow_rate_limited()`, Linux 6.18).
    pub answered: u32,
}

/// What to do at a timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// The timer to arm, jiffies; 0: the kernel's own interval is right.
    pub timer: u32,
    /// TCP_SYNCNT: the attempt ends at [`Fired::gives_up`], and not earlier if nothing shapes its intervals any more.
    pub retries: u32,
    /// Whether the attempt ends at the end of this interval.
    pub is_last: bool,
}

impl Attempt {
    /// The timer that follows the retransmission that the kernel is about to send, and the TCP_SYNCNT. `slots`: those
    /// around [`Fired::now`].
    #[inline(always)]
    #[must_use]
    pub const fn next(&mut self, kernel: &Timeouts, fired: &Fired, slots: Slots) -> Next {
        let hold = least(kernel.hold(slots.passed), fired.rto_max);
        // The interval that the kernel arms if nothing shapes it: it doubles after the linear phase
        // (`tcp_retransmit_timer()`, Linux 6.18).
        let rto = if fired.retransmits < kernel.linear {
            fired.rto
        } else {
            least(
                fired.rto.saturating_mul(2),
                if fired.is_held { hold } else { fired.rto_max },
            )
        };
        let timer = if fired.is_shaped {
            self.timer(kernel, fired, slots, rto)
        } else {
            0
        };
        let end = wheel::fires(self.start, fired.now, if timer == 0 { rto } else { timer });
        let is_last = end >= fired.gives_up;
        Next {
            timer,
            retries: if !is_last {
                retries(kernel, fired, rto, end)
            } else if fired.is_shaped || kernel.has_ended(fired.retransmits + 1, end) {
                // If the kernel alone would not end a shaped attempt, TCP_USER_TIMEOUT does.
                kernel.retries
            } else {
                1
            },
            is_last,
        }
    }

    /// [`Next::timer`]; also notes whether this retransmission is answered.
    #[inline(always)]
    const fn timer(&mut self, kernel: &Timeouts, fired: &Fired, slots: Slots, rto: u32) -> u32 {
        let (now, hz) = (fired.now, kernel.hz);
        if fired.gives_up <= now {
            return 0;
        }
        if self.answered == 0 || now - self.answered >= hz / 2 {
            self.answered = now;
        }
        let target = if slots.next < fired.gives_up {
            slots.next + margin(slots.next - now, hz)
        } else {
            // Nothing is sent at the end of the last interval.
            fired.gives_up
        };
        let left = target - now;
        // When a server that limits its answers is ready for the next duplicate.
        let limit = hz / 2 + hz.div_ceil(100);
        let ready = self.answered + limit;
        let added = (fired.retransmits + 1).saturating_sub(slots.passed);
        let direct = wheel::aim(self.start, now, target);
        let timer = if self.answered < slots.last && ready + hz / 10 < slots.next {
            // It did not answer the duplicate at the slot.
            ready - now
        } else if slots.passed == 0 && added <= ADDED {
            let step = least(rto, most(fired.initial_rto, hz / 5));
            if ready < now + step && ready + hz / 4 < slots.next {
                ready - now
            } else if left > step + step / 2 {
                step
            } else {
                direct
            }
        } else {
            // Equal parts of two seconds or a quarter of the elapsed time.
            let step = most(2 * hz, now / 4);
            let parts = if added <= ADDED {
                quotient(left + step / 2, step)
            } else {
                1
            };
            if parts > 1 {
                quotient(left, parts)
            } else {
                direct
            }
        };
        // A timer can only be shortened. A duplicate shortly before a slot would be answered, but then not that at the
        // slot.
        let quiet = least(least(rto.saturating_mul(2), fired.rto_max), limit);
        let timer = if timer == direct && rto < left && left < rto + quiet {
            if left > quiet + 2 {
                wheel::aim(self.start, now, target - quiet)
            } else {
                // Too early for an answer.
                least(left / 2, (ready - now).saturating_sub(hz / 20))
            }
        } else {
            timer
        };
        // Never two SYNs within ten milliseconds.
        let timer = most(timer, hz.div_ceil(100) + 1);
        if timer < rto { timer } else { 0 }
    }
}

/// [`Next::retries`], if the interval ends at `end`, before the attempt does.
#[inline(always)]
const fn retries(kernel: &Timeouts, fired: &Fired, rto: u32, end: u32) -> u32 {
    let timeouts = fired.retransmits + 1;
    let same = kernel.linear.saturating_sub(timeouts);
    let rto = if same > 0 {
        rto
    } else {
        least(rto.saturating_mul(2), fired.rto_max)
    };
    let more = rto_syn_timeouts_within(
        fired.gives_up - end,
        rto,
        same.saturating_sub(1),
        fired.rto_max,
    );
    let all = (timeouts + 1 + more).saturating_sub(kernel.linear);
    // The time ends the attempt as well, unless TCP_SYNCNT is raised.
    let by_time = (end as u64 >= kernel.model_timeout()) as u32;
    least(most(all, kernel.retries + by_time), MAX_SYNCNT)
}

/// The shortest initial RTO, jiffies, with which two SYNs are at least ten milliseconds apart.
#[must_use]
pub const fn least_initial_rto(hz: u32) -> u32 {
    most(hz.div_ceil(100), 2) - 1
}

/// The number of timeouts within a time if nothing shapes the intervals: `same` + 1 equal ones, and then they double.
/// A global function for the verifier ([`wheel::shift`]).
#[cfg_attr(target_arch = "bpf", unsafe(no_mangle), inline(never))]
const extern "C" fn rto_syn_timeouts_within(time: u32, rto: u32, same: u32, rto_max: u32) -> u32 {
    let (mut left, mut rto) = (time, most(rto, 1));
    let mut timeouts = least(same, quotient(left.saturating_sub(1), rto));
    left -= timeouts * rto;
    let mut doublings = 0;
    while doublings < 20 && left > rto && rto < rto_max {
        left -= rto;
        timeouts += 1;
        doublings += 1;
        rto = least(rto * 2, rto_max);
    }
    timeouts + quotient(left.saturating_sub(1), rto)
}

/// A retransmission at the very end of a slot's jiffy would be too early if the kernel's own were a moment later: one
/// jiffy more, unless the timer's step is so coarse that this would be a whole step.
#[inline(always)]
const fn margin(left: u32, hz: u32) -> u32 {
    ((1000 << wheel::shift(left)) <= 32 * hz) as u32
}

#[inline(always)]
const fn bounded(jiffies: u64) -> u32 {
    if jiffies < NEVER as u64 {
        lower(jiffies)
    } else {
        NEVER
    }
}

/// Two numbers in one: a global function of a BPF program takes at most five, and returns one.
#[inline(always)]
#[must_use]
pub const fn both(upper: u32, lower: u32) -> u64 {
    (upper as u64) << 32 | lower as u64
}

/// The upper of [`both`].
#[inline(always)]
#[must_use]
pub const fn upper(both: u64) -> u32 {
    (both >> 32) as u32
}

/// The lower of [`both`].
#[inline(always)]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
pub const fn lower(both: u64) -> u32 {
    both as u32
}

/// A division by 0 would panic, which the verifier rejects.
#[inline(always)]
const fn quotient(a: u32, b: u32) -> u32 {
    match a.checked_div(b) {
        Some(quotient) => quotient,
        None => 0,
    }
}

#[inline(always)]
const fn least(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}

#[inline(always)]
const fn most(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::{vec, vec::Vec};

    use super::*;

    /// The SYNs of an unanswered connect(), and when it gives up. `shapes`: as the program does, else as the kernel.
    pub(super) fn run(
        kernel: &Timeouts,
        initial_rto: u32,
        start: u32,
        shapes: bool,
    ) -> (Vec<u32>, u32) {
        let mut attempt = Attempt { start, answered: 0 };
        let (mut sent, mut rto, mut timer, mut now) = (vec![0], initial_rto, initial_rto, 0);
        let mut count = kernel.retries;
        for retransmits in 0.. {
            now = wheel::fires(start, now, timer);
            // `tcp_write_timeout()`; a program that shapes does not reply later, so the base is one second.
            let own = Timeouts {
                retries: count,
                ..*kernel
            };
            if own.has_ended(retransmits, now) {
                break;
            }
            sent.push(now);
            let fired = Fired {
                now,
                initial_rto,
                rto,
                rto_max: kernel.rto_max,
                retransmits,
                gives_up: kernel.gives_up(start),
                is_shaped: shapes,
                is_held: false,
            };
            let next = attempt.next(kernel, &fired, kernel.slots(start, now));
            if retransmits >= kernel.linear {
                rto = (rto * 2).min(kernel.rto_max);
            }
            timer = rto;
            if shapes {
                count = next.retries;
                if next.timer != 0 {
                    timer = next.timer;
                }
            }
        }
        (sent, now)
    }

    /// When connect() succeeds whose SYN-ACKs are lost before `outage`: the server answers duplicates every 500 ms at
    /// most, and each answer restarts its own timer, which is a second at first (`tcp_check_req()`, Linux 6.18).
    pub(super) fn answered(sent: &[u32], hz: u32, outage: u32) -> u32 {
        let (mut limited, mut timeouts, mut timer) = (None::<u32>, 0, hz);
        let mut sent = sent.iter().skip(1).copied().peekable();
        loop {
            let next = sent.peek().copied().unwrap_or(NEVER);
            if timer <= next {
                if timer >= outage {
                    return timer;
                }
                timeouts += 1;
                timer += hz << timeouts;
                if timeouts > 5 {
                    timer = NEVER;
                }
                if next == NEVER && timer == NEVER {
                    return NEVER;
                }
                continue;
            }
            sent.next();
            if limited.is_some_and(|at| next - at < hz / 2) {
                continue;
            }
            limited = Some(next);
            if next >= outage {
                return next;
            }
            timer = next + (hz << timeouts);
        }
    }

    const HZ: [u32; 4] = [100, 250, 300, 1000];
    const INITIAL_RTO_MS: [u32; 9] = [4, 20, 40, 60, 100, 150, 200, 333, 500];

    /// Runs `check` for each HZ, linear phase, initial RTO and some positions in the wheel's steps.
    fn each(check: impl Fn(&Timeouts, u32, u32)) {
        // The Miri interpreter takes minutes for all.
        let phases = if cfg!(miri) { 1 } else { 16 };
        for hz in HZ {
            for linear in [0, 1, 4, 10, 20, 60] {
                for ms in INITIAL_RTO_MS {
                    let rto = (ms * hz).div_ceil(1000).max(least_initial_rto(hz));
                    for phase in 0..phases {
                        check(
                            &Timeouts::kernel(hz, 6, linear),
                            rto,
                            (u32::MAX - 9999).wrapping_add(phase * 1571),
                        );
                    }
                }
            }
        }
    }

    /// The time of the first SYN at or after the end of an outage.
    fn first(sent: &[u32], outage: u32) -> u32 {
        sent[sent.partition_point(|at| *at < outage)]
    }

    #[test]
    fn slots_are_the_kernels_syns() {
        each(|kernel, _, start| {
            let (sent, gives_up) = run(kernel, kernel.hz, start, false);
            assert_eq!(kernel.gives_up(start), gives_up);
            for (n, at) in sent.iter().enumerate().skip(1) {
                let slots = kernel.slots(start, *at);
                assert_eq!((slots.passed as usize, slots.last), (n, *at));
                assert_eq!(kernel.slots(start, at - 1).next, *at);
            }
        });
    }

    #[test]
    fn connect_is_never_later_than_the_kernel_by_more_than_a_step() {
        each(|kernel, rto, start| {
            let (own, with) = (
                run(kernel, kernel.hz, start, false).0,
                run(kernel, rto, start, true).0,
            );
            // Just after each SYN of the kernel's is the worst moment for the others, and the other way round.
            for at in own.iter().chain(&with).filter(|at| **at < 60 * kernel.hz) {
                for outage in [*at, at + 1] {
                    let (own, with) = (first(&own, outage), first(&with, outage));
                    let step = if outage < 5 * kernel.hz { 40 } else { 300 };
                    let late_ms = with.saturating_sub(own) * 1000 / kernel.hz;
                    assert!(
                        late_ms <= step,
                        "{kernel:?} {rto}: {late_ms} ms after {outage}"
                    );
                }
            }
        });
    }

    #[test]
    fn lost_syn_acks_delay_by_0_3_s_or_5_percent_at_most() {
        each(|kernel, rto, start| {
            if kernel.linear > 4 {
                return;
            }
            let hz = kernel.hz;
            let (own, with) = (
                run(kernel, hz, start, false).0,
                run(kernel, rto, start, true).0,
            );
            for outage in (hz / 20..20 * hz).step_by(hz as usize / 50) {
                let (own, with) = (answered(&own, hz, outage), answered(&with, hz, outage));
                let late_ms = with.saturating_sub(own) * 1000 / hz;
                let limit = (outage * 50 / hz).max(300);
                assert!(
                    late_ms <= limit,
                    "{kernel:?} {rto}: {late_ms} ms after {outage}"
                );
            }
        });
    }

    #[test]
    fn attempt_ends_when_the_kernel_alone_would() {
        each(|kernel, rto, start| {
            for (retries, user_timeout_ms) in [
                (6, 0),
                (1, 0),
                (2, 0),
                (3, 0),
                (12, 0),
                (6, 2500),
                (6, 8000),
            ] {
                let kernel = Timeouts {
                    retries,
                    user_timeout_ms,
                    ..*kernel
                };
                let (sent, end) = run(&kernel, rto, start, true);
                if user_timeout_ms != 0 {
                    // The kernel ends it; no SYN is late for the end.
                    assert!(sent.last().is_some_and(|at| *at <= end));
                    continue;
                }
                let expected = kernel.gives_up(start);
                // Timers of seconds end at whole steps.
                let step = 1 << wheel::shift(expected - sent.last().unwrap());
                assert!(
                    end.abs_diff(expected) <= step,
                    "{kernel:?} {rto}: {end} for {expected}"
                );
            }
        });
    }

    #[test]
    fn fewer_retries_end_an_unshaped_attempt() {
        each(|kernel, _, start| {
            for fewer in 1..6 {
                let gives_up = Timeouts {
                    retries: fewer,
                    ..*kernel
                }
                .gives_up(start);
                let mut attempt = Attempt { start, answered: 0 };
                let (mut now, mut rto, mut count) = (0, kernel.hz, kernel.retries);
                for retransmits in 0.. {
                    now = wheel::fires(start, now, rto);
                    let own = Timeouts {
                        retries: count,
                        ..*kernel
                    };
                    if own.has_ended(retransmits, now) {
                        break;
                    }
                    let fired = Fired {
                        now,
                        initial_rto: kernel.hz,
                        rto,
                        rto_max: kernel.rto_max,
                        retransmits,
                        gives_up,
                        is_shaped: false,
                        is_held: false,
                    };
                    count = attempt
                        .next(kernel, &fired, kernel.slots(start, now))
                        .retries;
                    if retransmits >= kernel.linear {
                        rto *= 2;
                    }
                }
                assert_eq!(now, gives_up, "{kernel:?} {fewer}");
            }
        });
    }

    #[test]
    fn syns_are_few_and_never_close() {
        each(|kernel, rto, start| {
            let (own, with) = (
                run(kernel, kernel.hz, start, false).0,
                run(kernel, rto, start, true).0,
            );
            let close = with
                .windows(2)
                .skip(1)
                .any(|pair| (pair[1] - pair[0]) * 100 < kernel.hz);
            assert!(!close, "{kernel:?} {rto}: {with:?}");
            // In the linear phase the kernel's interval cannot be lengthened.
            let added = (ADDED + kernel.linear + 2) as usize;
            assert!(
                with.len() <= own.len() + added,
                "{kernel:?} {rto}: {}",
                with.len()
            );
            if kernel.linear == 4 {
                assert!(with.len() <= 32);
            }
            let in_20_s = |sent: &[u32]| sent.partition_point(|at| *at < 20 * kernel.hz) - 1;
            let limit = if kernel.linear == 4 { 24 } else { 30 };
            if rto * 10 == kernel.hz && matches!(kernel.linear, 0 | 4) {
                assert!(
                    in_20_s(&with) * 10 <= in_20_s(&own) * limit + 20,
                    "{kernel:?}: {with:?}"
                );
            }
        });
    }

    #[test]
    fn unshaped_attempt_lasts_as_long() {
        // The program goes away after some of the timeouts: TCP_SYNCNT must not end the attempt.
        each(|kernel, rto, start| {
            for shaped in 1..12 {
                let mut attempt = Attempt { start, answered: 0 };
                let (mut now, mut interval, mut timer, mut count) = (0, rto, rto, kernel.retries);
                let gives_up = kernel.gives_up(start);
                for retransmits in 0.. {
                    now = wheel::fires(start, now, timer);
                    let ends = retransmits >= count + kernel.linear;
                    if ends || now >= gives_up {
                        assert!(
                            now >= gives_up - 1,
                            "{kernel:?} {rto} {shaped}: {now} for {gives_up}"
                        );
                        break;
                    }
                    let fired = Fired {
                        now,
                        initial_rto: rto,
                        rto: interval,
                        rto_max: kernel.rto_max,
                        retransmits,
                        gives_up,
                        is_shaped: retransmits < shaped,
                        is_held: false,
                    };
                    let next = attempt.next(kernel, &fired, kernel.slots(start, now));
                    if retransmits >= kernel.linear {
                        interval = (interval * 2).min(kernel.rto_max);
                    }
                    timer = interval;
                    if retransmits < shaped {
                        count = next.retries;
                    }
                    if next.timer != 0 {
                        timer = next.timer;
                    }
                }
            }
        });
    }

    #[test]
    fn steps_of_63_504_and_4032_jiffies_belong_to_the_finer_level() {
        for (delta, step) in [(63, 1), (504, 8), (4032, 64)] {
            let fires = |delta| wheel::fires(0, 1, delta);
            assert_eq!(fires(delta) % step, 0);
            assert!(fires(delta) - 1 - delta <= step, "{delta}");
            assert_eq!(fires(delta + 1) % (step * 8), 0);
        }
    }
}
