//! The engine of experiments.
//!
//! An [`Experiment`] says what varies (*factors*), makes testbeds, and measures one run in one of them. The engine runs
//! all of it in an order of the seed, several runs at once, and writes each into a log of JSON lines as soon as it is
//! done: an experiment that was broken off continues from there. A run gives [`Record`]s: levels of the factors, and
//! the values measured there, as they were measured.
//!
//! The first line of the log is its [`Manifest`]: the machine, the seed, and the [`Design`], which says what tables,
//! charts and effects are wanted. So a report is made from the log alone, at any time ([`report`]), and so are the
//! differences of two logs ([`compare`]). Nothing else draws conclusions from records: an effect is a difference with an
//! interval, and one rule says what is worse ([`Verdict`]).

mod compare;
mod design;
mod effects;
mod interval;
mod log;
mod pivot;
mod render;
mod runner;

pub use compare::compare;
pub use design::{ChartSpec, Column, Design, EffectSpec, Only, Stat, TableSpec};
pub(crate) use design::{only, published, references, texts};
pub use effects::Verdict;
pub(crate) use effects::by_level;
pub use log::{Log, Manifest, Record, Weighted};
pub use render::report;
pub use runner::{Experiment, Options, run, seed_of};
