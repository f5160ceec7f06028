//! The surroundings of the runs: a pair of namespaces for each setting and way to make it.

use std::{
    collections::BTreeMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use super::{
    log::Done,
    plan::{Run, Setting, Way, us},
};
use crate::{
    experiment::Field,
    ground::{
        agent::Agent,
        netns::sysctl,
        process::{Dialogue, run},
    },
    interrupt,
    link::{Link, Medium, rule::Matching},
};

/// Clients of each post: so many runs of one setting at once.
const CLIENTS: usize = 4;
/// Transactions before the disruption: the estimator knows the path, and quick ACKs are over.
const BEFORE: u32 = 40;
/// The disruption begins at an unforeseeable moment of a transaction, within this time.
const PHASE: Duration = Duration::from_millis(2);
/// By how much the longest idle time may be shorter than the disruption: a response that was under way.
const UNDER_WAY: Duration = Duration::from_millis(1);
/// By how much more than a quarter a disruption may be longer than it should: a veth's ends when nft(8) has run.
const LINGERS: Duration = Duration::from_millis(20);
/// Attempts, if it was, if nothing was lost or the machine stood still before the disruption.
const ATTEMPTS: u32 = 10;

/// Namespaces, links and servers, one for each setting, and the agent that makes some of them.
pub(super) struct Posts {
    all: Vec<Stand>,
    _agent: Option<Agent>,
}

/// One of them.
struct Stand {
    key: (Way, Setting),
    // Before the namespaces that they are in.
    clients: Vec<Dialogue>,
    _server: Dialogue,
    field: Field,
}

impl Posts {
    /// Makes them.
    pub(super) fn new(
        posts: &[(Way, Setting)],
        medium: Medium,
        seed: u64,
        agent: Option<Agent>,
    ) -> anyhow::Result<Self> {
        let mut all = Vec::new();
        for (number, &(way, setting)) in posts.iter().enumerate() {
            interrupt::check()?;
            let number = u8::try_from(number).context("more settings than addresses")?;
            let cgroup = agent.as_ref().filter(|_| way == Way::Agent);
            let cgroup = cgroup.map(|agent| agent.cgroup.path());
            let field = Field::new(medium, number, seed ^ u64::from(number), cgroup)?;
            prepare(way, setting, &field)?;
            // What the agent or a route does not set, the application does.
            let thin = setting.thin.to_string();
            let thin: &[&str] = match way {
                Way::Route => &["--thin-linear", &thin],
                _ => &[],
            };
            let server = field.serve("answer", thin)?;
            let clients = (0..CLIENTS).map(|_| field.client("ask", thin));
            let clients = clients.collect::<Result<Vec<_>, _>>()?;
            all.push(Stand {
                key: (way, setting),
                clients,
                _server: server,
                field,
            });
        }
        Ok(Self { all, _agent: agent })
    }

    /// The same, for threads.
    pub(super) fn open(&mut self) -> Open<'_> {
        let posts = self.all.iter_mut().map(|stand| {
            let post = Post {
                link: &*stand.field.link,
                clients: std::mem::take(&mut stand.clients),
            };
            (stand.key, post)
        });
        Open {
            posts: Mutex::new(posts.collect()),
            free: Condvar::new(),
            gate: Mutex::new(()),
        }
    }
}

/// The policies of an agent that makes these settings.
pub(super) fn policies(posts: &[(Way, Setting)]) -> String {
    let mut text = String::new();
    for (number, (way, setting)) in posts.iter().enumerate() {
        if *way == Way::Agent {
            text.push_str(&format!(
                "[policy.c{number}]\ncidrs = [\"10.89.{number}.0/24\"]\nrto_min = \"{}us\"\nthin_linear = {}\n",
                setting.rto_min_us, setting.thin
            ));
        }
    }
    text
}

/// Whether this kernel has the sysctl that a way needs.
pub(super) fn can(way: Way) -> bool {
    way != Way::Sysctl || std::path::Path::new("/proc/sys/net/ipv4/tcp_rto_min_us").exists()
}

