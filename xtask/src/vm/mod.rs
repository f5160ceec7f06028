//! `cargo xtask vm`: runs the integration tests on other kernels, in small virtual machines.
//!
//! A machine is a Debian kernel and an initramfs made here, without network and disk. It is emulated and its clock
//! counts instructions, so that timers are exact under any load of this host.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

use crate::{
    process::{as_root, need, output},
    root, setup, test,
};

#[path = "../../../tests/declared.rs"]
#[expect(unreachable_pub, reason = "the tests export it")]
mod declared;
pub(crate) mod image;
pub(crate) mod kernels;
pub(crate) mod machine;
mod matrix;
mod results;

use image::{BUSYBOX, EXIT, PROGRAM_DIR};
use kernels::Unpacked;
use machine::Machine;
use matrix::{Column, Matrix};

/// `cargo xtask vm`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose name contains one of these. Without filters, the whole suite runs, and docs/matrix.json and
    /// its table are updated
    filters: Vec<String>,
    /// Also keep the results of filtered tests: whole groups only ("syn::"), which replace earlier results
    #[arg(long)]
    keep: bool,
    /// The kernels: 5.10, 6.1, 6.12, newest, host (this kernel, without a machine), a comma-separated list of these,
    /// or all
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Run nothing: mark tests without a result as pending in docs/matrix.json
    #[arg(long, conflicts_with_all = ["filters", "keep"])]
    pending: bool,
    /// Download newer packages of the kernels than the cached ones
    #[arg(long)]
    refresh: bool,
    /// Machines at once
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Use the build of `cargo xtask test` instead of an optimised one, which is twice as fast in a machine
    #[arg(long)]
    unoptimised: bool,
}

/// Tests that do not run in the machines, and why.
const LEFT_OUT: [(&str, &str); 1] = [(
    "lab_",
    "measurements of a minute and more at the pace of a real machine",
)];

/// This host's kernel in `--kernel`.
const HOST: &str = "host";
/// Time after which a machine is stopped.
const LIMIT: Duration = Duration::from_secs(5400);
/// Maximum number of tests in one boot of a machine.
const BATCH: usize = 40;
/// Slow groups: each runs in its own machine, after all others.
const HEAVY: [&str; 2] = ["scale", "faults"];

enum Place {
    Machine(Unpacked),
    Host,
}

impl Place {
    fn name(&self) -> &str {
        match self {
            Self::Machine(kernel) => &kernel.version,
            Self::Host => HOST,
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    args.check()?;
    if args.pending {
        let pending = Matrix::note_pending(&expected(&test::build_programs()?)?)?;
        println!("{pending} results are pending");
        return Ok(());
    }
    setup::run()?;
    install()?;
    let places = places(args)?;
    let (programs, integration) = test::build_for_machines(args.unoptimised)?;
    for (name, why) in LEFT_OUT {
        println!("left out in the machines: {name}* ({why})");
    }
    let mut expected = expected(&integration)?;
    let batches = args.batches(&expected);
    // Each batch runs on all kernels before the next one, so that a broken test shows up early.
    let work = batches
        .iter()
        .flat_map(|batch| places.iter().map(move |place| (place, batch)));
    let next = Mutex::new(work);
    let columns = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                // Not `while let`, which holds the lock while the tests run.
                let taken = || locked(&next).next();
                while let Some((place, filters)) = taken() {
                    let column = column(place, &programs, &integration, filters, args);
                    locked(&columns).push(column.with_context(|| place.name().to_owned()));
                }
            });
        }
    });
    let mut matrix = Matrix::default();
    let mut bad = Vec::new();
    for column in columns.into_inner().unwrap_or_default() {
        match column {
            Ok(column) => matrix.take(&column),
            Err(e) => bad.push(format!("{e:#}")),
        }
    }
    println!("{}", matrix.table());
    expected.retain(|name| args.asks_for(name));
    bad.extend(matrix.failures());
    bad.extend(matrix.mismatches(&expected));
    ensure!(bad.is_empty(), "{}", bad.join("\n"));
    Ok(())
}

/// Fails unless docs/matrix.json accounts for each of the integration tests on each kernel.
pub(crate) fn check_matrix(integration: &Path) -> anyhow::Result<()> {
    Matrix::check(&expected(integration)?)
}

/// The names of the tests that run on each kernel.
fn expected(integration: &Path) -> anyhow::Result<BTreeSet<String>> {
    let list = output(as_root(&integration.to_string_lossy()).arg("--list"))?;
    let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
    // "[absent: tcp-rto-max] established::rto_max_caps_the_backoff"
    let names = names.filter_map(|name| name.rsplit(' ').next());
    let is_left_out = |name: &&str| LEFT_OUT.iter().any(|(left, _)| name.starts_with(left));
    Ok(names
        .filter(|name| !is_left_out(name))
        .map(str::to_owned)
        .collect())
}

impl Args {
    fn is_kept(&self) -> bool {
        self.keep || self.filters.is_empty()
    }

    fn asks_for(&self, test: &str) -> bool {
        let filters = &self.filters;
        filters.is_empty() || filters.iter().any(|filter| test.contains(filter))
    }

