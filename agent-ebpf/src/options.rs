//! TCP options that a policy sets, and how they are restored.
//!
//! Invariant: an option is set only if the socket has a different value, and the former value is kept in the socket's
//! storage. So the application's own value is not lost when the socket is reconnected to another peer or when
//! everything is restored. A value of the application that is stricter than the policy's stays ([`is_stricter`]).
//! (Before Linux 6.1 a program cannot read most options, and before 6.15 neither TCP_BPF_RTO_MIN nor
//! TCP_BPF_DELACK_MAX: there the kernel's default is restored instead.)

use core::{arch::asm, ffi::c_void};

use aya_ebpf::{
    bindings::bpf_sock_ops,
    helpers::generated::{bpf_getsockopt, bpf_setsockopt},
    programs::SockOpsContext,
};
use rto_agent_common::{
    Options, Policy, Remembered, SockOpt, SocketState,
    policy_flags::{THIN_LINEAR, THIN_LINEAR_SET},
    restart, settled, socket_flags,
};
use rto_agent_ebpf::counter::Counter;

use crate::{
    socket::read,
    storage,
    tables::{Tally, bounded},
};

const SOL_TCP: i32 = 6;

// include/uapi/linux/tcp.h; numbers above 1000 are from include/uapi/linux/bpf.h.
const TCP_SYNCNT: i32 = 7;
const TCP_THIN_LINEAR_TIMEOUTS: i32 = 16;
const TCP_USER_TIMEOUT: i32 = 18;
const TCP_RTO_MAX_MS: i32 = 44;
const TCP_BPF_IW: i32 = 1001;
const TCP_BPF_DELACK_MAX: i32 = 1003;
const TCP_BPF_RTO_MIN: i32 = 1004;
const TCP_BPF_SOCK_OPS_CB_FLAGS: i32 = 1008;

/// The kernel's own values, for sockets whose options cannot be read.
#[derive(Clone, Copy)]
pub(crate) struct Defaults {
    pub(crate) rto_min_us: u32,
    pub(crate) rto_max_ms: u32,
}

