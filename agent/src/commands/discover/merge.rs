//! Merges prefixes that can share an entry: prefixes of a route, or neighbours with similar times.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use rto_agent_core::policy::{Cidr, InitialRtoSetting, Settings, compile::check_prefix_width};
use rto_model::{distribution::Distribution, tune::law::LEAST_SAMPLES};

/// The quantile by which prefixes are compared.
pub(super) const SHARE: f64 = 0.999;
/// Prefixes are similar if their quantiles differ by less than this factor.
const FACTOR: u64 = 2;
/// The samples that a median needs. With less than [`LEAST_SAMPLES`] the quantile is unknown.
const MEDIAN_SAMPLES: u64 = 30;

/// The counts of a prefix.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) cidr: Cidr,
    /// Whether the prefix is a route's destination.
    pub(super) is_route: bool,
    /// The number of counted prefixes in it.
    pub(super) seen: usize,
    /// Counted connections.
    pub(super) connections: u64,
    pub(super) recovered: u64,
    /// Handshake times, each as the upper bound of its bucket.
    pub(super) times: Distribution,
}

impl Unit {
    fn of(cidr: Cidr, is_route: bool, parts: &[Self]) -> Self {
        let mut whole = Self {
            cidr,
            is_route,
            seen: 0,
            connections: 0,
            recovered: 0,
            times: Distribution::default(),
        };
        for part in parts {
            whole.seen += part.seen;
            whole.connections = whole.connections.saturating_add(part.connections);
            whole.recovered = whole.recovered.saturating_add(part.recovered);
            whole.times.extend(&part.times);
        }
        whole
    }
}

/// Whether a prefix cannot contain peers for a policy: this host, its links, multicast groups,
/// unassigned addresses. Private prefixes can.
pub(super) fn is_special(cidr: &Cidr) -> bool {
    match cidr.network().ip() {
        IpAddr::V4(a) => {
            let first = a.octets()[0];
            a.is_loopback() || a.is_link_local() || first == 0 || first >= 224
        }
        // The first /48 has ::1 and addresses with embedded IPv4 addresses (RFC 4291).
        IpAddr::V6(a) => a.is_unspecified() || a.is_unicast_link_local() || a.is_multicast(),
    }
}

/// Merges similar prefixes of a route, and similar halves among the other prefixes.
pub(super) fn merged(units: Vec<Unit>, routes: &BTreeSet<Cidr>) -> Vec<Unit> {
    let mut by_route: BTreeMap<Cidr, Vec<Unit>> = BTreeMap::new();
    let mut rest = Vec::new();
    for unit in units {
        match route_of(&unit.cidr, routes) {
            Some(route) => by_route.entry(route).or_default().push(unit),
            None => rest.push(unit),
        }
    }
    let mut merged = Vec::new();
    for (route, parts) in by_route {
        if are_alike(&parts) {
            merged.push(Unit::of(route, true, &parts));
        } else {
            rest.extend(parts);
        }
    }
    merged.extend(halves_merged(rest));
    merged
}

/// The longest route to a prefix that is narrow enough for one entry.
fn route_of(cidr: &Cidr, routes: &BTreeSet<Cidr>) -> Option<Cidr> {
    let lengths = (1..=cidr.prefix()).rev();
    let mut containing = lengths.filter_map(|l| Cidr::containing(cidr.network().ip(), l));
    let route = containing.find(|cidr| routes.contains(cidr))?;
    is_narrow(&route).then_some(route)
}

/// Merges two similar halves into their prefix, starting with the longest prefixes.
fn halves_merged(units: Vec<Unit>) -> Vec<Unit> {
    let mut units: BTreeMap<Cidr, Unit> = units.into_iter().map(|u| (u.cidr, u)).collect();
    for length in (2..=128).rev() {
        let of_length = units.keys().filter(|cidr| cidr.prefix() == length);
        let of_length: Vec<Cidr> = of_length.copied().collect();
        for pair in of_length.windows(2) {
            let [first, second] = [pair[0], pair[1]];
            let parent = |cidr: Cidr| Cidr::containing(cidr.network().ip(), length - 1);
            let Some(whole) = parent(first).filter(|whole| parent(second) == Some(*whole)) else {
                continue;
            };
            let halves = [first, second].map(|cidr| units.get(&cidr).cloned());
            if let [Some(first), Some(second)] = halves
                && is_narrow(&whole)
            {
                let halves = [first, second];
                if are_alike(&halves) {
                    for half in &halves {
                        units.remove(&half.cidr);
                    }
                    units.insert(whole, Unit::of(whole, false, &halves));
                }
            }
        }
    }
    units.into_values().collect()
}

/// Whether a policy for this prefix needs no `force`.
fn is_narrow(cidr: &Cidr) -> bool {
    let shortest = Settings {
        initial_rto: Some(InitialRtoSetting::Fixed(Duration::from_millis(1))),
        ..Settings::default()
    };
    check_prefix_width(cidr, &shortest).is_ok()
}

