//! The table of socket options on real sockets: every option is set, lifted and restored, and after every end of a
//! connection each reads as on a socket without an entry.

use rto_agent_common::{SOCKET_OPTIONS, SockOpt, also};
use rto_testbed::{
    foreign,
    netns::nft,
    workload::one_socket::{Command, OneSocket},
};

use super::established::policy;
use crate::prelude::*;

/// A setting that gives an option this value, which is not the kernel's own.
fn setting(option: SockOpt) -> anyhow::Result<(&'static str, i32)> {
    Ok(match option {
        SockOpt::RtoMin => ("rto_min = \"40ms\"", 40_000),
        SockOpt::DelackMax => ("delack_max = \"20ms\"", 20_000),
        SockOpt::ThinLinear => ("thin_linear = true", 1),
        SockOpt::RtoMax => ("rto_max = \"4s\"", 4_000),
        SockOpt::UserTimeout => ("user_timeout = \"20s\"", 20_000),
        new => bail!("{new:?} is new in the table of socket options: give its setting here"),
    })
}

/// The number by which an application knows the option.
fn number(option: SockOpt) -> i32 {
    match option {
        SockOpt::RtoMin => option::RTO_MIN_US,
        SockOpt::DelackMax => option::DELACK_MAX_US,
        other => other.row().number,
    }
}

/// The options that a policy sets.
fn kept() -> impl Iterator<Item = SockOpt> {
    let rows = SOCKET_OPTIONS.iter().filter(|row| row.kept.is_some());
    rows.map(|row| row.option)
}

fn socket(env: &TestEnv) -> anyhow::Result<OneSocket> {
    OneSocket::new(&env.net.client, env.cgroup.path())
}

fn read(one: &mut OneSocket, option: SockOpt) -> anyhow::Result<i32> {
    one.option(number(option))?
        .with_context(|| format!("{option:?} cannot be read"))
}

fn connect(one: &mut OneSocket, address: &str, port: u16) -> anyhow::Result<()> {
    let result = one.connect(to(address, port), TIMEOUT)?;
    ensure!(result == "connected", "{address}: {result}");
    Ok(())
}

test!(
    each_option_is_set_and_restored,
    needs = [THIN_LINEAR, RTO_MAX, TCP_ITERATOR]
);
fn each_option_is_set_and_restored() -> anyhow::Result<()> {
    for option in kept() {
        set_and_restored(option).with_context(|| format!("{option:?}"))?;
    }
    Ok(())
}

fn set_and_restored(option: SockOpt) -> anyhow::Result<()> {
    let (setting, value) = setting(option)?;
    let env = TestEnv::with(&policy(setting))?;
    let _servers = [SERVER_V4, SERVER_V4_OTHER].map(|address| env.echo_server(to(address, PORT)));
    let mut one = socket(&env)?;
    let before = read(&mut one, option)?;
    ensure!(before != value);
    let assert = |one: &mut OneSocket, expected: i32, when: &str| {
        let found = read(one, option)?;
        ensure!(found == expected, "{when}: {found}, expected {expected}");
        Ok(())
    };
    connect(&mut one, SERVER_V4, PORT)?;
    assert(&mut one, value, "connected")?;
    one.tell(Command::Disconnect)?;
    assert(&mut one, before, "disconnected")?;
    connect(&mut one, SERVER_V4_OTHER, PORT)?;
    assert(&mut one, before, "connected to an address without an entry")?;
    one.tell(Command::Disconnect)?;
    let _keeps_its_end = env.serve(to(SERVER_V4, SILENT))?;
    connect(&mut one, SERVER_V4, SILENT)?;
    one.tell(Command::ShutDown)?;
    let lifted = option.is(also::LIFTED);
    assert(&mut one, if lifted { before } else { value }, "closed")?;
    one.tell(Command::Renew(false))?;
    connect(&mut one, SERVER_V4, PORT)?;
    env.cli(&["detach", "--restore"])?;
    assert(&mut one, before, "restored by the scan")?;
    env.cli(&["attach"])?;
    env.cli(&["apply"])?;
    assert(&mut one, value, "set by the scan")?;
    env.cli(&["detach", "--restore"])?;
    assert(&mut one, before, "restored by the scan again")
}

/// Ports of the server; every other one is closed.
const SILENT: u16 = PORT + 1;
const UNREACHABLE: u16 = PORT + 2;
/// The server gets no data.
const DEAF: u16 = PORT + 3;
/// The first SYN of each client's port is lost, the others are refused.
const LATE_RESET: u16 = PORT + 4;
const LATE_UNREACHABLE: u16 = PORT + 5;
const CLOSED: u16 = PORT + 9;

