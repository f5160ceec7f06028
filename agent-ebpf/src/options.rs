//! Socket options: how the rows of [`rto_agent_common::SOCKET_OPTIONS`] are set and restored.
//!
//! Invariant: an option is set only if the socket has a different value, and the former value is kept in the socket's
//! storage. So the application's own value is not lost when the socket is reconnected to another peer or when
//! everything is restored. A value of the application that is stricter than the policy's stays
//! ([`SockOpt::keeps_own`]). (Before Linux 6.1 a program cannot read most options, and before 6.15 neither
//! TCP_BPF_RTO_MIN nor TCP_BPF_DELACK_MAX: there the kernel's default is restored instead.)
//!
//! [`each_option`] unrolls the table, so that the option is a constant wherever it matters to the verifier.

use core::{arch::asm, ffi::c_void};

use aya_ebpf::{
    bindings::bpf_sock_ops,
    helpers::generated::{bpf_getsockopt, bpf_setsockopt},
    programs::SockOpsContext,
};
use rto_agent_common::{
    Options, Policy, SockOpt, SocketState, WalkControl, When, restart, settled, socket_flags,
};
use rto_agent_ebpf::counter::Counter;

use crate::{socket::read, storage, tables::Tally};

/// Runs a statement for each row of the table; `$option` is a constant in it. (A loop would make the option a variable,
/// and with it the place in the storage.) Copies beyond the table's end are empty.
macro_rules! each_option {
    ($option:ident => $statement:expr) => {
        $crate::options::each_option!(@ $option => $statement; 0 1 2 3 4 5 6 7 8 9 10 11)
    };
    (@ $option:ident => $statement:expr; $($index:literal)*) => {{
        const { assert!(SockOpt::COUNT <= 12, "add an index to each_option!") };
        $(
            if $index < SockOpt::COUNT {
                const $option: SockOpt = SockOpt::at($index);
                $statement
            }
        )*
    }};
}
pub(crate) use each_option;

/// The same for the options that a policy sets; `$kept` is the constant [`rto_agent_common::Kept`].
macro_rules! each_kept {
    ($option:ident, $kept:ident => $statement:expr) => {
        each_option!($option => {
            const KEPT_BY_POLICY: Option<rto_agent_common::Kept> = $option.row().kept;
            if let Some($kept) = KEPT_BY_POLICY {
                $statement
            }
        })
    };
}

/// Values to restore where the former one of a socket cannot be read.
#[derive(Clone, Copy)]
pub(crate) enum Defaults<'a> {
    /// The kernel's own.
    Kernel,
    /// The namespace's.
    Namespace(&'a WalkControl),
}

impl Defaults<'_> {
    #[inline(always)]
    pub(crate) fn of(self, option: SockOpt, kernels: u32) -> u32 {
        match self {
            Defaults::Kernel => kernels,
            Defaults::Namespace(control) => control.defaults[option as usize],
        }
    }
}

/// The owner of the options.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    /// The first argument of bpf_setsockopt.
    owner: *mut c_void,
    /// Whether [`Options`] that are passed with this target are those in the storage of a context's socket.
    is_stored: bool,
}

impl Target {
    /// The socket of a sock_ops context.
    #[inline(always)]
    pub(crate) fn of(ctx: &SockOpsContext) -> Self {
        Self {
            owner: ctx.ops.cast(),
            is_stored: true,
        }
    }

    /// A `struct sock` or `struct sock_common`, not null, that the verifier tracks and whose lock
    /// the kernel holds.
    #[inline(always)]
    pub(crate) fn socket(sk: *mut c_void) -> Self {
        Self {
            owner: sk,
            is_stored: false,
        }
    }

    /// Sets an option and returns whether the kernel accepted it; a refusal is counted.
    #[inline(always)]
    pub(crate) fn set(self, option: SockOpt, value: u32, tally: Tally) -> bool {
        let failed = self.try_set(option, value) != 0;
        if failed {
            tally.add(Counter::failures_of(option), 1);
        }
        !failed
    }