/// What is done without the agent.
fn prepare(way: Way, setting: Setting, field: &Field) -> anyhow::Result<()> {
    let ends = [
        (&field.net.client, field.link.server(false)),
        (&field.net.server, field.link.client(false)),
    ];
    for (netns, peer) in ends {
        match way {
            Way::Agent | Way::Kernel => {}
            Way::Route => {
                let route = run(&format!("ip -n {netns} route get {peer}"))?;
                let mut device = route.split_whitespace().skip_while(|word| *word != "dev");
                let device = device.nth(1).context("no device to the peer")?;
                // It has a resolution of milliseconds in the tool.
                let rto_min_ms = setting.rto_min_us / 1000;
                run(&format!(
                    "ip -n {netns} route add {peer}/32 dev {device} rto_min {rto_min_ms}ms"
                ))?;
            }
            Way::Sysctl => {
                let rto_min_us = setting.rto_min_us.to_string();
                sysctl(netns, "net.ipv4.tcp_rto_min_us", &rto_min_us)?;
                let thin = u8::from(setting.thin).to_string();
                sysctl(netns, "net.ipv4.tcp_thin_linear_timeouts", &thin)?;
            }
        }
    }
    Ok(())
}

struct Post<'a> {
    link: &'a dyn Link,
    clients: Vec<Dialogue>,
}

/// Posts that threads take clients from.
pub(super) struct Open<'a> {
    posts: Mutex<BTreeMap<(Way, Setting), Post<'a>>>,
    free: Condvar,
    /// Only one connects and talks at a time; those that are idle disturb nobody.
    gate: Mutex<()>,
}

impl<'a> Open<'a> {
    /// Takes one of the runs that can be begun, waiting for one if need be; `None` if there are none left.
    pub(super) fn take(&self, left: &Mutex<Vec<Run>>) -> Option<(Run, &'a dyn Link, Dialogue)> {
        let mut posts = lock(&self.posts);
        loop {
            let mut left = lock(left);
            if left.is_empty() {
                return None;
            }
            let ready = left.iter().rposition(|run| {
                let key = (run.cell.way, run.cell.setting);
                posts.get(&key).is_some_and(|post| !post.clients.is_empty())
            });
            if let Some(index) = ready {
                let run = left.remove(index);
                let post = posts.get_mut(&(run.cell.way, run.cell.setting))?;
                return Some((run, post.link, post.clients.pop()?));
            }
            drop(left);
            posts = self
                .free
                .wait(posts)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Has those that wait look again.
    pub(super) fn wake(&self) {
        // Not between a look of theirs and their wait.
        let _held = lock(&self.posts);
        self.free.notify_all();
    }

    /// Gives a client back.
    pub(super) fn give_back(&self, run: &Run, client: Dialogue) {
        let key = (run.cell.way, run.cell.setting);
        if let Some(post) = lock(&self.posts).get_mut(&key) {
            post.clients.push(client);
        }
        self.free.notify_all();
    }

    /// Measures one run; the phase is from 0 to 1.
    pub(super) fn measure(
        &self,
        run: Run,
        link: &dyn Link,
        client: &mut Dialogue,
        phase: f64,
    ) -> anyhow::Result<Done> {
        let disruption = Duration::from_micros(run.cell.disruption_us);
        for repeated in 0..ATTEMPTS {
            interrupt::check()?;
            let gate = lock(&self.gate);
            let port: u16 = client.ask(&format!("connect {BEFORE}"))?.parse()?;
            let at_least = us(disruption.saturating_sub(UNDER_WAY)).max(1);
            client.tell(&format!("go {at_least}"))?;
            thread::sleep(PHASE.mul_f64(phase));
            let begun = Instant::now();
            let dark = link.darken(Matching::ALL.of_client(port), disruption)?;
            drop(gate);
            let blackout = link.brighten(dark)?;
            let idle_us: u64 = client.reply()?.parse()?;
            // A machine that stood still before the disruption made the client believe that it was over.
            let over = begun.elapsed() >= disruption;
            let as_asked = blackout.until - blackout.from <= disruption + disruption / 4 + LINGERS;
            if blackout.dropped > 0 && over && idle_us >= at_least && as_asked {
                return Ok(Done {
                    run,
                    idle_us,
                    blackout_us: us(blackout.until - blackout.from),
                    dropped: blackout.dropped,
                    repeated,
                });
            }
        }
        bail!(
            "{:?}: {ATTEMPTS} attempts failed: nothing was lost, or disruptions were too long",
            run.cell
        )
    }
}

/// What others hold is whole also after a panic of theirs.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
