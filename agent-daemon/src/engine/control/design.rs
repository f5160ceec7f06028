//! The design of a requested experiment.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use rto_agent_core::{
    policy::{PolicyName, Settings, Share},
    printable,
    wire::{experiments::StartRequest, ttl::parse_ttl},
};
use rto_model::tune::experiment::{Design, Ramp, Unit};

use crate::{
    engine::{EngineError, error::refused},
    experiment::digest,
};

/// The default duration.
const DURATION: &str = "7d";
/// Longest fleet name of an experiment, bytes.
const MAX_NAME: usize = 64;
/// Most steps of a ramp.
const MAX_SHARES: usize = 10;
/// Smallest and largest share, as fractions.
const SHARES: std::ops::RangeInclusive<f64> = 0.01..=0.99;

/// What an experiment compares, with which shares and for how long.
pub(super) fn design(
    policy: &PolicyName,
    settings: &Settings,
    request: &StartRequest,
) -> Result<Design, EngineError> {
    let outlives = settings.outlives_connections();
    let implied = if outlives {
        Unit::Peer
    } else {
        Unit::Connection
    };
    let unit = request.unit.unwrap_or(implied);
    if outlives && unit == Unit::Connection {
        return refused(format!(
            "policy {policy} sets options that also affect later connections to the same peer \
             (rto_min, rto_restart, delack_max, thin_linear, linear_retries, rto_max or \
             user_timeout), so connections of the two arms would not be independent; randomise \
             peers (--unit peer)"
        ));
    }
    if unit == Unit::Peer && (request.ramp.len() > 1 || request.promote) {
        return refused(
            "with --unit peer nothing can be proven, because connections are counted: the share \
             neither rises nor is promoted; give one share (--ramp 50%), without --promote",
        );
    }
    let duration = parse_ttl(request.duration.as_deref().unwrap_or(DURATION))
        .map_err(|e| EngineError::Refused(format!("--for {e}")))?;
    let name = request.name.as_deref().unwrap_or(policy.as_str());
    if name.is_empty() || name.len() > MAX_NAME || name.chars().any(printable::acts) {
        return refused("--name: it must have 1 to 64 printable bytes");
    }
    Ok(Design {
        policy: policy.to_string(),
        settings: digest(settings),
        identity: name.to_owned(),
        seed: seed(),
        unit,
        ramp: ramp(&request.ramp, unit)?,
        duration_s: duration.as_secs(),
        promote: request.promote,
    })
}

fn ramp(shares: &[Share], unit: Unit) -> Result<Ramp, EngineError> {
    let shares = match (shares, unit) {
        ([], Unit::Connection) => vec![0.05, 0.5, 0.95],
        ([], Unit::Peer) => vec![0.5],
        (shares, _) => shares.iter().map(|share| share.fraction()).collect(),
    };
    if shares.len() > MAX_SHARES {
        return refused(format!("--ramp: at most {MAX_SHARES} shares are possible"));
    }
    if let Some(share) = shares.iter().find(|share| !SHARES.contains(share)) {
        return refused(format!(
            "--ramp: a share must be 1% to 99%, not {}",
            Share::of_ratio(*share)
        ));
    }
    Ramp::try_from(shares).map_err(|e| EngineError::Refused(format!("--ramp: {e}")))
}

/// A random seed for the hash that draws the arms (hash tables have random keys).
fn seed() -> u32 {
    let [a, b, c, d, ..] = RandomState::new().build_hasher().finish().to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(settings: &str, request: StartRequest) -> Result<Design, String> {
        let settings: Settings = toml::from_str(settings).unwrap();
        let policy = "near".parse().unwrap();
        design(&policy, &settings, &request).map_err(|e| e.to_string())
    }

    fn ramp_of(shares: usize) -> StartRequest {
        let shares = (1..=shares).map(|n| format!("{}%", 5 * n).parse().unwrap());
        StartRequest {
            ramp: shares.collect(),
            ..StartRequest::default()
        }
    }

    #[test]
    fn experiment_by_peer_has_one_share() {
        let peers = "rto_min = '50ms'";
        for (request, is_possible) in [
            (ramp_of(0), true),
            (ramp_of(1), true),
            (ramp_of(2), false),
            (
                StartRequest {
                    promote: true,
                    ..ramp_of(1)
                },
                false,
            ),
        ] {
            let by_peer = of(peers, request.clone());
            assert_eq!(by_peer.is_ok(), is_possible, "{by_peer:?}");
            let by_connection = of("initial_rto = '100ms'", request);
            assert!(by_connection.is_ok(), "{by_connection:?}");
        }
    }

    #[test]
    fn limits() {
        for (shares, is_possible) in [
            (MAX_SHARES, true),
            (MAX_SHARES + 1, false),
            (MAX_SHARES + 2, false),
        ] {
            let design = of("initial_rto = '100ms'", ramp_of(shares));
            assert_eq!(design.is_ok(), is_possible, "{design:?}");
        }
        for (name, is_possible) in [
            (String::new(), false),
            ("n".to_owned(), true),
            ("n".repeat(MAX_NAME), true),
            ("n".repeat(MAX_NAME + 1), false),
            ("\u{1b}[2J".to_owned(), false),
        ] {
            let request = StartRequest {
                name: Some(name),
                ..StartRequest::default()
            };
            let design = of("initial_rto = '100ms'", request);
            assert_eq!(design.is_ok(), is_possible, "{design:?}");
        }
    }

    #[test]
    fn arms_are_drawn_again_at_each_start() {
        assert_ne!(seed(), seed());
    }
}