    /// Sets an option; returns 0 or the kernel's error, a negative errno.
    #[inline(always)]
    pub(crate) fn try_set(self, option: SockOpt, value: u32) -> i64 {
        let mut value = value;
        let pointer = (&raw mut value).cast();
        let row = option.row();
        // SAFETY: the value is on the stack and four bytes long, as every option here takes it.
        unsafe { bpf_setsockopt(self.owner, row.level, row.number, pointer, 4) }
    }

    /// The option's value; `None` if the kernel does not report it.
    #[inline(always)]
    pub(crate) fn get(self, option: SockOpt) -> Option<u32> {
        self.try_get(option).ok()
    }

    /// The option's value, or the kernel's error.
    #[inline(always)]
    pub(crate) fn try_get(self, option: SockOpt) -> Result<u32, i64> {
        let mut value = 0u32;
        let pointer = (&raw mut value).cast();
        let row = option.row();
        // SAFETY: the buffer is on the stack and has the length that is passed.
        let answer = unsafe { bpf_getsockopt(self.owner, row.level, row.number, pointer, 4) };
        // Read in any case: the compiler may compute with a register that has no value where there is none, which the
        // verifier refuses.
        // SAFETY: a variable on the stack.
        let value = unsafe { read(&raw const value) };
        if answer == 0 { Ok(value) } else { Err(answer) }
    }

    /// Sets an option to `wanted` and remembers its former value. `None`: restores the value from before a policy set
    /// the option.
    #[inline(always)]
    fn settle(
        self,
        options: &mut Options,
        option: SockOpt,
        wanted: Option<u32>,
        default: u32,
        tally: Tally,
    ) {
        if wanted.is_none() && !options.is_set(option) {
            return;
        }
        if self.is_stored {
            let wanted = wanted.map_or(RESTORE, u64::from);
            changed_elsewhere(options);
            rto_settle(
                self.owner.cast(),
                option as u32,
                wanted,
                default,
                tally.key(),
            );
            changed_elsewhere(options);
        } else {
            let outcome = self.settled(options, option, wanted, default, tally);
            note(&mut options.settled, outcome);
        }
    }

    /// [`Target::settle`]; returns a bit of [`settled`], or 0.
    #[inline(always)]
    fn settled(
        self,
        options: &mut Options,
        option: SockOpt,
        wanted: Option<u32>,
        default: u32,
        tally: Tally,
    ) -> u8 {
        let in_force = self.get(option);
        let own = options.before(option, in_force);
        let wanted = wanted.filter(|wanted| !option.keeps_own(own, *wanted));
        let Some(wanted) = wanted else {
            let before = options.to_restore(option, in_force, default);
            if let Some(before) = before
                && !self.set(option, at_most(option, before), tally)
            {
                return settled::REFUSED;
            }
            options.forget(option);
            return if before.is_some() {
                settled::CHANGED
            } else {
                0
            };
        };
        if in_force == Some(wanted) {
            return 0;
        }
        if !self.set(option, wanted, tally) {
            return settled::REFUSED;
        }
        options.note(option, wanted, own);
        settled::CHANGED
    }

    /// Sets the rto_min for an RTT and a number of outstanding segments, if the policy has `rto_restart`. It calls the
    /// kernel only if this value differs from the one set last.
    #[inline(always)]
    pub(crate) fn restart(
        self,
        options: &mut Options,
        rtt_us: u32,
        outstanding: u32,
        tally: Tally,
    ) {
        let base_us = options.restart_rto_min_us;
        let wanted = restart::rto_min_us(base_us, rtt_us, options.restart_hz.into(), outstanding);
        // If the socket already had the policy's value, nothing was set yet.
        let last = options.value(SockOpt::RtoMin).unwrap_or(base_us);
        if wanted == last {
            return;
        }
        let in_force = self.get(SockOpt::RtoMin);
        // The application or another program has set a different value since; it stays.
        let is_another = in_force.is_some_and(|value| value != last);
        if is_another || !self.set(SockOpt::RtoMin, wanted, tally) {
            options.restart_hz = 0;
            return;
        }
        let before = options.before(SockOpt::RtoMin, in_force);
        options.note(SockOpt::RtoMin, wanted, before);
    }

