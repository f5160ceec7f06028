//! The state of a TCP socket: TCP_INFO and single options of tcp(7).

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd as _},
};

use serde::{Deserialize, Serialize};

/// Options by number (include/uapi/linux/tcp.h).
pub mod option {
    /// TCP_SYNCNT.
    pub const SYNCNT: i32 = libc::TCP_SYNCNT;
    /// TCP_DEFER_ACCEPT, seconds.
    pub const DEFER_ACCEPT: i32 = libc::TCP_DEFER_ACCEPT;
    /// TCP_THIN_LINEAR_TIMEOUTS.
    pub const THIN_LINEAR: i32 = 16;
    /// TCP_USER_TIMEOUT, milliseconds.
    pub const USER_TIMEOUT: i32 = 18;
    /// TCP_FASTOPEN_CONNECT.
    pub const FASTOPEN_CONNECT: i32 = libc::TCP_FASTOPEN_CONNECT;
    /// TCP_RTO_MAX_MS (Linux 6.15).
    pub const RTO_MAX_MS: i32 = 44;
    /// TCP_RTO_MIN_US (Linux 6.15).
    pub const RTO_MIN_US: i32 = 45;
    /// TCP_DELACK_MAX_US (Linux 6.15).
    pub const DELACK_MAX_US: i32 = 46;
}

/// A connection as one end sees it. Times are microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpInfo {
    /// Smoothed round-trip time (RFC 6298) of data that this end sent; 0 before the first sample.
    pub srtt_us: u32,
    /// Mean deviation of the round-trip time.
    pub rttvar_us: u32,
    /// Retransmission timeout, in whole jiffies.
    pub rto_us: u32,
    /// Minimum round-trip time of the last five minutes (`net.ipv4.tcp_min_rtt_wlen`); `None` before the first sample.
    pub min_rtt_us: Option<u32>,
    /// The receiver's estimate of the round-trip time; 0 without an estimate.
    pub rcv_rtt_us: u32,
    /// How long this end delays an ACK so that it can go with data.
    pub ato_us: u32,
    /// Retransmissions by this end, including SYNs and tail loss probes.
    pub total_retrans: u32,
    /// Segments of this end that the peer has acknowledged.
    pub delivered: u32,
    /// Congestion window, segments.
    pub snd_cwnd: u32,
}

impl TcpInfo {
    /// Queries the kernel. Fields that an older kernel does not have are 0 (`delivered`: Linux 4.18).
    pub fn of(socket: &impl AsFd) -> io::Result<Self> {
        // SAFETY: a struct of integers, for which all zeroes is a value.
        let mut info: libc::tcp_info = unsafe { mem::zeroed() };
        get(socket, libc::TCP_INFO, &mut info)?;
        Ok(Self {
            srtt_us: info.tcpi_rtt,
            rttvar_us: info.tcpi_rttvar,
            rto_us: info.tcpi_rto,
            // tcp_min_rtt() is ~0 before the first sample (net/ipv4/tcp.c, Linux 6.12).
            min_rtt_us: (info.tcpi_min_rtt != u32::MAX).then_some(info.tcpi_min_rtt),
            rcv_rtt_us: info.tcpi_rcv_rtt,
            ato_us: info.tcpi_ato,
            total_retrans: info.tcpi_total_retrans,
            delivered: info.tcpi_delivered,
            snd_cwnd: info.tcpi_snd_cwnd,
        })
    }
}

/// The value of an option of [`option`]. The error is ENOPROTOOPT if the kernel does not know the option.
pub fn get_option(socket: &impl AsFd, number: i32) -> io::Result<i32> {
    let mut value: libc::c_int = 0;
    get(socket, number, &mut value)?;
    Ok(value)
}

/// Sets an option of [`option`].
pub fn set_option(socket: &impl AsFd, number: i32, value: i32) -> io::Result<()> {
    // SAFETY: the value is a live c_int of the size given.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            number,
            (&raw const value).cast(),
            length::<libc::c_int>(),
        )
    };
    ok(done)
}

/// `T` must consist of integers only, so that any bytes are a valid value.
fn get<T: Copy>(socket: &impl AsFd, number: i32, value: &mut T) -> io::Result<()> {
    let mut size = length::<T>();
    // SAFETY: the length is that of the value, and the kernel writes no more; both outlive the call.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            number,
            std::ptr::from_mut(value).cast(),
            &raw mut size,
        )
    };
    ok(done)
}

fn ok(done: libc::c_int) -> io::Result<()> {
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

pub(crate) fn length<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[test]
    fn tcp_info_of_loopback_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(b"request").unwrap();
        let mut request = [0; 7];
        server.read_exact(&mut request).unwrap();
        let info = TcpInfo::of(&client).unwrap();
        // Sampled from the handshake. The loopback is faster than a second, and the RTO is at least a jiffy.
        assert!((1..1_000_000).contains(&info.srtt_us), "{info:?}");
        assert!(info.rto_us >= 1_000, "{info:?}");
        assert!(
            info.min_rtt_us.is_some_and(|us| us <= info.srtt_us),
            "{info:?}"
        );
        assert_eq!(info.total_retrans, 0);
        // The SYN and the request.
        assert!(info.delivered >= 1, "{info:?}");
        let json = serde_json::to_string(&info).unwrap();
        assert_eq!(serde_json::from_str::<TcpInfo>(&json).unwrap(), info);
    }

    #[test]
    fn options_are_set_and_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        set_option(&listener, option::SYNCNT, 3).unwrap();
        assert_eq!(get_option(&listener, option::SYNCNT).unwrap(), 3);
        assert!(get_option(&listener, 9999).is_err());
    }
}