/// Whether one timer suits all parts: the quantiles of parts with enough samples are within
/// [`FACTOR`], and so are the medians of the others. Parts with hardly any samples join the rest.
fn are_alike(parts: &[Unit]) -> bool {
    let of = |least: u64, share: f64| -> Vec<u64> {
        let enough = parts.iter().filter(|part| part.times.count() >= least);
        enough
            .filter_map(|part| part.times.quantile_us(share))
            .collect()
    };
    let has_few = parts.iter().any(|part| part.times.count() < LEAST_SAMPLES);
    are_near(&of(LEAST_SAMPLES, SHARE)) && (!has_few || are_near(&of(MEDIAN_SAMPLES, 0.5)))
}

fn are_near(times_us: &[u64]) -> bool {
    let (least, most) = (times_us.iter().min(), times_us.iter().max());
    least
        .zip(most)
        .is_none_or(|(least, most)| *most < least.saturating_mul(FACTOR))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(cidr: &str, us: u64, count: u64) -> Unit {
        let mut times = Distribution::default();
        times.add(us, count);
        Unit {
            cidr: cidr.parse().unwrap(),
            is_route: false,
            seen: 1,
            connections: count + 1,
            recovered: 1,
            times,
        }
    }

    fn names(units: &[Unit], routes: &[&str]) -> Vec<String> {
        let routes = routes.iter().map(|route| route.parse().unwrap());
        let merged = merged(units.to_vec(), &routes.collect());
        let connections = |units: &[Unit]| units.iter().map(|u| u.connections).sum::<u64>();
        assert_eq!(connections(&merged), connections(units));
        merged.iter().map(|unit| unit.cidr.to_string()).collect()
    }

    #[test]
    fn similar_halves_are_merged() {
        let quarter = [
            unit("10.0.0.0/24", 1_000, 500),
            unit("10.0.1.0/24", 1_500, 500),
            unit("10.0.2.0/24", 1_200, 500),
            unit("10.0.3.0/24", 1_900, 500),
        ];
        assert_eq!(names(&quarter, &[]), ["10.0.0.0/22"]);
        // Neighbours that are not halves of one prefix are not merged.
        assert_eq!(names(&quarter[1..3], &[]), ["10.0.1.0/24", "10.0.2.0/24"]);
        let far = [quarter[0].clone(), unit("10.0.1.0/24", 2_000, 500)];
        assert_eq!(names(&far, &[]), ["10.0.0.0/24", "10.0.1.0/24"]);
        let v6 = [
            unit("2001:db8::/48", 1_000, 500),
            unit("2001:db8:1::/48", 1_000, 500),
        ];
        assert_eq!(names(&v6, &[]), ["2001:db8::/47"]);
    }

    #[test]
    fn few_samples_use_their_median() {
        let near = unit("10.0.0.0/24", 1_000, 500);
        for (us, count, is_one) in [
            (1_500, 40, true),
            (50_000, 40, false),
            (50_000, 29, true),
            (50_000, 0, true),
        ] {
            let other = unit("10.0.1.0/24", us, count);
            let found = names(&[near.clone(), other], &[]).len();
            assert_eq!(found == 1, is_one, "{count} of {us} us");
        }
    }

    #[test]
    fn merged_prefix_never_needs_force() {
        let all: Vec<_> = (0..=255)
            .flat_map(|a| (0..=255).map(move |b| format!("10.{a}.{b}.0/24")))
            .map(|cidr| unit(&cidr, 1_000, 300))
            .chain([unit("11.0.0.0/24", 1_000, 300)])
            .collect();
        let found = names(&all, &["10.0.0.0/7"]);
        assert!(found.len() < 10, "{found:?}");
        for cidr in found {
            assert!(is_narrow(&cidr.parse().unwrap()), "{cidr}");
        }
    }

    #[test]
    fn similar_prefixes_merge_to_longest_route() {
        let units = [
            unit("10.1.0.0/24", 1_000, 500),
            unit("10.1.7.0/24", 1_000, 500),
            unit("10.1.9.0/24", 9_000, 500),
        ];
        assert_eq!(
            names(&units, &["10.1.0.0/16", "10.1.9.0/24"]),
            ["10.1.0.0/16", "10.1.9.0/24"]
        );
        // The prefixes are not similar, so they stay separate.
        assert_eq!(names(&units, &["10.1.0.0/16"]).len(), 3);
        // A route to part of a prefix does not merge the whole prefix.
        assert_eq!(names(&units[..1], &["10.1.0.0/25"]), ["10.1.0.0/24"]);
    }

    #[test]
    fn loopback_and_link_local_are_skipped() {
        let is = |cidr: &str| is_special(&cidr.parse().unwrap());
        for special in [
            "0.0.0.0/24",
            "127.0.0.0/24",
            "127.5.0.0/24",
            "169.254.9.0/24",
            "224.0.0.0/24",
            "255.255.255.0/24",
            "::/48",
            "fe80::/48",
            "ff02::/48",
        ] {
            assert!(is(special), "{special}");
        }
        for peer in [
            "10.0.0.0/24",
            "192.168.1.0/24",
            "100.64.0.0/24",
            "203.0.113.0/24",
            "fd00:1::/48",
            "2001:db8::/48",
        ] {
            assert!(!is(peer), "{peer}");
        }
    }
}
