//! What the kernel says of a TCP connection: TCP_INFO of tcp(7).

use std::{
    io, mem,
    net::TcpStream,
    os::fd::{AsRawFd as _, RawFd},
};

use serde::{Deserialize, Serialize};

/// Of a connection, as one of its ends sees it. Times are microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Smoothed round-trip time (RFC 6298), of what this end sent; 0 before the first measurement.
    pub srtt_us: u32,
    /// Mean deviation of the round-trip time.
    pub rttvar_us: u32,
    /// Retransmission timeout, whole jiffies.
    pub rto_us: u32,
    /// Shortest round-trip time of the last five minutes (`net.ipv4.tcp_min_rtt_wlen`); `None` before the first
    /// measurement.
    pub min_rtt_us: Option<u32>,
    /// Round-trip time as the receiver estimates it; 0 without an estimate.
    pub rcv_rtt_us: u32,
    /// How long an ACK of this end's waits for data to go with.
    pub ato_us: u32,
    /// Retransmissions of this end's, SYNs and tail loss probes among them.
    pub total_retrans: u32,
    /// Segments of this end's that the peer has received.
    pub delivered: u32,
}

impl Info {
    /// Asks the kernel. What it does not know yet because it is older is 0 (`delivered`: Linux 4.18).
    ///
    /// # Errors
    ///
    /// Those of getsockopt(2).
    pub fn of(stream: &TcpStream) -> io::Result<Self> {
        tcp_info(stream.as_raw_fd()).map(|info| Self {
            srtt_us: info.tcpi_rtt,
            rttvar_us: info.tcpi_rttvar,
            rto_us: info.tcpi_rto,
            // tcp_min_rtt() is ~0 before the first (net/ipv4/tcp.c, Linux 6.12).
            min_rtt_us: (info.tcpi_min_rtt != u32::MAX).then_some(info.tcpi_min_rtt),
            rcv_rtt_us: info.tcpi_rcv_rtt,
            ato_us: info.tcpi_ato,
            total_retrans: info.tcpi_total_retrans,
            delivered: info.tcpi_delivered,
        })
    }

    /// Of many one after the other: the median of each time, and the counters of the last. `None` of none.
    #[must_use]
    pub fn typical(all: &[Self]) -> Option<Self> {
        let last = *all.last()?;
        let median = |time: fn(&Self) -> u32| {
            let mut times: Vec<u32> = all.iter().map(time).collect();
            times.sort_unstable();
            times[times.len() / 2]
        };
        Some(Self {
            srtt_us: median(|info| info.srtt_us),
            rttvar_us: median(|info| info.rttvar_us),
            rto_us: median(|info| info.rto_us),
            rcv_rtt_us: median(|info| info.rcv_rtt_us),
            ato_us: median(|info| info.ato_us),
            ..last
        })
    }
}

fn tcp_info(socket: RawFd) -> io::Result<libc::tcp_info> {
    // SAFETY: a struct of integers, for which all zeroes is a value.
    let mut info: libc::tcp_info = unsafe { mem::zeroed() };
    let mut length = libc::socklen_t::try_from(size_of_val(&info)).unwrap_or(0);
    // SAFETY: buffer and length are on the stack, the length is the buffer's; the kernel writes no more.
    let done = unsafe {
        libc::getsockopt(
            socket,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if done == 0 {
        Ok(info)
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpListener,
    };

    use super::*;

    #[test]
    fn of_many() {
        let with = |srtt_us, total_retrans| Info {
            srtt_us,
            total_retrans,
            ..Info::default()
        };
        assert_eq!(Info::typical(&[]), None);
        let all = [with(30, 1), with(10, 1), with(20, 2)];
        assert_eq!(Info::typical(&all), Some(with(20, 2)));
    }

    #[test]
    fn of_a_connection_over_the_loopback() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(b"request").unwrap();
        let mut request = [0; 7];
        server.read_exact(&mut request).unwrap();
        let info = Info::of(&client).unwrap();
        // From the handshake; the loopback is no slower than this, and the RTO no less than a jiffy.
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
        assert_eq!(serde_json::from_str::<Info>(&json).unwrap(), info);
    }
}
