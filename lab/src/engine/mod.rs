//! The engine of experiments.
//!
//! An [`Experiment`] defines what varies (*factors*), makes testbeds, and measures one run in one of them. The engine
//! runs everything in an order derived from the seed, several runs at once, and writes each finished run to a log of
//! JSON lines, so that an interrupted experiment continues from there. A run produces [`Record`]s: levels of the
//! factors, and the values measured there, unchanged.
//!
//! The first line of the log is its [`Manifest`]: the machine, the seed, and the [`Design`], which defines the tables,
//! charts and effects. So a report is made from the log alone, at any time ([`report`]), and so are the differences of
//! two logs ([`compare`]). Nothing else draws conclusions from records: an effect is a difference with an interval, and
//! one rule decides what is worse ([`Verdict`]).

mod compare;
mod design;
mod effects;
mod interval;
mod log;
mod pivot;
mod render;
mod runner;

pub use compare::compare;
pub(crate) use design::{CONGESTION, only, published, references, texts};
pub use design::{ChartSpec, Column, Design, EffectSpec, Only, Stat, TableSpec};
pub use effects::Verdict;
pub(crate) use effects::by_level;
pub use log::{Log, Manifest, Record, Weighted};
pub use render::report;
pub use runner::{Experiment, Options, run, seed_of};
