//! The cost of a covered loss-free connection: instructions of the sock_ops program and its helper calls, by operation.
//! The kernel cannot run sock_ops programs on demand (`BPF_PROG_TEST_RUN`, Linux 6.12), so the object's instructions
//! are interpreted here, before the verifier rewrites them (it expands accesses to the context, and removes branches
//! that a constant decides). The verifier's own work is limited in [`crate::verifier`].

mod interpreter;
mod kernel;

use kernel::{Context, Cost, EARLIER_REPLY, Effect, HZ, Program, Situation};
use rto_agent_common::{Counters, Policy, address::Peer, policy_flags};

/// Operation, instructions, and helper calls. More than a tenth more instructions, or one more call, is a decision: the
/// commit that needs it raises the number here and gives the reason. If an operation gets cheaper by more than a tenth,
/// lower its number.
const BUDGET: [(&str, usize, usize); 16] = [
    ("RWND_INIT", 10, 0),
    ("TCP_CONNECT_CB", 10, 0),
    ("TIMEOUT_INIT", 146, 5),
    ("ACTIVE_ESTABLISHED_CB", 133, 3),
    ("TIMEOUT_INIT (SYN-ACK)", 106, 4),
    ("PASSIVE_ESTABLISHED_CB", 152, 4),
    ("TIMEOUT_INIT, IPv6", 151, 5),
    ("ACTIVE_ESTABLISHED_CB, IPv6", 138, 3),
    ("TIMEOUT_INIT (SYN-ACK), IPv6", 111, 4),
    ("PASSIVE_ESTABLISHED_CB, IPv6", 157, 4),
    ("TIMEOUT_INIT, two options", 206, 9),
    ("PASSIVE_ESTABLISHED_CB, two options", 221, 9),
    ("TIMEOUT_INIT, no entry matches", 50, 1),
    ("ACTIVE_ESTABLISHED_CB, no entry matches", 18, 0),
    ("TIMEOUT_INIT (SYN-ACK), no entry matches", 29, 1),
    ("PASSIVE_ESTABLISHED_CB, no entry matches", 39, 1),
];

/// A value of `sampling` with which no connection here is sampled.
const NONE_SAMPLED: u32 = 1 << 16;
const ALL_SAMPLED: u32 = 1;