/// `TCP_RTO_MIN` and `TCP_RTO_MAX`.
pub(crate) const KERNEL: Defaults = Defaults {
    rto_min_us: LARGEST_US,
    rto_max_ms: 120_000,
};
/// `TCP_RTO_MIN` and `TCP_DELACK_MAX`: also the largest values the options take, though a
/// namespace's default may be larger.
pub(crate) const LARGEST_US: u32 = 200_000;

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

    /// The same, with options that are not in its storage.
    #[inline(always)]
    pub(crate) fn unstored(self) -> Self {
        Self {
            is_stored: false,
            ..self
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
        // SAFETY: the value is on the stack and four bytes long, as every option here takes it.
        unsafe { bpf_setsockopt(self.owner, SOL_TCP, number(option), pointer, 4) }
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
        // SAFETY: the buffer is on the stack and has the length that is passed.
        let answer = unsafe {
            bpf_getsockopt(
                self.owner,
                SOL_TCP,
                number(option),
                (&raw mut value).cast(),
                4,
            )
        };
        // Read in any case: the compiler may compute with a register that has no value where there is none, which the
        // verifier refuses.
        // SAFETY: a variable on the stack.
        let value = unsafe { read(&raw const value) };
        if answer == 0 { Ok(value) } else { Err(answer) }
    }

    /// Sets SO_TXREHASH: whether a retransmission changes the hash by which routers choose a path. (Linux 6.1; this
    /// option belongs to another level than the others.)
    #[inline(always)]
    pub(crate) fn rehash(self, on: bool) -> bool {
        const SOL_SOCKET: i32 = 1;
        const SO_TXREHASH: i32 = 74;
        let mut value = u32::from(on);
        let pointer = (&raw mut value).cast();
        // SAFETY: the value is on the stack and has the length that is passed.
        unsafe { bpf_setsockopt(self.owner, SOL_SOCKET, SO_TXREHASH, pointer, 4) == 0 }
    }

    /// Sets an option to `wanted` and remembers its former value. `None`: restores the value from before a policy set
    /// the option.
    #[inline(always)]
    fn settle(
        self,
        option: SockOpt,
        remembered: &mut Remembered,
        wanted: Option<u32>,
        settled: &mut u16,
        default: u32,
        tally: Tally,
    ) {
        if wanted.is_none() && !remembered.is_set() {
            return;
        }
        if self.is_stored {
            let wanted = wanted.map_or(RESTORE, u64::from);
            changed_elsewhere(remembered);
            rto_settle(
                self.owner.cast(),
                option as u32,
                wanted,
                default,
                tally.key(),
            );
            changed_elsewhere(remembered);
        } else {
            note(
                settled,
                self.settled(option, remembered, wanted, default, tally),
            );
        }
    }

    /// [`Target::settle`]; returns a bit of [`settled`], or 0.
    #[inline(always)]
    fn settled(
        self,
        option: SockOpt,
        remembered: &mut Remembered,
        wanted: Option<u32>,
        default: u32,
        tally: Tally,
    ) -> u16 {
        let in_force = self.get(option);
        let own = remembered.before(in_force);
        let wanted = wanted.filter(|wanted| !is_stricter(option, own, *wanted));
        let Some(wanted) = wanted else {
            let before = remembered.to_restore(in_force, default);
            if let Some(before) = before
                && !self.set(option, at_most(option, before), tally)
            {
                return settled::REFUSED;
            }
            *remembered = Remembered::default();
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
        *remembered = Remembered::new(wanted, own);
        settled::CHANGED
    }

    /// Sets only rto_min, for a socket whose policy is not chosen yet.
    #[inline(always)]
    pub(crate) fn rto_min(self, options: &mut Options, micros: u32, tally: Tally) {
        self.settle(
            SockOpt::RtoMin,
            &mut options.rto_min,
            unless_zero(micros),
            &mut options.settled,
            KERNEL.rto_min_us,
            tally,
        );
    }

    /// Sets only rto_max, for a connection whose SYNs had the kernel's own; 0 restores the former value.
    #[inline(always)]
    pub(crate) fn rto_max(self, options: &mut Options, millis: u32, tally: Tally) {
        self.settle(
            SockOpt::RtoMax,
            &mut options.rto_max,
            unless_zero(millis),
            &mut options.settled,
            KERNEL.rto_max_ms,
            tally,
        );
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
        let last = options.rto_min.value().unwrap_or(base_us);
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
        options.rto_min = Remembered::new(wanted, options.rto_min.before(in_force));
    }

    /// Sets the options of a policy that are allowed before the handshake is complete, with this rto_max (0: none).
    #[inline(always)]
    pub(crate) fn apply(
        self,
        state: &mut SocketState,
        policy: &Policy,
        rto_max_ms: u32,
        defaults: Defaults,
        tally: Tally,
    ) {
        state.options.linear_retries = short(policy.linear_retries);
        state.options.restart_hz = short(policy.restart_hz);
        state.options.restart_rto_min_us = policy.rto_min_us;
        self.linear_mode_on(state, tally);
        let timers = [
            unless_zero(policy.rto_min_us),
            unless_zero(policy.delack_max_us),
        ];
        self.timers(&mut state.options, timers, defaults, tally);
        // Read here, because the verifier would follow what is above for each of its values.
        // SAFETY: a field of a map value.
        let flags = unsafe { read(&raw const policy.flags) };
        let thin = (flags & THIN_LINEAR_SET != 0).then_some((flags / THIN_LINEAR) & 1);
        self.later(
            &mut state.options,
            [thin, unless_zero(rto_max_ms)],
            defaults,
            tally,
        );
    }

    /// Restores every option that the program set, user_timeout included.
    #[inline(always)]
    pub(crate) fn restore(self, state: &mut SocketState, defaults: Defaults, tally: Tally) {
        state.options.linear_retries = 0;
        state.options.restart_hz = 0;
        self.linear_mode_on(state, tally);
        self.timers(&mut state.options, [None; 2], defaults, tally);
        self.later(&mut state.options, [None; 2], defaults, tally);
        self.user_timeout(&mut state.options, 0, tally);
    }

    #[inline(always)]
    fn later(
        self,
        options: &mut Options,
        [thin, rto_max]: [Option<u32>; 2],
        defaults: Defaults,
        tally: Tally,
    ) {
        self.settle(
            SockOpt::ThinLinear,
            &mut options.thin_linear,
            thin,
            &mut options.settled,
            0,
            tally,
        );
        self.settle(
            SockOpt::RtoMax,
            &mut options.rto_max,
            rto_max,
            &mut options.settled,
            defaults.rto_max_ms,
            tally,
        );
    }

    #[inline(always)]
    pub(crate) fn timers(
        self,
        options: &mut Options,
        [rto_min, delack_max]: [Option<u32>; 2],
        defaults: Defaults,
        tally: Tally,
    ) {
        let settled = &mut options.settled;
        self.settle(
            SockOpt::RtoMin,
            &mut options.rto_min,
            rto_min,
            settled,
            defaults.rto_min_us,
            tally,
        );
        self.settle(
            SockOpt::DelackMax,
            &mut options.delack_max,
            delack_max,
            settled,
            LARGEST_US,
            tally,
        );
    }

    /// Sets TCP_USER_TIMEOUT; 0 restores the former value.
    #[inline(always)]
    pub(crate) fn user_timeout(self, options: &mut Options, millis: u32, tally: Tally) {
        self.settle(
            SockOpt::UserTimeout,
            &mut options.user_timeout,
            unless_zero(millis),
            &mut options.settled,
            0,
            tally,
        );
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

/// [`Target::apply`] for a context's socket, in one place of the program.
#[inline(never)]
pub(crate) fn apply(
    ops: *mut bpf_sock_ops,
    state: &mut SocketState,
    policy: &Policy,
    rto_max_ms: u32,
    tally: Tally,
) {
    Target::of(&SockOpsContext::new(ops)).apply(state, policy, rto_max_ms, KERNEL, tally);
}

/// [`Target::restore`] likewise.
#[inline(never)]
pub(crate) fn restore(ops: *mut bpf_sock_ops, state: &mut SocketState, tally: Tally) {
    Target::of(&SockOpsContext::new(ops)).restore(state, KERNEL, tally);
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
    const FIRST: u32 = SockOpt::RtoMin as u32;
    const {
        use core::mem::offset_of;
        assert!(offset_of!(Options, rto_min) == 0);
        let last = (SockOpt::UserTimeout as u32 - FIRST) as usize;
        assert!(offset_of!(Options, user_timeout) == last * size_of::<Remembered>());
    }
    let Some(option) = SockOpt::of(option) else {
        return 0;
    };
    let index = bounded::<8>((option as u32).wrapping_sub(FIRST) as usize);
    // SAFETY: the caller does not use its reference to the storage during the call ([`changed_elsewhere`]).
    let (ctx, mut storage) = unsafe { storage::context(ops) };
    if let Some(state) = storage.find() {
        // SAFETY: the options' first fields; the verifier checks the access.
        let remembered = unsafe { &mut *(&raw mut state.options).cast::<Remembered>().add(index) };
        #[expect(clippy::cast_possible_truncation, reason = "the upper half is RESTORE")]
        let wanted = (wanted & RESTORE == 0).then_some(wanted as u32);
        let tally = Tally::of_key(tally);
        Target::of(&ctx).settled(option, remembered, wanted, default, tally);
    }
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

/// Narrows a number that fits: at most 6 retries, 10,000 jiffies per second, or the bits of callbacks.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "it fits")]
pub(crate) const fn short(number: u32) -> u16 {
    number as u16
}

/// Adds to [`Options::settled`] in memory; its documentation gives the reason.
#[inline(always)]
fn note(settled: &mut u16, outcome: u16) {
    // SAFETY: a reference is valid for reads and writes.
    unsafe { core::ptr::write_volatile(settled, core::ptr::read_volatile(settled) | outcome) };
}

/// Whether a socket's own value of an option, which the application or a sysctl has set, is stricter than a policy's, and
/// therefore stays. [`Remembered::UNKNOWN`] is not.
#[inline(always)]
fn is_stricter(option: SockOpt, own: u32, policys: u32) -> bool {
    match option {
        // Any value is the application's: the kernel's own is 0.
        SockOpt::UserTimeout => own != 0 && own != Remembered::UNKNOWN,
        SockOpt::ThinLinear => own == 1 && policys == 0,
        SockOpt::RtoMin | SockOpt::DelackMax | SockOpt::RtoMax => own < policys,
        _ => false,
    }
}

/// 0 means that the policy does not set the option.
#[inline(always)]
fn unless_zero(value: u32) -> Option<u32> {
    if value == 0 { None } else { Some(value) }
}

#[inline(always)]
fn at_most(option: SockOpt, value: u32) -> u32 {
    match option {
        SockOpt::RtoMin | SockOpt::DelackMax if value > LARGEST_US => LARGEST_US,
        _ => value,
    }
}

#[inline(always)]
fn number(option: SockOpt) -> i32 {
    match option {
        SockOpt::SynCnt => TCP_SYNCNT,
        SockOpt::RtoMin => TCP_BPF_RTO_MIN,
        SockOpt::DelackMax => TCP_BPF_DELACK_MAX,
        SockOpt::ThinLinear => TCP_THIN_LINEAR_TIMEOUTS,
        SockOpt::RtoMax => TCP_RTO_MAX_MS,
        SockOpt::UserTimeout => TCP_USER_TIMEOUT,
        SockOpt::InitialWindow => TCP_BPF_IW,
        SockOpt::CbFlags => TCP_BPF_SOCK_OPS_CB_FLAGS,
    }
}
