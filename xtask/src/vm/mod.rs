//! `cargo xtask vm`: runs the integration tests on other kernels, in small virtual machines.
//!
//! A machine is a Debian kernel and an initramfs made here, without network and disk. It is emulated and its clock
//! counts instructions, so that timers are exact under any load of this host.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Mutex,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use crate::{
    arch::Arch,
    process::{apt_install, as_root, have, output},
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

use image::{BUSYBOX, EXIT, Tests};
use kernels::Unpacked;
use machine::{Clock, Machine};
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
    /// Seconds after which a machine is stopped
    #[arg(long, default_value_t = 5400)]
    limit: u64,
    /// Machines at once
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Use an unpacked kernel package (dpkg-deb -x) instead of --kernel
    #[arg(long, value_name = "DIR")]
    unpacked: Option<PathBuf>,
    /// Use the build of `cargo xtask test` instead of an optimised one, which is twice as fast in a machine
    #[arg(long)]
    unoptimised: bool,
    /// Use the host's time instead of counting instructions
    #[arg(long)]
    host_clock: bool,
    /// Use KVM, which does not work on every host that has it
    #[arg(long)]
    kvm: bool,
}

/// Tests that do not run in the machines, and why.
const LEFT_OUT: [(&str, &str); 1] = [(
    "lab_",
    "measurements of a minute and more at the pace of a real machine",
)];

/// This host's kernel in `--kernel`.
const HOST: &str = "host";

enum Place {
    Machine { kernel: Unpacked, is_debian: bool },
    Host,
}

impl Place {
    fn name(&self) -> &str {
        match self {
            Self::Machine { kernel, .. } => &kernel.version,
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
    fs::create_dir_all(root().join("target/vm"))?;
    let places = places(args)?;
    let (programs, integration) = test::build_for_machines(args.unoptimised)?;
    for (name, why) in LEFT_OUT {
        println!("left out in the machines: {name}* ({why})");
    }
    let names = names(&integration)?;
    let batches = batches(args, &names);
    // Each batch runs on all kernels before the next one, so that a broken test shows up early.
    let work = batches.iter().flat_map(|batch| {
        let places = places.iter();
        places.map(move |place| (place, batch.as_slice()))
    });
    let next = Mutex::new(work);
    let outcome = Mutex::new(Outcome::default());
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let Some((place, filters)) = locked(&next).next() else {
                        return;
                    };
                    let built = (programs.as_path(), integration.as_path());
                    let column = column(place, built, filters, args);
                    locked(&outcome).take(place, column, args);
                }
            });
        }
    });
    let outcome = outcome.into_inner().unwrap_or_default();
    println!("{}", outcome.matrix.table());
    let expected = names.into_iter().filter(|name| {
        let filters = &args.filters;
        let is_asked = filters.is_empty() || filters.iter().any(|filter| name.contains(filter));
        is_asked && !is_left_out(name)
    });
    let missing = outcome.matrix.missing(&expected.collect());
    let bad = [outcome.errors, outcome.matrix.failures(), missing].concat();
    if bad.is_empty() {
        return Ok(());
    }
    bail!("{}", bad.join("\n"))
}

/// Fails unless docs/matrix.json accounts for each of the integration tests on each kernel.
pub(crate) fn check_matrix(integration: &Path) -> anyhow::Result<()> {
    Matrix::check(&expected(integration)?)
}

/// The names of the tests that run on each kernel.
fn expected(integration: &Path) -> anyhow::Result<BTreeSet<String>> {
    let names = names(integration)?.into_iter();
    Ok(names.filter(|name| !is_left_out(name)).collect())
}

/// Results so far.
#[derive(Default)]
struct Outcome {
    matrix: Matrix,
    errors: Vec<String>,
}

impl Outcome {
    fn take(&mut self, place: &Place, column: anyhow::Result<Column>, args: &Args) {
        let kept = column.and_then(|column| {
            self.matrix.take(&column);
            if args.is_kept() {
                Matrix::add(&column)?;
            }
            Ok(())
        });
        if let Err(e) = kept {
            self.errors.push(format!("{}: {e:#}", place.name()));
        }
    }
}

impl Args {
    fn is_kept(&self) -> bool {
        self.unpacked.is_none() && (self.keep || self.filters.is_empty())
    }

    /// A part of a group would replace the results of the whole group.
    fn check(&self) -> anyhow::Result<()> {
        let is_part = |filter: &&String| !filter.ends_with("::");
        match self.filters.iter().find(is_part) {
            Some(filter) if self.keep => {
                bail!("--keep takes whole groups, as \"syn::\", not {filter}")
            }
            _ => Ok(()),
        }
    }
}

/// Maximum number of tests in one boot of a machine.
const BATCH: usize = 40;

/// Slow groups: each runs in its own machine, after all others.
const HEAVY: [&str; 2] = ["scale", "faults"];

/// The names of all tests, in order.
fn names(integration: &Path) -> anyhow::Result<Vec<String>> {
    let list = output(as_root(&integration.to_string_lossy()).arg("--list"))?;
    let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
    // "[absent: tcp-rto-max] established::rto_max_caps_the_backoff"
    let names = names.filter_map(|name| name.rsplit(' ').next());
    Ok(names.map(str::to_owned).collect())
}