const PEER: Peer = Peer::V4([192, 0, 2, 1]);
const PEER_V6: Peer = Peer::V6([0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
const ANOTHER: Peer = Peer::V4([198, 51, 100, 1]);

/// `initial_rto = "100ms"`, and a SYN-ACK RTO of 200 ms.
const POLICY: Policy = Policy {
    flags: policy_flags::IN_USE,
    generation: 1,
    initial_rto_jiffies: HZ / 10,
    initial_rto_us: 100_000,
    syn_ack_rto_jiffies: [HZ / 5; _],
    ..Policy::EMPTY
};
/// The same policy with both options that need no socket storage.
const TWO_OPTIONS: Policy = Policy {
    rto_min_us: 40_000,
    delack_max_us: 20_000,
    ..POLICY
};
const KERNELS_OPTIONS: [u32; 2] = [200_000; 2];

// include/uapi/linux/bpf.h
const RTO_CB_FLAG: u32 = 1 << 0;
const RETRANS_CB_FLAG: u32 = 1 << 1;
const STATE_CB_FLAG: u32 = 1 << 2;
/// `BPF_SOCK_OPS_PARSE_UNKNOWN_HDR_OPT_CB_FLAG`, the program's mark.
const MARK: u32 = 1 << 5;

/// The operation for which the kernel runs the program.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// In connect(), before the SYN is sent: an operation that the program ignores.
    ConnectOther(u32),
    /// TIMEOUT_INIT in connect().
    Connect,
    /// ACTIVE_ESTABLISHED_CB.
    Connected,
    /// TIMEOUT_INIT of a connection request.
    Request,
    /// PASSIVE_ESTABLISHED_CB.
    Accepted,
}

const RWND_INIT: Moment = Moment::ConnectOther(2);
const TCP_CONNECT_CB: Moment = Moment::ConnectOther(3);

impl Moment {
    /// The program's context for a socket with these callback flags.
    const fn context(self, peer: Peer, callbacks: u32) -> Context {
        // Operation and state (BPF_TCP_*).
        let (op, state) = match self {
            Self::ConnectOther(op) => (op, 2),
            Self::Connect => (1, 2),
            Self::Connected => (4, 1),
            Self::Request => (1, 12),
            Self::Accepted => (5, 3),
        };
        let is_full = !matches!(self, Self::Request);
        let has_measured = matches!(self, Self::Connected | Self::Accepted);
        Context {
            op,
            peer,
            is_full,
            state,
            callbacks,
            segs_out: matches!(self, Self::Connected) as u32,
            srtt_us: if has_measured { 1000 } else { 0 },
        }
    }

    /// The callback flags that a covered socket has before the operation.
    const fn callbacks(self) -> u32 {
        match self {
            Self::Connected => MARK | RTO_CB_FLAG | RETRANS_CB_FLAG,
            _ => 0,
        }
    }

    /// The expected effect if an entry matches.
    fn effect(self, policy: &Policy) -> Effect {
        let mut effect = nothing(self.callbacks());
        let is_new = matches!(self, Self::Connect | Self::Accepted);
        if is_new && policy.rto_min_us != 0 {
            effect.options = [policy.rto_min_us, policy.delack_max_us];
        }
        let replied = Counters {
            attempts: 1,
            ..Counters::default()
        };
        match self {
            Self::ConnectOther(_) => {}
            Self::Connect => {
                effect.reply = policy.initial_rto_jiffies;
                effect.callbacks = MARK | RTO_CB_FLAG | RETRANS_CB_FLAG;
                effect.hits = 1;
                effect.counted[0] = replied;
            }
            Self::Connected => effect.samples = 1,
            Self::Request => {
                effect.reply = policy.syn_ack_rto_jiffies[0];
                effect.hits = 1;
                effect.counted[1] = replied;
            }
            Self::Accepted => {
                effect.callbacks = MARK | RETRANS_CB_FLAG;
                effect.samples = 1;
            }
        }
        effect
    }
}

/// The effect on a socket that no entry covers.
fn nothing(callbacks: u32) -> Effect {
    Effect {
        reply: EARLIER_REPLY,
        callbacks,
        hits: 0,
        counted: [Counters::default(); 2],
        samples: 0,
        options: KERNELS_OPTIONS,
        is_stored: false,
    }
}

/// Runs the program for each operation of [`BUDGET`], in its order; returns the cost, the effect and the expected
/// effect.
fn measured(program: &Program) -> Vec<(Cost, Effect, Effect)> {
    use Moment::{Accepted, Connect, Connected, Request};
    let covered = |moment: Moment, peer, policy| {
        let context = moment.context(peer, moment.callbacks());
        (context, peer, policy, moment.effect(policy))
    };
    let uncovered = |moment: Moment| {
        let context = moment.context(PEER, 0);
        (context, ANOTHER, &POLICY, nothing(0))
    };
    let situations = [
        covered(RWND_INIT, PEER, &POLICY),
        covered(TCP_CONNECT_CB, PEER, &POLICY),
        covered(Connect, PEER, &POLICY),
        covered(Connected, PEER, &POLICY),
        covered(Request, PEER, &POLICY),
        covered(Accepted, PEER, &POLICY),
        covered(Connect, PEER_V6, &POLICY),
        covered(Connected, PEER_V6, &POLICY),
        covered(Request, PEER_V6, &POLICY),
        covered(Accepted, PEER_V6, &POLICY),
        covered(Connect, PEER, &TWO_OPTIONS),
        covered(Accepted, PEER, &TWO_OPTIONS),
        uncovered(Connect),
        uncovered(Connected),
        uncovered(Request),
        uncovered(Accepted),
    ];
    let run = |(context, entry, policy, expected)| {
        let situation = Situation {
            context,
            entry,
            policy,
        };
        let (cost, effect) = kernel::run(program, &situation)
            .map_err(|e| format!("{context:?}: {e:#}"))
            .unwrap();
        (cost, effect, expected)
    };
    situations.map(run).into()
}

/// Describes a cost that is too high or too low; `None` if it is within the budget.
fn excess(declared: (&str, usize, usize), cost: &Cost) -> Option<String> {
    let (operation, instructions, calls) = declared;
    let advice = if cost.calls() > calls || 10 * cost.instructions > 11 * instructions {
        "make it cheaper, or raise the declared numbers and say why"
    } else if cost.calls() < calls || 10 * cost.instructions < 9 * instructions {
        "lower the declared numbers"
    } else {
        return None;
    };
    Some(format!(
        "{operation}: {} instructions and {} calls, declared {instructions} and {calls}: {advice}",
        cost.instructions,
        cost.calls(),
    ))
}

#[test]
fn clean_path_stays_within_budget() {
    let program = Program::load(NONE_SAMPLED).unwrap();
    let measured = measured(&program);
    assert_eq!(measured.len(), BUDGET.len());
    let mut wrong = Vec::new();
    println!(
        "{:48} {:>12} {:>8}  helper calls",
        "", "instructions", "declared"
    );
    for (declared, (cost, effect, expected)) in BUDGET.into_iter().zip(measured) {
        let (operation, instructions, _) = declared;
        let helpers: Vec<_> = cost
            .helpers
            .iter()
            .map(|(name, calls)| format!("{calls} {name}"))
            .collect();
        let (executed, calls) = (cost.instructions, cost.calls());
        println!(
            "{operation:48} {executed:12} {instructions:8}  {calls}: {}",
            helpers.join(", ")
        );
        assert_eq!(effect, expected, "{operation}");
        wrong.extend(excess(declared, &cost));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The counterpart: a connection that is sampled until it closes exceeds the budget, so the interpreter notices extra
/// cost.
#[test]
fn sampled_connection_exceeds_budget() {
    let program = Program::load(ALL_SAMPLED).unwrap();
    for (declared, (cost, effect, expected)) in BUDGET.into_iter().zip(measured(&program)) {
        let (operation, ..) = declared;
        let is_sampled = expected.samples != 0;
        if !is_sampled {
            assert_eq!(effect, expected, "{operation}");
            assert_eq!(excess(declared, &cost), None);
            continue;
        }
        assert!(excess(declared, &cost).is_some(), "{operation}: {cost:?}");
        assert!(cost.helpers.contains_key("sk_storage_get"), "{operation}");
        let sampled = Effect {
            callbacks: MARK | RTO_CB_FLAG | RETRANS_CB_FLAG | STATE_CB_FLAG,
            is_stored: true,
            ..expected
        };
        assert_eq!(effect, sampled, "{operation}");
    }
}

#[test]
fn change_of_a_tenth_fails_budget() {
    let cost = |instructions, lookups| Cost {
        instructions,
        helpers: [("map_lookup_elem", lookups)].into(),
    };
    let declared = ("an operation", 100, 3);
    for instructions in [90, 100, 110] {
        assert_eq!(excess(declared, &cost(instructions, 3)), None);
    }
    for (cost, advice) in [
        (cost(111, 3), "make it cheaper"),
        (cost(90, 4), "make it cheaper"),
        (cost(89, 3), "lower the declared"),
        (cost(100, 2), "lower the declared"),
    ] {
        let text = excess(declared, &cost).unwrap();
        assert!(text.contains(advice), "{text}");
    }
}
