//! One file per command.

pub mod advise;
pub mod blackout;
pub mod connect;
pub mod estimator;
pub mod file;
pub mod outage;
pub mod predict;
pub mod report;
pub mod rr;
pub mod run;
pub mod tune;

use std::{
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
};

use anyhow::ensure;
use nix::unistd::geteuid;
use rto_agent_core::printable;
use rto_testbed::workload as testbed;
use serde::Serialize;

use crate::{
    cli::{Common, EngineArgs, Verb},
    engine::{self, Experiment},
    experiment::definition,
    interrupt, protocol,
    report::Report,
};

/// Runs a command; exit status 0: done, 1: rejected or failed (clap returns 2 for wrong usage).
pub fn dispatch(verb: Verb) -> ExitCode {
    let done = match verb {
        Verb::Workload { role } => {
            return protocol::main(&role).unwrap_or_else(|| testbed::main([role]));
        }
        Verb::Advise(args) => advise::run(&args),
        Verb::Blackout(args) => blackout::run(&args),
        Verb::Connect(args) => connect::run(&args),
        Verb::Estimator(args) => estimator::run(&args),
        Verb::File(args) => file::run(&args),
        Verb::Loss(args) => run::own("loss", &args),
        Verb::Outage(args) => outage::run(&args),
        Verb::Predict(args) => predict::run(&args),
        Verb::Pages(args) => run::own("pages", &args),
        Verb::Programs(args) => run::own("programs", &args),
        Verb::Report(args) => report::run(&args),
        Verb::Compare(args) => report::compare(&args),
        Verb::Rr(args) => rr::run(&args),
        Verb::Rtt(args) => run::own("rtt", &args),
        Verb::Run { file, options } => run::run(&file, &options),
        Verb::Sampler(args) => run::own("sampler", &args),
        Verb::Tail(args) => run::own("tail", &args),
        Verb::Tune(args) => tune::run(&args),
        Verb::Workloads(args) => run::own("workloads", &args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rto-lab: {}", printable::lines(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// Whether the reader of the output has closed it, which is not an error.
fn broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints text, or a value as JSON.
fn print(json: bool, value: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, value)?;
        writeln!(out)?;
    } else {
        out.write_all(text().as_bytes())?;
    }
    Ok(())
}

/// Runs an experiment in its own namespaces and writes its report.
fn experiment(common: &Common, run: impl FnOnce() -> anyhow::Result<Report>) -> anyhow::Result<()> {
    ensure!(
        geteuid().is_root(),
        "network namespaces, TUN devices and eBPF need root: run it with sudo"
    );
    rto_testbed::process::require(&["ip"])?;
    rto_testbed::leftovers::sweep();
    // Outages must begin and end on time, even on a busy machine.
    rto_testbed::process::run_in_real_time();
    study(common, run)
}

/// Runs a study that needs only files, and writes its report.
fn study(common: &Common, run: impl FnOnce() -> anyhow::Result<Report>) -> anyhow::Result<()> {
    interrupt::handle()?;
    let report = run().map_err(|error| interrupt::check().err().unwrap_or(error))?;
    publish(&report, &common.out, common.json)
}

/// Writes a report and prints it.
fn publish(report: &Report, out: &Path, json: bool) -> anyhow::Result<()> {
    report.write(out)?;
    print(json, report, || report.text())?;
    let page = out.join(format!("{}.html", report.name));
    eprintln!("report: {}", printable::path(&page));
    Ok(())
}

/// Runs an experiment on emulated links.
fn on_links(args: &EngineArgs, plan: anyhow::Result<definition::Plan>) -> anyhow::Result<()> {
    measure(&args.common, &plan?, args.jobs.into(), args.fresh)
}

/// Runs an experiment of the engine.
fn measure(
    common: &Common,
    plan: &impl Experiment,
    jobs: usize,
    fresh: bool,
) -> anyhow::Result<()> {
    let options = engine::Options {
        seed: common.seed,
        jobs,
        out: &common.out,
        fresh,
    };
    experiment(common, || engine::run(plan, &options))
}