fn is_left_out(test: &str) -> bool {
    LEFT_OUT.iter().any(|(name, _)| test.starts_with(name))
}

/// The filters of each machine.
fn batches(args: &Args, names: &[String]) -> Vec<Vec<String>> {
    if !args.filters.is_empty() {
        return vec![args.filters.clone()];
    }
    let mut batches: Vec<Vec<String>> = vec![Vec::new()];
    let mut count = 0;
    for group in names.iter().filter_map(|name| name.split("::").next()) {
        if is_left_out(group) || HEAVY.contains(&group) {
            continue;
        }
        let filter = format!("{group}::");
        count += 1;
        if !batches.iter().flatten().any(|known| *known == filter) {
            if count > BATCH {
                batches.push(Vec::new());
                count = 0;
            }
            batches
                .last_mut()
                .into_iter()
                .for_each(|batch| batch.push(filter.clone()));
        }
    }
    batches.extend(HEAVY.map(|group| vec![format!("{group}::")]));
    batches
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn places(args: &Args) -> anyhow::Result<Vec<Place>> {
    if let Some(dir) = &args.unpacked {
        let kernel = Unpacked::at(dir)?;
        return Ok(vec![Place::Machine {
            kernel,
            is_debian: false,
        }]);
    }
    let names: Vec<&str> = args.kernel.split(',').collect();
    let others: Vec<&str> = names.iter().copied().filter(|n| *n != HOST).collect();
    let mut places = Vec::new();
    if !others.is_empty() {
        for kernel in kernels::named(&others.join(","))? {
            places.push(Place::Machine {
                kernel: kernels::unpacked(kernel, args.refresh)?,
                is_debian: true,
            });
        }
    }
    if names.contains(&HOST) || args.kernel == "all" {
        places.push(Place::Host);
    }
    Ok(places)
}

pub(crate) fn install() -> anyhow::Result<()> {
    let mut packages = Vec::new();
    if !have("qemu-system-x86_64") {
        packages.extend(["qemu-system-x86", "seabios"]);
    }
    if !Path::new(BUSYBOX).exists() {
        packages.push("busybox-static");
    }
    if packages.is_empty() {
        return Ok(());
    }
    apt_install(&packages, "virtual machines")
}

/// Runs the tests on one kernel; returns their results.
fn column(
    place: &Place,
    (programs, integration): (&Path, &Path),
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
    match place {
        Place::Machine { kernel, is_debian } => {
            let left_out = LEFT_OUT.map(|(name, _)| name);
            let image = image::initramfs(
                kernel,
                &Tests {
                    programs,
                    integration,
                    filters,
                    left_out: &left_out,
                    is_debian: *is_debian,
                },
            )?;
            let clock = match (args.kvm, args.host_clock) {
                (true, _) => Clock::Kvm,
                (false, true) => Clock::Host,
                (false, false) => Clock::Instructions,
            };
            let machine = Machine {
                arch: Arch::Amd64,
                kernel: &kernel.image,
                initramfs: &image,
                disk: None,
                network: None,
                clock,
                processors: 2,
                memory_mib: 2048,
                // The kernel passes unknown parameters to the first program as its environment.
                command_line: match clock {
                    Clock::Instructions => "RTO_TESTS_COUNTED=1",
                    Clock::Host | Clock::Faster(_) | Clock::Kvm => "",
                },
                limit: Duration::from_secs(args.limit),
            };
            machine.boot(&mut print)?;
        }
        Place::Host => on_host(integration, filters, &mut print)?,
    }
    let status: i32 = status.context("it ended without a result")?;
    println!(
        "[{name}] status {status} after {} s",
        begin.elapsed().as_secs()
    );
    let kernel = match place {
        Place::Machine { kernel, .. } => kernel.version.clone(),
        Place::Host => numbers(&nix::sys::utsname::uname()?.release().to_string_lossy()),
    };
    Column::of(kernel, matches!(place, Place::Host), status, &lines)
}

/// "6.18.44" of "6.18.44-name-1": the release without the name of the build.
fn numbers(release: &str) -> String {
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let end = release.find(|c| !is_number(c)).unwrap_or(release.len());
    release[..end].trim_end_matches('.').to_owned()
}

/// Runs the tests on this kernel.
fn on_host(
    integration: &Path,
    filters: &[String],
    print: &mut impl FnMut(&str),
) -> anyhow::Result<()> {
    let mut worst = 0;
    for filter in filters {
        let mut command = as_root("env");
        command
            .args(["RTO_TESTS_REPORT=1", "RUST_BACKTRACE=0"])
            .args(["sh", "-c", "exec \"$@\" 2>&1", "tests"])
            .arg(integration)
            .args(["--color", "never"])
            .arg(filter)
            .stdin(Stdio::null());
        let output = command.output()?;
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .for_each(&mut *print);
        let status = output.status;
        let code = status.code().or(status.signal()).unwrap_or(1);
        worst = worst.max(code);
    }
    print(&format!("{EXIT}{worst}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_without_the_name_of_its_build() {
        for release in ["6.18.44", "6.18.44-name-1", "6.18.44+", "6.18.44.name"] {
            assert_eq!(numbers(release), "6.18.44");
        }
        assert_eq!(numbers("6.18-rc1"), "6.18");
    }
}
