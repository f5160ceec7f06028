//! What sockets remember.

use core::{ffi::c_void, marker::PhantomData};

use aya_ebpf::{
    bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock_ops},
    btf_maps::SkStorage,
    helpers::generated::bpf_sk_storage_get,
    programs::SockOpsContext,
};
use rto_agent_common::{SocketState, arm};

use crate::{socket::sk, tables::SOCKETS};

/// What to do about storage a socket does not have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Leave,
    Create,
}

/// The storage of the one socket that a run of a program is for. A reference to the socket's state borrows this, so that
/// there is no second one.
///
/// The kernel holds the socket's lock in every callback of a full socket, so that nobody else looks at it meanwhile.
pub(crate) struct Storage<'run> {
    sk: *mut c_void,
    run: PhantomData<&'run mut SocketState>,
}

impl Storage<'_> {
    /// Of the socket of a sock_ops context; of none, where the context has no full socket.
    ///
    /// # Safety
    ///
    /// There must be no other in this run of the program.
    #[inline(always)]
    pub(crate) unsafe fn of(ctx: &SockOpsContext) -> Self {
        Self {
            sk: sk(ctx),
            run: PhantomData,
        }
    }

    /// Of a socket that the verifier tracks.
    ///
    /// # Safety
    ///
    /// As above, and the kernel must hold the socket's lock.
    #[inline(always)]
    pub(crate) unsafe fn of_socket(sk: *mut c_void) -> Self {
        Self {
            sk,
            run: PhantomData,
        }
    }

    /// Its storage; `None` where it has none.
    #[inline(always)]
    pub(crate) fn find(&mut self) -> Option<&mut SocketState> {
        self.get(Missing::Leave)
    }

    /// Its storage, made where it has none; `None` without memory.
    #[inline(always)]
    pub(crate) fn make(&mut self) -> Option<&mut SocketState> {
        self.get(Missing::Create)
    }

    /// Its storage, if a policy was chosen for it.
    #[inline(always)]
    pub(crate) fn of_policy(&mut self) -> Option<&mut SocketState> {
        self.find().filter(|state| state.arm != arm::NONE)
    }

    #[inline(always)]
    fn get(&mut self, missing: Missing) -> Option<&mut SocketState> {
        if self.sk.is_null() {
            return None;
        }
        // SAFETY: null, or the socket's own value, whose size the map's definition gives.
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
/// Once in a run of the program.
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
