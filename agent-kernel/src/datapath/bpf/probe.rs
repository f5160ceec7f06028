//! Finds out the kernel's features by using them: on a socket of this process, and with programs
//! that are loaded but not attached.
//!
//! The probing program is attached to this process's own cgroup during one connect() to a listener on the loopback
//! interface that drops every SYN, and only touches the socket with the right cookie.

use std::{
    fs::File,
    net::{Ipv4Addr, TcpListener},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use aya::{
    Btf, Ebpf,
    maps::Array,
    programs::{CgroupAttachMode, ProgramError, ProgramType, SockOps},
    sys::{BpfHelper, is_helper_supported},
};
use nix::{
    errno::Errno,
    libc,
    sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrIn, connect, setsockopt, socket, sockopt,
    },
};
use rto_agent_common::{Offsets, PROBE_MARK, PROGRAM_PROBE, Probe, maps};
use rto_agent_core::wire::kernel::{Feature, Presence};

use super::{
    accepted, object,
    object::{LoadParams, program},
    walk,
};
use crate::{
    datapath::{Cause, DatapathError, error::map as map_error},
    kernel::{
        btf, cgroup,
        features::{ProbeError, ProbeResults, evaluate},
        privileges,
    },
};

/// Whether sock_ops programs can read the process that made the system call they run in
/// (`bpf_get_current_comm()`; for all program types since Linux 6.16).
pub fn tells_process() -> bool {
    let helpers = [
        BpfHelper::BPF_FUNC_get_current_comm,
        BpfHelper::BPF_FUNC_get_current_pid_tgid,
    ];
    helpers
        .into_iter()
        .all(|helper| is_helper_supported(ProgramType::SockOps, helper).unwrap_or(false))
}

/// The features of this kernel. Probing takes about ten milliseconds.
pub fn features() -> Vec<Feature> {
    // vmlinux BTF is large, so it is read once for all features.
    let btf = btf::Btf::vmlinux();
    evaluate(&ask(&btf), &btf)
}

fn ask(btf: &Result<Arc<btf::Btf>, btf::BtfError>) -> ProbeResults {
    let missing = privileges::missing(privileges::effective().unwrap_or_else(caps::all));
    if !missing.is_empty() {
        return ProbeResults::nothing(&ProbeError::not_asked(&format!(
            "needs {}",
            missing.join(", ")
        )));
    }
    let absent = |text: String| ProbeError {
        presence: Presence::Absent,
        text,
    };
    let offsets = match btf {
        Ok(btf) => btf.offsets().map_err(|e| absent(e.to_string())),
        Err(e) => Err(absent(e.to_string())),
    };
    let loaded = Asking::begin(offsets.clone().unwrap_or_default());
    let mut asking = match loaded {
        Ok(asking) => asking,
        Err(e) => return ProbeResults::nothing(&e),
    };
    let options = match cgroup::own() {
        Some(cgroup) => asking.options(&cgroup),
        None => Err(ProbeError::not_asked(
            "this process's own cgroup is not below a cgroup2 mount",
        )),
    };
    // Programs that attach by the kernel's types, or read its structs.
    let types = object::kernel_types();
    let mut try_load = |load: fn(&mut Ebpf, &Btf) -> Result<(), DatapathError>| {
        offsets.clone()?;
        let types = types.as_ref().map_err(|e| absent(e.to_string()))?;
        Ok(load(&mut asking.ebpf, types)?)
    };
    ProbeResults {
        options,
        clone: try_load(accepted::try_load),
        lsm_active: accepted::active(),
        walk: try_load(walk::try_load),
    }
}

/// The object with small maps, and a socket for the probe.
struct Asking {
    ebpf: Ebpf,
    socket: OwnedFd,
}