fn lose_and_refuse(env: &TestEnv) -> anyhow::Result<()> {
    let rules = format!(
        "table inet ends {{
            set seen {{ type inet_service; flags dynamic; size 1024; }}
            chain in {{
                type filter hook input priority 0;
                tcp dport {SILENT} drop
                tcp dport {UNREACHABLE} reject with icmp type host-unreachable
                tcp dport {DEAF} meta length > 200 drop
                tcp dport {LATE_RESET} tcp sport @seen reject with tcp reset
                tcp dport {LATE_UNREACHABLE} tcp sport @seen reject with icmp type host-unreachable
                tcp dport {{ {LATE_RESET}, {LATE_UNREACHABLE} }} add @seen {{ tcp sport }} drop
            }}
        }}"
    );
    nft(&env.net.server, &["-f", "-"], &rules)?;
    Ok(())
}

// include/uapi/linux/tcp.h
const TCP_REPAIR: i32 = 19;
const REPAIR_ON: i32 = 1;
/// Without a window probe.
const REPAIR_OFF: i32 = -1;

/// The ways in which a connection or an attempt ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Refused,
    Unreachable,
    RefusedAfterLoss,
    UnreachableAfterLoss,
    TimedOut,
    DisconnectedInHandshake,
    DisconnectedAfterLoss,
    Disconnected,
    Closed,
    Reset,
    DataTimedOut,
    FastOpen,
    FastOpenRefused,
    Mptcp,
    MptcpRefused,
    SimultaneousOpen,
    Repaired,
    OpenedInRepair,
    ChallengeAck,
}

const ENDS: [End; 19] = [
    End::Refused,
    End::Unreachable,
    End::RefusedAfterLoss,
    End::UnreachableAfterLoss,
    End::TimedOut,
    End::DisconnectedInHandshake,
    End::DisconnectedAfterLoss,
    End::Disconnected,
    End::Closed,
    End::Reset,
    End::DataTimedOut,
    End::FastOpen,
    End::FastOpenRefused,
    End::Mptcp,
    End::MptcpRefused,
    End::SimultaneousOpen,
    End::Repaired,
    End::OpenedInRepair,
    End::ChallengeAck,
];