    /// Sets the options of a policy, except those of [`When::Established`], and notes what is to be set later.
    /// `has_timer`: the policy's timer decides when the SYN is retransmitted. An option with a later moment that a former
    /// policy of the socket has set was restored before.
    #[inline(always)]
    fn connect(self, state: &mut SocketState, policy: &Policy, has_timer: bool, tally: Tally) {
        self.begin(state, policy, tally);
        each_kept!(OPTION, kept => {
            let policy = reread(policy);
            let wanted = OPTION.wanted(policy);
            let options = &mut state.options;
            match kept.when {
                When::Connecting => self.settle(options, OPTION, wanted, kept.former, tally),
                When::ConnectingWithTimer => {
                    let now = if has_timer { wanted } else { None };
                    self.settle(options, OPTION, now, kept.former, tally);
                }
                When::Established => {}
            }
        });
        each_kept!(OPTION, kept => {
            if kept.when != When::Connecting && let Some(value) = OPTION.wanted(reread(policy)) {
                state.options.set_later(OPTION, value);
            }
        });
    }

    /// Sets all options of a policy, on a socket that is established.
    #[inline(always)]
    pub(crate) fn apply(
        self,
        state: &mut SocketState,
        policy: &Policy,
        defaults: Defaults<'_>,
        tally: Tally,
    ) {
        self.begin(state, policy, tally);
        each_kept!(OPTION, kept => {
            let wanted = OPTION.wanted(reread(policy));
            let default = defaults.of(OPTION, kept.former);
            self.settle(&mut state.options, OPTION, wanted, default, tally);
        });
    }

    #[inline(always)]
    fn begin(self, state: &mut SocketState, policy: &Policy, tally: Tally) {
        state.options.set_nothing_later();
        state.options.linear_retries = byte(policy.linear_retries);
        state.options.restart_hz = policy.restart_hz;
        state.options.restart_rto_min_us = policy.rto_min_us;
        self.linear_mode_on(state, tally);
    }

    /// Restores every option that the program set.
    #[inline(always)]
    pub(crate) fn restore(self, state: &mut SocketState, defaults: Defaults<'_>, tally: Tally) {
        state.options.set_nothing_later();
        state.options.linear_retries = 0;
        state.options.restart_hz = 0;
        self.linear_mode_on(state, tally);
        each_kept!(OPTION, kept => {
            let default = defaults.of(OPTION, kept.former);
            self.settle(&mut state.options, OPTION, None, default, tally);
        });
    }

    /// Sets what was left for the moment in which the connection is established.
    #[inline(always)]
    pub(crate) fn established(self, options: &mut Options, tally: Tally) {
        each_kept!(OPTION, kept => {
            if kept.when != When::Connecting && let Some(value) = options.later(OPTION) {
                self.settle(options, OPTION, Some(value), kept.former, tally);
            }
        });
        options.set_nothing_later();
    }

    /// Restores the options that would make the next connect() give up earlier.
    #[inline(always)]
    pub(crate) fn restore_established(self, options: &mut Options, tally: Tally) {
        each_kept!(OPTION, kept => {
            if kept.when == When::Established {
                self.settle(options, OPTION, None, kept.former, tally);
            }
        });
    }

    /// Sets or restores the options that have a property: a bit of [`rto_agent_common::also`].
    #[inline(always)]
    pub(crate) fn settle_those<const PROPERTY: u32>(
        self,
        options: &mut Options,
        policy: Option<&Policy>,
        defaults: Defaults<'_>,
        tally: Tally,
    ) {
        each_kept!(OPTION, kept => {
            if kept.also & PROPERTY != 0 {
                let wanted = match policy {
                    Some(policy) => OPTION.wanted(policy),
                    None => None,
                };
                let default = defaults.of(OPTION, kept.former);
                self.settle(options, OPTION, wanted, default, tally);
            }
        });
    }