impl Asking {
    fn begin(offsets: Offsets) -> Result<Self, ProbeError> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None)
            .map_err(|e| ProbeError::not_asked(&format!("no TCP socket: {e}")))?;
        // The mark keeps the probe out of the statistics of a policy that covers the loopback.
        let _ = setsockopt(&socket, sockopt::Mark, &PROBE_MARK);
        let cookie =
            cookie(&socket).map_err(|e| ProbeError::not_asked(&format!("SO_COOKIE: {e}")))?;
        let values = LoadParams {
            trie_entries: Some(1),
            without_policies: true,
            probe_cookie: cookie,
            offsets,
            ..LoadParams::default()
        };
        Ok(Self {
            ebpf: object::load(None, &values)?,
            socket,
        })
    }

    fn options(&mut self, cgroup: &Path) -> Result<Probe, ProbeError> {
        // An attached foreign program does not mean that the kernel lacks the feature.
        let failed = |reason: &str| {
            ProbeError::not_asked(&format!("cannot attach to {}: {reason}", cgroup.display()))
        };
        let program = program!(self.ebpf, PROGRAM_PROBE, SockOps)?;
        program.load().map_err(object::load_error)?;
        let dir = File::open(cgroup).map_err(|e| failed(&Cause::new(e).to_string()))?;
        let link = program
            .attach(dir, CgroupAttachMode::Single)
            .map_err(|e| failed(&Cause::new(e).to_string()))?;
        let connected = self.connect();
        let answers = self.answers();
        let program = program!(self.ebpf, PROGRAM_PROBE, SockOps)?;
        program
            .detach(link)
            .map_err(|e| failed(&Cause::new(e).to_string()))?;
        let answers = answers?;
        if answers.ran == 0 {
            let outcome = connected
                .err()
                .map_or("it succeeded".to_owned(), |e| e.to_string());
            return Err(ProbeError::not_asked(&format!(
                "the program did not see the probe's connect() to the loopback interface ({outcome})"
            )));
        }
        Ok(answers)
    }

    /// Connects to a listener that does not answer, until the SYN's timer has been armed once more.
    fn connect(&self) -> std::io::Result<()> {
        /// Many times the timer of a jiffy.
        const STEPS: usize = 200;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        drop_all(&listener)?;
        let std::net::SocketAddr::V4(address) = listener.local_addr()? else {
            return Ok(());
        };
        match connect(self.socket.as_raw_fd(), &SockaddrIn::from(address)) {
            Ok(()) | Err(Errno::EINPROGRESS) => {}
            Err(e) => return Err(e.into()),
        }
        for _ in 0..STEPS {
            // Without an answer of the program there is nothing to wait for.
            if !self
                .answers()
                .is_ok_and(|answers| answers.ran != 0 && answers.armed == 0)
            {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn answers(&self) -> Result<Probe, ProbeError> {
        let map = self
            .ebpf
            .map(maps::PROBE)
            .ok_or_else(|| map_error(maps::PROBE, "is not in the object"))?;
        let answers = Array::<_, Probe>::try_from(map).and_then(|map| map.get(&0, 0));
        Ok(answers.map_err(|e| map_error(maps::PROBE, e))?)
    }
}

/// Makes a listener drop every segment that it gets, with a socket filter of one instruction (socket(7),
/// SO_ATTACH_FILTER), for which nix has no option.
fn drop_all(listener: &TcpListener) -> std::io::Result<()> {
    let mut none = libc::sock_filter {
        code: 0x06, // BPF_RET | BPF_K
        jt: 0,
        jf: 0,
        k: 0,
    };
    let program = libc::sock_fprog {
        len: 1,
        filter: &raw mut none,
    };
    // SAFETY: the program and its instruction live until the call returns, and the length is the program's.
    let done = unsafe {
        libc::setsockopt(
            listener.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            u32::try_from(size_of::<libc::sock_fprog>()).unwrap_or(0),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

/// EPERM means missing privileges, lockdown or an LSM. EACCES can also come from the verifier,
/// whose log has the reason.
impl From<DatapathError> for ProbeError {
    fn from(error: DatapathError) -> Self {
        let presence = match error.errno() {
            Some(libc::EPERM) => Presence::Refused,
            Some(libc::EACCES) if !is_of_verifier(&error) => Presence::Refused,
            _ => Presence::Absent,
        };
        Self {
            presence,
            text: error.to_string(),
        }
    }
}

fn is_of_verifier(error: &DatapathError) -> bool {
    let DatapathError::Load(cause) = error else {
        return false;
    };
    match cause.find() {
        Some(ProgramError::LoadError { verifier_log, .. }) => !verifier_log.to_string().is_empty(),
        _ => false,
    }
}

/// Reads SO_COOKIE, for which nix has no getter.
fn cookie(socket: &OwnedFd) -> Result<u64, Errno> {
    let mut value = 0u64;
    let mut length: libc::socklen_t = 8;
    // SAFETY: buffer and length are on the stack, and the length is the buffer's.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if done == 0 {
        Ok(value)
    } else {
        Err(Errno::last())
    }
}