/// Makes a connection to this address of the server end; `own_port` is the client's where it matters.
fn end(
    env: &TestEnv,
    one: &mut OneSocket,
    how: End,
    address: &str,
    own_port: u16,
) -> anyhow::Result<()> {
    let expect = |one: &mut OneSocket, port: u16, at_most_ms: u64, expected: &str| {
        let result = one.connect(to(address, port), Duration::from_millis(at_most_ms))?;
        ensure!(result == expected, "{result}, expected {expected}");
        anyhow::Ok(())
    };
    const LONG_MS: u64 = 30_000;
    match how {
        End::Refused => expect(one, CLOSED, LONG_MS, "ECONNREFUSED")?,
        End::Unreachable => {
            // connect() still holds the socket's lock when the ICMP message arrives, so the kernel reports the error and
            // goes on connecting (`tcp_v4_err()`, Linux 6.18).
            expect(one, UNREACHABLE, LONG_MS, "EHOSTUNREACH")?;
            one.tell(Command::Disconnect)?;
        }
        End::RefusedAfterLoss => expect(one, LATE_RESET, LONG_MS, "ECONNREFUSED")?,
        End::UnreachableAfterLoss => expect(one, LATE_UNREACHABLE, LONG_MS, "EHOSTUNREACH")?,
        End::TimedOut => {
            one.tell(Command::Set(option::SYNCNT, 1))?;
            expect(one, SILENT, LONG_MS, "ETIMEDOUT")?;
        }
        End::DisconnectedInHandshake | End::DisconnectedAfterLoss => {
            let after_ms = if how == End::DisconnectedAfterLoss {
                700
            } else {
                20
            };
            expect(one, SILENT, after_ms, "connecting")?;
            one.tell(Command::Disconnect)?;
        }
        End::Disconnected => {
            expect(one, PORT, LONG_MS, "connected")?;
            one.tell(Command::Disconnect)?;
        }
        End::Closed | End::Reset => {
            let server = env.serve(to(address, own_port))?;
            expect(one, own_port, LONG_MS, "connected")?;
            if how == End::Reset {
                one.tell(Command::Send(1000))?;
            }
            drop(server);
            let ended = one.tell(Command::WaitForEnd)?;
            let expected = if how == End::Reset {
                "ECONNRESET"
            } else {
                "end"
            };
            ensure!(ended == expected, "{ended}");
            one.tell(Command::ShutDown)?;
        }
        End::DataTimedOut => {
            one.tell(Command::Set(option::USER_TIMEOUT, 700))?;
            expect(one, DEAF, LONG_MS, "connected")?;
            one.tell(Command::Send(1000))?;
            let ended = one.tell(Command::WaitForEnd)?;
            ensure!(ended == "ETIMEDOUT", "{ended}");
        }
        End::FastOpen | End::FastOpenRefused => {
            one.tell(Command::Set(option::FASTOPEN_CONNECT, 1))?;
            // The SYN is sent with the first data.
            let is_open = how == End::FastOpen;
            expect(
                one,
                if is_open { PORT } else { CLOSED },
                LONG_MS,
                "connected",
            )?;
            one.tell(Command::Send(100))?;
            if is_open {
                one.tell(Command::Disconnect)?;
            } else {
                let ended = one.tell(Command::WaitForEnd)?;
                ensure!(ended == "ECONNREFUSED", "{ended}");
            }
        }
        End::Mptcp | End::MptcpRefused => {
            one.tell(Command::Renew(true))?;
            if how == End::Mptcp {
                // The server has no MPTCP: the connection falls back to TCP, whose options can be read.
                expect(one, PORT, LONG_MS, "connected")?;
                one.tell(Command::Disconnect)?;
            } else {
                expect(one, CLOSED, LONG_MS, "ECONNREFUSED")?;
            }
        }
        End::SimultaneousOpen => {
            // A socket that connects to itself.
            let own = match address {
                SERVER_V4 => "10.88.0.1",
                _ => "10.88.1.1",
            };
            one.tell(Command::Bind(to(own, own_port)))?;
            let result = one.connect(to(own, own_port), TIMEOUT)?;
            ensure!(result == "connected", "{result}");
            one.tell(Command::Disconnect)?;
        }
        End::Repaired => {
            expect(one, PORT, LONG_MS, "connected")?;
            one.tell(Command::Set(TCP_REPAIR, REPAIR_ON))?;
            one.tell(Command::Disconnect)?;
            one.tell(Command::Set(TCP_REPAIR, REPAIR_OFF))?;
        }
        End::OpenedInRepair => {
            one.tell(Command::Set(TCP_REPAIR, REPAIR_ON))?;
            expect(one, PORT, LONG_MS, "connected")?;
            one.tell(Command::Disconnect)?;
            one.tell(Command::Set(TCP_REPAIR, REPAIR_OFF))?;
        }
        End::ChallengeAck => {
            one.tell(Command::Bind(to("0.0.0.0", own_port)))?;
            expect(one, PORT, LONG_MS, "connected")?;
            // The server keeps its end, and answers the SYN of the next connection with an ACK.
            one.tell(Command::Set(TCP_REPAIR, REPAIR_ON))?;
            one.tell(Command::Renew(false))?;
            one.tell(Command::Bind(to("0.0.0.0", own_port)))?;
            expect(one, PORT, LONG_MS, "connected")?;
            one.tell(Command::Disconnect)?;
        }
    }
    Ok(())
}

/// The options that the program may touch and an application can read; `None` if the kernel does not know the option.
type Values = Vec<(SockOpt, Option<i32>)>;

fn all(one: &mut OneSocket) -> anyhow::Result<Values> {
    let options = kept().chain([SockOpt::SynCnt]);
    let read = options.map(|option| Ok((option, one.option(number(option))?)));
    read.collect()
}

/// What the options read after an end, after connect() to AF_UNSPEC, and on the next connection, to an address without
/// an entry.
fn after(
    env: &TestEnv,
    one: &mut OneSocket,
    how: End,
    address: &str,
    own_port: u16,
) -> anyhow::Result<[Values; 3]> {
    end(env, one, how, address, own_port)?;
    let ended = all(one)?;
    one.tell(Command::Disconnect)?;
    let disconnected = all(one)?;
    one.tell(Command::Set(option::FASTOPEN_CONNECT, 0))
        .or_else(|e| {
            // An MPTCP socket refuses it.
            ensure!(matches!(how, End::Mptcp | End::MptcpRefused), "{e:#}");
            Ok(Value::Null)
        })?;
    let next = one.connect(to(SERVER_V4_OTHER, PORT), TIMEOUT)?;
    ensure!(next == "connected", "again: {next}");
    let again = all(one)?;
    one.tell(Command::Disconnect)?;
    Ok([ended, disconnected, again])
}

