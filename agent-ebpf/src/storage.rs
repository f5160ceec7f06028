//! Socket storage: the state of a socket between callbacks.

use core::{ffi::c_void, marker::PhantomData};

use aya_ebpf::{
    bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock_ops},
    btf_maps::SkStorage,
    helpers::generated::bpf_sk_storage_get,
    programs::SockOpsContext,
};
use rto_agent_common::{SocketState, arm};

use crate::{socket::sk, tables::SOCKETS};

/// What to do if a socket has no storage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Leave,
    Create,
}

/// The storage of the socket that this run of the program is for. A reference to the socket's state borrows this value,
/// so that there is only one such reference.
///
/// Invariant: the kernel holds the socket's lock in every callback of a full socket (`tcp_call_bpf()` asserts it, Linux
/// 6.12), so no other CPU accesses its storage at the same time.
pub(crate) struct Storage<'run> {
    sk: *mut c_void,
    run: PhantomData<&'run mut SocketState>,
}

impl Storage<'_> {
    /// The storage of a sock_ops context's socket. A context without a full socket has no storage.
    ///
    /// # Safety
    ///
    /// No other `Storage` may be in use while this one is.
    #[inline(always)]
    pub(crate) unsafe fn of(ctx: &SockOpsContext) -> Self {
        Self {
            sk: sk(ctx),
            run: PhantomData,
        }
    }

    /// The storage of a socket that the verifier tracks.
    ///
    /// # Safety
    ///
    /// As for [`Storage::of`]; and the kernel must hold the socket's lock.
    #[inline(always)]
    pub(crate) unsafe fn of_socket(sk: *mut c_void) -> Self {
        Self {
            sk,
            run: PhantomData,
        }
    }

    /// The socket's state; `None` if it has no storage.
    #[inline(always)]
    pub(crate) fn find(&mut self) -> Option<&mut SocketState> {
        self.get(Missing::Leave)
    }

    /// The socket's state, created if it has no storage; `None` if there is no memory.
    #[inline(always)]
    pub(crate) fn make(&mut self) -> Option<&mut SocketState> {
        self.get(Missing::Create)
    }

    /// The socket's state, if a policy was chosen for it.
    #[inline(always)]
    pub(crate) fn of_policy(&mut self) -> Option<&mut SocketState> {
        self.find().filter(|state| state.arm != arm::NONE)
    }

    #[inline(always)]
    fn get(&mut self, missing: Missing) -> Option<&mut SocketState> {
        if self.sk.is_null() {
            return None;
        }
        // SAFETY: null, or the socket's own value, whose size is defined by the map.
        unsafe {
            value(&SOCKETS, self.sk, missing)
                .cast::<SocketState>()
                .as_mut()
        }
    }
}

/// The context of an operation's function, and its socket's storage.
///
/// # Safety
///
/// No other `Storage` may be in use while this one is.
#[inline(always)]
pub(crate) unsafe fn context<'run>(ops: *mut bpf_sock_ops) -> (SockOpsContext, Storage<'run>) {
    let ctx = SockOpsContext::new(ops);
    // SAFETY: by the contract.
    let storage = unsafe { Storage::of(&ctx) };
    (ctx, storage)
}

/// Whether a socket can have storage in this map.
#[inline(always)]
pub(crate) fn probe<T>(ctx: &SockOpsContext, map: &SkStorage<T>) -> bool {
    let sk = sk(ctx);
    !sk.is_null() && !value(map, sk, Missing::Create).is_null()
}

#[inline(always)]
fn value<T>(map: &SkStorage<T>, sk: *mut c_void, missing: Missing) -> *mut c_void {
    let flags = if missing == Missing::Create {
        BPF_SK_STORAGE_GET_F_CREATE
    } else {
        0
    };
    // SAFETY: the map is a socket storage map; `sk` is a socket that the verifier tracks, not null.
    unsafe {
        bpf_sk_storage_get(
            core::ptr::from_ref(map).cast_mut().cast(),
            sk,
            core::ptr::null_mut(),
            flags.into(),
        )
        .cast()
    }
}