    /// A part of a group would replace the results of the whole group.
    fn check(&self) -> anyhow::Result<()> {
        let part = self.filters.iter().find(|filter| !filter.ends_with("::"));
        ensure!(
            !self.keep || part.is_none(),
            "--keep takes whole groups, as \"syn::\", not {}",
            part.map_or("", String::as_str)
        );
        Ok(())
    }

    /// The filters of each machine.
    fn batches(&self, tests: &BTreeSet<String>) -> Vec<Vec<String>> {
        if !self.filters.is_empty() {
            return vec![self.filters.clone()];
        }
        let group = |name: &String| name.split("::").next().unwrap_or(name).to_owned();
        let groups: Vec<String> = tests.iter().map(group).collect();
        let (mut batches, mut batch, mut count) = (Vec::new(), Vec::new(), 0);
        for tests in groups.chunk_by(|a, b| a == b) {
            let name = &tests[0];
            if HEAVY.contains(&name.as_str()) {
                continue;
            }
            if count > 0 && count + tests.len() > BATCH {
                batches.push(std::mem::take(&mut batch));
                count = 0;
            }
            batch.push(format!("{name}::"));
            count += tests.len();
        }
        batches.push(batch);
        batches.extend(HEAVY.map(|name| vec![format!("{name}::")]));
        batches
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn places(args: &Args) -> anyhow::Result<Vec<Place>> {
    let place = |name: &str| match name {
        HOST => Ok(Place::Host),
        _ => kernels::named(name, args.refresh).map(Place::Machine),
    };
    if args.kernel == "all" {
        let names = kernels::KERNELS.iter().map(|kernel| kernel.name);
        return names.chain([HOST]).map(place).collect();
    }
    args.kernel.split(',').map(place).collect()
}

pub(crate) fn install() -> anyhow::Result<()> {
    let qemu = ("qemu-system-x86_64", "qemu-system-x86");
    need(&[qemu, (BUSYBOX, "busybox-static")], "virtual machines")
}

/// Runs the tests on one kernel; returns their results, which are also added to docs/matrix.json.
fn column(
    place: &Place,
    programs: &Path,
    integration: &Path,
    filters: &[String],
    args: &Args,
) -> anyhow::Result<Column> {
    let begin = Instant::now();
    let name = place.name();
    let mut lines = Vec::new();
    let mut status = None;
    let mut print = |line: &str| {
        println!("[{name} {:4} s] {line}", begin.elapsed().as_secs());
        if let Some(number) = line.strip_prefix(EXIT) {
            status = number.trim().parse().ok();
        }
        lines.push(line.to_owned());
    };
    let version = match place {
        Place::Machine(kernel) => {
            let image = initramfs(kernel, programs, integration, filters)?;
            Machine::new(&kernel.image, &image, LIMIT).boot(&mut print)?;
            kernel.version.clone()
        }
        Place::Host => {
            let script = script(&format!("'{}'", integration.display()), filters);
            let environment = ["RTO_TESTS_REPORT=1", "RUST_BACKTRACE=0"];
            output(as_root("env").args(environment).args(["sh", "-c", &script]))?
                .lines()
                .for_each(&mut print);
            let release = nix::sys::utsname::uname()?;
            // The name of a host's build is left out: "6.18.44" of "6.18.44-name-1".
            let release = release.release().to_string_lossy().into_owned();
            let mut parts = release.split(|c: char| !c.is_ascii_digit() && c != '.');
            let version = parts.next().unwrap_or_default();
            version.trim_end_matches('.').to_owned()
        }
    };
    let status: i32 = status.context("it ended without a result")?;
    let took = begin.elapsed().as_secs();
    println!("[{name}] status {status} after {took} s");
    let column = Column::of(version, matches!(place, Place::Host), status, &lines)?;
    if args.is_kept() {
        Matrix::add(&column)?;
    }
    Ok(column)
}

/// The file system of a machine with the tests.
fn initramfs(
    kernel: &Unpacked,
    programs: &Path,
    integration: &Path,
    filters: &[String],
) -> anyhow::Result<tempfile::TempPath> {
    let tests = "deps/integration";
    let mut all = vec![(integration.to_owned(), tests)];
    all.extend(["rto-agent", "rto-workload", "rto-lab"].map(|name| (programs.join(name), name)));
    let system = image::system(kernel, &all)?;
    // Tests read these at the path of the build, from the directory of their own crate.
    let sources = "Cargo.toml README.md config docs systemd tests/Cargo.toml".split(' ');
    let sources = sources.map(|path| root().join(path));
    image::add(system.path(), sources)?;
    // One thread, because the machine is slow.
    let tests = format!("{PROGRAM_DIR}/{tests} --test-threads 1");
    image::archive(
        &system,
        &format!(
            "for module in veth tun nf_tables nft_limit nft_reject_inet; do modprobe $module; done
export RTO_TESTS_COUNTED=1 RTO_TESTS_DEBIAN_KERNEL=1
{}
",
            script(&tests, filters)
        ),
    )
}

/// Runs these tests once for each filter, and prints their exit status.
fn script(tests: &str, filters: &[String]) -> String {
    let filters = filters.join("' '");
    let skip = LEFT_OUT.map(|(name, _)| format!("--skip {name}")).join(" ");
    format!(
        "status=0
for filter in '{filters}'; do
  {tests} --color never {skip} $filter 2>&1 || status=$?
done
echo \"{EXIT}$status\""
    )
}