    /// Sets a former value; returns a bit of [`settled`].
    #[inline(always)]
    pub(crate) fn put_back(self, option: SockOpt, before: u32) -> u8 {
        if self.set(option, at_most(option, before), Tally::NOBODY) {
            settled::CHANGED
        } else {
            settled::REFUSED
        }
    }

    /// Switches linear mode on again if the RTO hook has switched it off.
    #[inline(always)]
    pub(crate) fn linear_mode_on(self, state: &mut SocketState, tally: Tally) {
        if state.flags & socket_flags::LINEAR_OFF != 0 {
            state.flags &= !socket_flags::LINEAR_OFF;
            let _taken = self.set(SockOpt::ThinLinear, 1, tally);
        }
    }
}

// In one place of the program each, for a context's socket.

/// [`Target::connect`]; `has_timer` is 1 or 0.
#[inline(never)]
pub(crate) fn connect(
    ops: *mut bpf_sock_ops,
    state: &mut SocketState,
    policy: &Policy,
    has_timer: u32,
    tally: Tally,
) {
    Target::of(&SockOpsContext::new(ops)).connect(state, policy, has_timer != 0, tally);
}

/// [`Target::apply`].
#[inline(never)]
pub(crate) fn apply(
    ops: *mut bpf_sock_ops,
    state: &mut SocketState,
    policy: &Policy,
    tally: Tally,
) {
    Target::of(&SockOpsContext::new(ops)).apply(state, policy, Defaults::Kernel, tally);
}

/// [`Target::restore`].
#[inline(never)]
pub(crate) fn restore(ops: *mut bpf_sock_ops, state: &mut SocketState, tally: Tally) {
    Target::of(&SockOpsContext::new(ops)).restore(state, Defaults::Kernel, tally);
}

/// The argument of [`rto_settle`] that stands for "no value".
const RESTORE: u64 = 1 << 32;

/// [`Target::settle`] for options in the storage of a context's socket. A global function: see `tables`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rto_settle(
    ops: *mut bpf_sock_ops,
    option: u32,
    wanted: u64,
    default: u32,
    tally: u32,
) -> u32 {
    // SAFETY: the caller does not use its reference to the storage during the call ([`changed_elsewhere`]).
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    let Some(state) = storage.find() else {
        return 0;
    };
    let target = Target::of(&ctx);
    let tally = Tally::of_key(tally);
    #[expect(clippy::cast_possible_truncation, reason = "the upper half is RESTORE")]
    let wanted = (wanted & RESTORE == 0).then_some(wanted as u32);
    each_kept!(OPTION, _kept => {
        if option == OPTION as u32 {
            target.settled(&mut state.options, OPTION, wanted, default, tally);
        }
    });
    0
}

/// Makes the compiler assume that this part of a storage was read or changed by another function. (The instruction does
/// nothing. Without any, two lines of the source would have the same address, which the kernel rejects.)
#[inline(always)]
fn changed_elsewhere<T>(part: &mut T) {
    // SAFETY: copies a register to itself.
    unsafe {
        asm!("{part} = {part}", part = inout(reg) &raw mut *part => _, options(nostack));
    }
}

/// The same policy, whose fields are read again: what the program has read once, the verifier would follow for each of
/// its values through all that comes after.
#[inline(always)]
fn reread(policy: &Policy) -> &Policy {
    let mut policy: *const Policy = policy;
    // SAFETY: copies a register to itself.
    unsafe {
        asm!("{policy} = {policy}", policy = inout(reg) policy, options(nostack));
        &*policy
    }
}

/// Narrows a number that fits: at most 6 retries.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "it fits")]
const fn byte(number: u32) -> u8 {
    number as u8
}

/// Adds to [`Options::settled`] in memory; its documentation gives the reason.
#[inline(always)]
fn note(settled: &mut u8, outcome: u8) {
    // SAFETY: a reference is valid for reads and writes.
    unsafe { core::ptr::write_volatile(settled, core::ptr::read_volatile(settled) | outcome) };
}

/// A value that the option takes.
#[inline(always)]
const fn at_most(option: SockOpt, value: u32) -> u32 {
    match option.row().kept {
        Some(kept) if value > kept.largest => kept.largest,
        _ => value,
    }
}
