//! The lab's packet sampler.

use anyhow::ensure;
use rto_tests::lab::{cell, measured, quick};

use super::needs::PING;

test!(sampler_agrees_with_tcp_info_without_loss, needs = [PING]);
/// If every ACK is there, the sampler reads what TCP measures, in buckets of a millisecond; if ACKs are sampled, too, it
/// reads later ones.
fn sampler_agrees_with_tcp_info_without_loss() -> anyhow::Result<()> {
    measured(|| {
        let out = tempfile::tempdir()?;
        let report = quick("sampler", out.path(), &["--only", "request=one segment"])?;
        let at = |column: &str, pause| cell(&report, "views", column, &["one segment", pause]);
        for pause in ["0", "8", "32", "41"] {
            for end in ["client", "server"] {
                let tcp = at(&format!("TCP_INFO, {end}"), pause)?;
                let sampled = at(&format!("sampled, {end}"), pause)?;
                ensure!(
                    (sampled - tcp).abs() < 1.5,
                    "{end}, {pause}: {sampled}, {tcp}\n{report:#}"
                );
            }
        }
        // The delayed ACK takes part of the pause.
        ensure!(
            (32.0..34.0).contains(&at("sampled, server", "32")?),
            "{report:#}"
        );
        let (exported, sampled) = (at("exported, server", "32")?, at("sampled, server", "32")?);
        ensure!(
            exported > 2.0 * sampled,
            "{exported}, {sampled}\n{report:#}"
        );
        Ok(())
    })
}
