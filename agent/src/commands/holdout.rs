//! The comparison of a policy's arms, as text.

use rto_agent_core::{
    figures::{share, short_us},
    policy::PolicyName,
    wire::holdout::{ArmConnects, Difference, HoldoutView},
};
use rto_model::tune::evidence::Ratio;

use super::terminal::wrapped;

/// The verdict, the counts of both arms, and their difference.
pub(super) fn text(policy: &PolicyName, holdout: &HoldoutView, columns: Option<usize>) -> String {
    let arm = |title: &str, arm: &ArmConnects| {
        let mean = arm.mean_connect_time_us.map_or_else(String::new, |us| {
            format!(", mean connect time {}", short_us(us))
        });
        format!("  {title}: {}{mean}", connects(arm))
    };
    let mut lines = vec![
        format!("{policy}, {}", verdict(policy, holdout)),
        arm("treated", &holdout.arms.treated),
        arm("control", &holdout.arms.control),
        format!("  bad connects: {}", ratio(holdout.evidence.ratio)),
    ];
    let difference = holdout.connect_time_difference.map(difference);
    lines.extend(difference.map(|text| format!("  mean connect time: {text}")));
    let lines = lines.iter().map(|line| wrapped(line, 4, columns) + "\n");
    lines.collect()
}

/// "holdout 5%: not yet: about 12000 more attempts are needed ...".
pub(super) fn verdict(policy: &PolicyName, holdout: &HoldoutView) -> String {
    let fallback = match holdout.fallback {
        true => format!(
            "; fallback (harm): new connections get the kernel's own timers until rto-agent tune \
             resume {policy}, or until the policy's settings change"
        ),
        false => String::new(),
    };
    format!("holdout {}: {}{fallback}", holdout.share, holdout.text)
}

/// "25 of 9500 connects were bad (0.26%)".
pub(super) fn connects(arm: &ArmConnects) -> String {
    let ArmConnects { attempts, bad, .. } = arm;
    format!(
        "{bad} of {attempts} connects were bad ({})",
        share(*bad, *attempts)
    )
}

/// "0.22 times as frequent in the treated arm (0.10 to 0.44)".
pub(super) fn ratio(ratio: Ratio) -> String {
    let Ratio {
        likeliest,
        low,
        high,
    } = ratio;
    let high = high.map_or_else(|| "any".to_owned(), |high| format!("{high:.2}"));
    match likeliest {
        Some(likeliest) => {
            format!("{likeliest:.2} times as frequent in the treated arm ({low:.2} to {high})")
        }
        None => format!("{low:.2} to {high} times as frequent in the treated arm"),
    }
}

/// "1.50ms shorter in the treated arm (1.20ms to 1.80ms shorter)".
fn difference(difference: Difference) -> String {
    let [low, high] = difference.interval_us;
    let signed = |us: f64| {
        let way = if us < 0.0 { "shorter" } else { "longer" };
        (short_us(us.abs()), way)
    };
    let (mean, way) = signed(difference.mean_us);
    let (first, last) = (signed(low), signed(high));
    let interval = match first.1 == last.1 {
        true if low < 0.0 => format!("{} to {} {}", last.0, first.0, first.1),
        true => format!("{} to {} {}", first.0, last.0, first.1),
        false => format!("{} {} to {} {}", first.0, first.1, last.0, last.1),
    };
    format!("{mean} {way} in the treated arm ({interval})")
}

#[cfg(test)]
mod tests {
    use rto_agent_core::{testing, wire::holdout::Verdict};

    use super::*;

    #[test]
    fn comparison_fits_a_terminal() {
        let near: PolicyName = "near".parse().unwrap();
        let of = |verdict| text(&near, &testing::holdout(verdict), Some(80));
        let harm = of(Verdict::Harm);
        assert!(harm.lines().all(|line| line.len() <= 80), "{harm}");
        insta::assert_snapshot!(format!("{}\n{harm}", of(Verdict::NotYet)));
    }

    #[test]
    fn interval_names_both_directions() {
        let of = |mean_us, low, high| {
            difference(Difference {
                mean_us,
                interval_us: [low, high],
            })
        };
        assert_eq!(
            of(100.0, -50.0, 250.0),
            "100us longer in the treated arm (50.0us shorter to 250us longer)"
        );
        assert_eq!(
            of(100.0, 50.0, 250.0),
            "100us longer in the treated arm (50.0us to 250us longer)"
        );
        let none = Ratio::default();
        assert_eq!(
            ratio(none),
            "0.00 to any times as frequent in the treated arm"
        );
    }
}