fn env_of_ends(settings: &str) -> anyhow::Result<(TestEnv, Vec<Traffic>)> {
    let env = TestEnv::with(&policy(settings))?;
    lose_and_refuse(&env)?;
    // Without cookies, so that the first SYN carries data.
    sysctl(&env.net.client, "net.ipv4.tcp_fastopen", "5")?;
    let mut servers = Vec::new();
    for address in [SERVER_V4, SERVER_V4_OTHER] {
        servers.push(env.echo_server(to(address, PORT))?);
        servers.push(env.serve(to(address, DEAF))?);
    }
    Ok((env, servers))
}

test!(
    options_after_every_end_are_the_applications_own,
    needs = [THIN_LINEAR, RTO_MAX]
);
/// With a policy whose connections have storage, and with one whose have none. The latter's options are rto_min and
/// delack_max, which the kernel itself resets when the socket is to be used again.
fn options_after_every_end_are_the_applications_own() -> anyhow::Result<()> {
    let mut every = String::from("initial_rto = \"100ms\"");
    for option in kept() {
        every.push_str(&format!("\n{}", setting(option)?.0));
    }
    let without_storage = "initial_rto = \"100ms\"\nrto_min = \"40ms\"\ndelack_max = \"20ms\"";
    for (settings, from) in [(every.as_str(), 0), (without_storage, 1)] {
        let (env, _servers) = env_of_ends(settings)?;
        for (how, own_port) in ENDS.into_iter().zip(PORT + 100..) {
            let after = |address| {
                after(&env, &mut socket(&env)?, how, address, own_port)
                    .with_context(|| format!("{how:?} to {address}"))
            };
            let (policy, control) = (after(SERVER_V4)?, after(SERVER_V4_OTHER)?);
            ensure!(
                policy[from..] == control[from..],
                "{how:?}, {settings}:\n{policy:?}\n{control:?}"
            );
        }
    }
    Ok(())
}

test!(
    detach_restore_leaves_nothing_on_ended_sockets,
    needs = [THIN_LINEAR, RTO_MAX, TCP_ITERATOR]
);
/// The scan does not see sockets in CLOSE: nothing may be left on them.
fn detach_restore_leaves_nothing_on_ended_sockets() -> anyhow::Result<()> {
    let settings = "initial_rto = \"100ms\"\nthin_linear = true\nrto_max = \"4s\"\n\
                    user_timeout = \"20s\"";
    let (env, _servers) = env_of_ends(settings)?;
    let mut ended = Vec::new();
    for (how, own_port) in ENDS.into_iter().zip(PORT + 100..) {
        for address in [SERVER_V4, SERVER_V4_OTHER] {
            let mut one = socket(&env)?;
            end(&env, &mut one, how, address, own_port)
                .with_context(|| format!("{how:?} to {address}"))?;
            ended.push((how, one));
        }
    }
    env.cli(&["detach", "--restore"])?;
    for pair in ended.chunks_mut(2) {
        let [(how, policy), (_, control)] = pair else {
            bail!("not two");
        };
        let (policy, control) = (all(policy)?, all(control)?);
        ensure!(policy == control, "{how:?}:\n{policy:?}\n{control:?}");
    }
    Ok(())
}

test!(
    restoring_scan_leaves_callbacks_of_others,
    needs = [TCP_ITERATOR]
);
/// The other program requests RTT_CB, which runs it once a round trip.
fn restoring_scan_leaves_callbacks_of_others() -> anyhow::Result<()> {
    const RTT_CB: i32 = 1 << 3;
    const ROUNDS: usize = 20;
    let mut env = configured(&policy("initial_rto = \"100ms\"\nrto_min = \"40ms\""))?;
    let other = Foreign::attach_overwriting_established(env.cgroup.path(), RTT_CB)?;
    env.start()?;
    let _counting = foreign::count_runs()?;
    let _server = env.echo_server(to(SERVER_V4, PORT))?;
    let mut open = env.converse(to(SERVER_V4, PORT))?;
    let mut runs = || -> anyhow::Result<u64> {
        let before = foreign::runs_of(other.program_id()?)?.count;
        open.rounds(ROUNDS)?;
        Ok(foreign::runs_of(other.program_id()?)?.count - before)
    };
    let before = runs()?;
    ensure!(before >= ROUNDS as u64, "{before} runs");
    env.cli(&["detach", "--restore"])?;
    let after = runs()?;
    ensure!(after >= ROUNDS as u64, "{after} runs, before {before}");
    Ok(())
}
