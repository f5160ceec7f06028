//! The server of a handshake whose SYN-ACKs are lost.

use rto_model::{syn::RTO_MAX_S, wheel};

/// The server's side of a handshake whose SYN-ACKs are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    /// Jiffies per second.
    pub(crate) hz: u64,
    /// The initial RTO of its SYN-ACKs, jiffies; one second without the agent.
    pub(crate) syn_ack_rto: u64,
    /// `net.ipv4.tcp_synack_retries`.
    pub(crate) syn_ack_retries: u8,
    /// `net.ipv4.tcp_invalid_ratelimit`, jiffies; 0: no limit.
    pub(crate) invalid_ratelimit: u64,
}

/// A half-open request.
struct Request {
    /// When its timer fires, jiffies since the first SYN.
    expires: u64,
    /// How often it has fired.
    timeouts: u8,
    /// When a retransmitted SYN was last answered, jiffies since the first SYN.
    answered: Option<u64>,
}

impl Server {
    /// A server without the agent, with the kernel's defaults: 1 s, 5 retransmissions, 500 ms.
    pub(crate) const fn kernel(hz: u64) -> Self {
        Self {
            hz,
            syn_ack_rto: hz,
            syn_ack_retries: 5,
            invalid_ratelimit: hz / 2,
        }
    }

    /// When it sends SYN-ACKs, jiffies since the first SYN, if all of `syns` arrive and no SYN-ACK does; connect() was
    /// called in jiffy `begin`.
    ///
    /// A retransmitted SYN is answered unless the previous such answer is less than `tcp_invalid_ratelimit` ago
    /// (`tcp_oow_rate_limited()`), and each answer restarts the request's timer (`tcp_check_req()`,
    /// net/ipv4/tcp_minisocks.c, Linux 6.12). After a request has expired, the next SYN creates another.
    pub(crate) fn syn_acks(&self, syns: &[u64], begin: u64) -> Vec<u64> {
        let mut sent = Vec::new();
        let mut request: Option<Request> = None;
        for syn in syns.iter().copied() {
            self.fire_until(syn, &mut request, begin, &mut sent);
            let (timeouts, answered) = match &request {
                None => (0, None),
                Some(Request {
                    answered: Some(last),
                    ..
                }) if syn - last < self.invalid_ratelimit => {
                    continue;
                }
                Some(request) => (request.timeouts, Some(syn)),
            };
            sent.push(syn);
            request = Some(Request {
                expires: self.expires(syn, timeouts, begin),
                timeouts,
                answered,
            });
        }
        self.fire_until(u64::MAX, &mut request, begin, &mut sent);
        sent
    }

    /// Sends what a request's timer sends until `end` (`reqsk_timer_handler()`). In the same jiffy it precedes a packet
    /// that another timer sends, as TIMER_SOFTIRQ runs before NET_RX_SOFTIRQ: so the request has doubled its timer when
    /// the kernel's own second SYN arrives.
    fn fire_until(&self, end: u64, request: &mut Option<Request>, begin: u64, sent: &mut Vec<u64>) {
        while let Some(open) = request.as_mut().filter(|open| open.expires <= end) {
            if open.timeouts >= self.syn_ack_retries {
                *request = None;
                return;
            }
            sent.push(open.expires);
            open.timeouts += 1;
            open.expires = self.expires(open.expires, open.timeouts, begin);
        }
    }

    /// When a timer that is set now fires (`tcp_reqsk_timeout()`).
    fn expires(&self, now: u64, timeouts: u8, begin: u64) -> u64 {
        let timeout = self.syn_ack_rto.max(1) << timeouts.min(31);
        wheel::fires_at(begin + now, timeout.min(RTO_MAX_S * self.hz)) - begin
    }
}

#[cfg(test)]
mod tests {
    use rto_model::outage::{Host, Timers, compare, first_from, phases};

    use super::*;

    const HOST: Host = Host {
        hz: 250,
        linear_timeouts: 4,
        syn_retries: 6,
    };
    const DOUBLING: Timers = Timers::Doubling(25);

    #[test]
    fn unlimited_answers_are_as_soon_as_copies() {
        let syns = HOST.syns(DOUBLING, 0).sent;
        let server = Server {
            invalid_ratelimit: 0,
            ..Server::kernel(HOST.hz)
        };
        let answers = server.syn_acks(&syns, 0);
        assert!(syns.iter().all(|syn| answers.contains(syn)));
        // Measured: 1.13 s for outages of 0.8 to 1.0 s.
        let at = first_from(&answers, 225).unwrap_or_default() * 4;
        assert!(at.abs_diff(1_130) <= 30, "{at}");
    }

    #[test]
    fn expired_request_is_created_again() {
        let server = Server {
            syn_ack_rto: 25,
            syn_ack_retries: 0,
            ..Server::kernel(HOST.hz)
        };
        // The second SYN finds no request, so it is answered although the limit is half a second.
        assert_eq!(
            server.syn_acks(&[0, 10, 20, 100, 110], 0),
            [0, 10, 100, 110]
        );
    }

    /// With a shorter timer only at the server, connect() was not later in any of 12 measured outages.
    #[test]
    fn covering_the_server_alone_costs_nothing() {
        let server = Server {
            syn_ack_rto: 124,
            ..Server::kernel(HOST.hz)
        };
        let pairs: Vec<_> = phases()
            .map(|begin| {
                let syns = HOST.syns(Timers::Kernel, begin).sent;
                let kernel = Server::kernel(HOST.hz).syn_acks(&syns, begin);
                (kernel, server.syn_acks(&syns, begin))
            })
            .collect();
        let compared = compare(&pairs, 0..1_500, HOST.hz);
        assert!(compared.mean_ms < 0.0, "{compared:?}");
    }
}
