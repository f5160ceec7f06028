//! `cargo xtask soak`: runs an agent in a virtual machine for hours, with connections to a second machine and
//! disturbances.
//!
//! `tests/src/soak` is the part that runs in the machines. The machine with the agent prints events, which are the
//! input of the report and stay in target/soak.

use std::{
    fs,
    io::Write as _,
    net::UdpSocket,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail, ensure};

use crate::{
    process::need,
    root, setup, test,
    vm::{
        self, image, kernels,
        machine::{Clock, Machine},
    },
};

mod report;
mod trend;

use report::Report;

/// `cargo xtask soak`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Duration in hours, not counting the boot
    #[arg(long, default_value_t = 4.0, conflicts_with = "minutes")]
    hours: f64,
    /// Duration in minutes
    #[arg(long)]
    minutes: Option<f64>,
    /// The kernel: 5.10, 6.1, 6.12 or newest
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Seed of the order of disturbances; random by default
    #[arg(long)]
    seed: Option<u64>,
    /// Use the build of `cargo xtask test` instead of an optimised one, which needs half as much CPU time in a machine
    #[arg(long)]
    unoptimised: bool,
    /// Run the machines' clocks this many times as fast as this host's: at 2.5, four hours take 96 minutes
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
}

/// Shortest soak in which growth can be distinguished from noise.
const LEAST: Duration = Duration::from_secs(600);
/// Time that a machine may run in addition to its disturbances: booting, the last round, and the wait for the other
/// machine.
const BESIDE: Duration = Duration::from_secs(1200);
/// At 2.5 the emulated CPU is busy most of the time: above this limit its work would be late.
const FASTEST: f64 = 3.0;
/// Programs in the machines, in addition to those that tests call.
const PROGRAMS: [&str; 3] = ["rto-agent", "rto-workload", "rto-soak"];
/// Prefix of the machine's events.
const EVENT: &str = "soak ";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let minutes = args.minutes.unwrap_or(args.hours * 60.0);
    let duration = Duration::try_from_secs_f64(minutes * 60.0).context("how long?")?;
    ensure!(
        duration >= LEAST,
        "a soak takes {} minutes or more",
        LEAST.as_secs() / 60
    );
    let speed = args.speed;
    ensure!(
        (1.0..=FASTEST).contains(&speed),
        "a speed is between 1 and {FASTEST}"
    );
    setup::run()?;
    vm::install()?;
    if speed > 1.0 {
        need(&[("faketime", "faketime")], "clocks that run faster")?;
    }
    let (built, _) = test::build_for_machines(args.unoptimised)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let seed = args.seed.unwrap_or(now);
    let kernel = kernels::named(&args.kernel, false)?;
    let programs = PROGRAMS.map(|name| (built.join(name), name));
    let system = image::system(&kernel, &programs)?;
    let seconds = duration.as_secs();
    let host = format!(r#"{{"host":{{"seconds":{seconds},"seed":{seed}}}}}"#);
    let images = [
        image::archive(&system, &script(&host))?,
        image::archive(&system, &script("\"peer\""))?,
    ];
    let links = links()?;
    let limit = (duration + duration / 5).div_f64(speed) + BESIDE;
    let machine = |index: usize| Machine {
        network: Some(&links[index]),
        clock: Clock::Host { speed },
        processors: 1,
        memory_mib: 1024,
        ..Machine::new(&kernel.image, &images[index], limit)
    };
    let dir = root().join("target/soak");
    fs::create_dir_all(&dir)?;
    let path = dir.join(format!("{}-{now}.jsonl", kernel.version));
    println!(
        "booting two machines with Linux {} for {} min, seed {seed}; events: {}",
        kernel.version,
        seconds / 60,
        path.display()
    );
    let begin = Instant::now();
    let mut report = Report::default();
    let mut events = fs::File::create(&path)?;
    thread::scope(|scope| {
        // The machine with the agent detects failures of its peer.
        let peer = scope.spawn(|| machine(1).boot(|line| println!("[peer] {line}")));
        machine(0).boot(|line| match line.strip_prefix(EVENT) {
            Some(text) => {
                if let Some(line) = report.take(text) {
                    println!("[host] {line}");
                }
                // Stored next to the report, which does not depend on it.
                let _ = writeln!(events, "{text}");
            }
            None => {
                report.take_other(line);
                println!("[host] {line}");
            }
        })?;
        peer.join()
            .unwrap_or_else(|_| bail!("a panic at the peer's console"))
    })?;
    let took = begin.elapsed().as_secs() / 60;
    println!("{report}\n{took} min of this host's clock, with booting");
    let wrong = report.wrong();
    ensure!(wrong.is_empty(), "failed:\n{}", wrong.join("\n"));
    println!("passed");
    Ok(())
}

/// The script of a machine.
fn script(role: &str) -> String {
    let (dir, exit) = (image::PROGRAM_DIR, image::EXIT);
    // Before it powers off, the last packets of its connections must be sent.
    format!(
        "for module in virtio_pci virtio_net; do modprobe $module; done
{dir}/rto-soak '{role}' 2>&1
echo \"{exit}$?\"
sleep 1
"
    )
}

/// The two ends of a cable between the machines, as arguments of QEMU's `-nic`: its packets use the loopback interface.
fn links() -> anyhow::Result<[String; 2]> {
    // No other process gets these ports while both are open.
    let sockets = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0"));
    let [one, other] = sockets.map(|socket| anyhow::Ok(socket?.local_addr()?));
    let (one, other) = (one?, other?);
    let end = |local, remote, mac| {
        format!(
            "socket,udp={remote},localaddr={local},model=virtio-net-pci,mac=52:54:00:00:90:0{mac}"
        )
    };
    Ok([end(one, other, 1), end(other, one, 2)])
}
