use std::time::{Duration, Instant};

use clap::Parser as _;
use rto_testbed::link::Blackout;

use super::{
    run::{first_of, lasted},
    *,
};
use crate::engine::Experiment as _;

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    args: Defined,
}

fn parsed(text: &str, options: &[&str]) -> anyhow::Result<Plan> {
    Plan::of(toml::from_str(text)?, &args(options))
}

fn args(options: &[&str]) -> Defined {
    let words = ["rto-lab", "--agent", env!("CARGO_MANIFEST_PATH")];
    Line::parse_from(words.iter().chain(options)).args
}

const TWO: &str = r#"
name = "two"
question = "Which?"
[settings]
delay = "2ms"
count = 7
[[factor]]
name = "timers"
[[factor.level]]
name = "kernel"
[[factor.level]]
name = "agent"
policy = { rto_min = "10ms" }
only = { pause = ["8"] }
[[factor]]
name = "pause"
sets = "pause"
values = ["0ms", "8ms"]
quick = ["8ms"]
"#;

#[test]
fn levels_are_combined() {
    let plan = parsed(TWO, &["--runs", "3"]).unwrap();
    let cells: Vec<String> = plan.cells.iter().map(|cell| named(&cell.levels)).collect();
    assert_eq!(
        cells,
        [
            "timers kernel, pause 0",
            "timers kernel, pause 8",
            "timers agent, pause 8"
        ]
    );
    // The kernel's testbed serves both pauses.
    assert_eq!(plan.testbeds(), [2, 2]);
    let (runs, last) = (plan.runs(), &plan.cells[2].settings);
    assert_eq!((runs.len(), plan.kind(&runs[8])), (9, 1));
    assert_eq!(
        (last.work().count, last.work().pause),
        (7, Duration::from_millis(8))
    );
    assert_eq!(last.link().delay, Duration::from_millis(2));
    let design = plan.design();
    assert_eq!(
        (&*design.effects[0].base, &*design.effects[0].measure),
        ("kernel", "time")
    );
    assert_eq!(design.charts[0].x.as_deref(), Some("pause"));
    assert!(
        design
            .method
            .iter()
            .any(|(_, value)| value.contains("rto_min = \"10ms\""))
    );
    assert_eq!(parsed(TWO, &["--quick"]).unwrap().cells.len(), 2);
}

#[test]
fn report_names_rto_min_of_each_level() {
    let of = |plan: anyhow::Result<Plan>| plan.unwrap().design().rto_min;
    assert_eq!(of(parsed(TWO, &[])), "kernel 200 ms; agent 10 ms");
    let workloads = of(Plan::own("workloads", &args(&[])));
    assert_eq!(
        workloads,
        "kernel, initial_rto, delack_max, thin_linear 200 ms; rto_min, all 10 ms"
    );
    for (with, is) in [
        ("delack_max = \"5ms\"", "200 ms"),
        ("rto_min = \"300us\"", "kernel 200 ms; agent 0.3 ms"),
    ] {
        let text = TWO.replace("rto_min = \"10ms\"", with);
        assert_eq!(of(parsed(&text, &[])), is);
    }
    let sysctl = "sysctls = { \"net.ipv4.tcp_rto_min_us\" = 8000 }";
    let text = TWO.replace("policy = { rto_min = \"10ms\" }", sysctl);
    assert_eq!(of(parsed(&text, &[])), "kernel 200 ms; agent 8 ms");
    let text = TWO.replace("policy = { rto_min = \"10ms\" }", "route_rto_min = \"9ms\"");
    assert_eq!(of(parsed(&text, &[])), "kernel 200 ms; agent 9 ms");
}

/// Follows [`TWO`].
const EFFECT: &str = r#"
[[effect]]
measure = "time"
stat = "p50"
across = "timers"
base = "kernel"
rows = ["pause"]
# end
"#;

/// A part of both => its replacement, in which semicolons separate lines => parts of the error.
const REFUSED: &str = r#"
delay = "2ms" => delai = "2ms" => line 5 & delai & delay
delay = "2ms" => delay = "2" => line 5 & such as 10ms
count = 7 => workload = "http3" => line 6 & http-new
count = 7 => drop = { every = 0 } => timers kernel, pause 0 & 1 or more
count = 7 => drop = { model = "gilbert-elliott", percent = 1.5 } => timers kernel, pause 0 & `run` (1 or more)
policy = { rto_min = "10ms" } => learnt = { initial_rto = [[4096, 5]] } => timers agent & add `policy
"0ms" => "5" => factor pause & such as 10ms
quick = ["8ms"] => quick = ["9ms"] => factor pause & 9ms & 0, 8
count = 7 => outage = "0ms" => timers kernel, pause 0 & outage: must be at least 2ms
count = 7 => outage_to = "9ms" => outage_to: must be longer than `outage`
count = 7 => outage = "9ms"; workload = "flows" => outage: flows & another workload
count = 7 => workload = "http-pipelined" => timers kernel, pause 8 & http-pipelined & leave it out
count = 7 => thin = true => thin & request-response
name = "two" => name = "a/b" => name & letters
sets = "pause" =>  => factor pause & `sets`
name = "kernel" => name = "agent" => factor timers & two levels
only = { pause = ["8"] } => links = 999 => links & 200
measure = "time" => measure = "tiem" => [[effect]] 1 & tiem & time
stat = "p50" => stat = "percent of packets" => nothing measures packets
across = "timers" => across = "timer" => no factor timer & timers
base = "kernel" => base = "linux" => base & no level linux & kernel
rows = ["pause"] => rows = ["lost"] => no factor lost & pause
# end => only = { pause = ["8ms"] } => only & no level 8ms & 0; 8
# end => [[table]]; name = "a"; rows = ["x"] => [[table]] a & no factor x
# end => [[table]]; name = "effects" => [[table]] & effects
# end => [[table]]; name = "a/b" => [[table]] & letters
# end => [[chart]]; measure = "time"; x = "lost" => [[chart]] 1 & no factor lost
# end => [[published]]; timer = "old" => [[published]] 1 & no factor timer
# end => [[factor]]; name = "timers"; [[factor.level]]; name = "a" => two are named timers
only = { pause = ["8"] } => only = { pause = ["x"] } => factor timers, level agent & no level x & 0; 8
only = { pause = ["8"] } => only = { lost = ["x"] } => factor timers, level agent & no factor lost
"#;

#[test]
fn errors_contain_place_and_fix() {
    let valid = format!("{TWO}{EFFECT}");
    assert!(parsed(&valid, &[]).is_ok());
    for case in REFUSED.trim().lines() {
        let (change, message) = case.rsplit_once(" => ").unwrap();
        let (from, to) = change.split_once(" => ").unwrap();
        assert!(valid.contains(from), "{case}");
        let text = valid.replace(from, &to.replace("; ", "\n"));
        let error = format!("{:#}", parsed(&text, &[]).unwrap_err());
        for part in message.split(" & ") {
            assert!(error.contains(part), "{case}: {error}");
        }
    }
}

#[test]
fn outages_are_spread_over_the_runs() {
    let text = TWO.replace("count = 7", "outage = \"50ms\"\noutage_to = \"500ms\"");
    let settings = &parsed(&text, &[]).unwrap().cells[0].settings;
    let ms = |number| settings.outage(number, 3).unwrap().as_millis();
    assert_eq!([0, 1, 2].map(ms), [125, 275, 425]);
    assert_eq!(Settings::default().outage(0, 3), None);
}

#[test]
fn outage_without_hit_or_too_long_is_repeated() {
    let (from, ms) = (Instant::now(), Duration::from_millis);
    let outages = [(0, 100), (3, 146), (3, 101), (9, 100)];
    let mut outages = outages.into_iter().map(|(dropped, took)| Blackout {
        from,
        until: from + ms(took),
        dropped,
    });
    let found = first_of(10, |_| Ok(lasted(&outages.next().unwrap(), ms(100))));
    assert_eq!((found.unwrap(), outages.len()), (Some(ms(101)), 1));
    // It stops after some attempts, and does not repeat an attempt that failed with an error.
    let mut attempts = 0;
    let mut tried = |failed: bool| {
        let found = first_of::<()>(3, |_| {
            attempts += 1;
            ensure!(!failed, "it fails");
            Ok(None)
        });
        (found.map_err(|e| e.to_string()), attempts)
    };
    assert_eq!(tried(false), (Ok(None), 3));
    assert_eq!(tried(true), (Err("it fails".to_owned()), 4));
}

#[test]
fn levels_are_chosen_on_the_command_line() {
    let plan = parsed(TWO, &["--only", "timers=kernel", "--only", "pause=8"]).unwrap();
    assert_eq!(named(&plan.cells[0].levels), "timers kernel, pause 8");
    assert_eq!(plan.cells.len(), 1);
    let error = format!(
        "{:#}",
        parsed(TWO, &["--only", "timers=linux"]).unwrap_err()
    );
    assert!(
        error.contains("--only") && error.contains("kernel; agent"),
        "{error}"
    );
    let line = Line::try_parse_from(["rto-lab", "--only", "timers"]);
    let error = line.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("timers=kernel"), "{error}");
}

#[test]
fn only_restricts_each_combination() {
    // The agent is measured with a pause of 8 ms, and this level with none, so they have no common combination.
    let third =
        "[[factor]]\nname = \"n\"\n[[factor.level]]\nname = \"a\"\nonly = { pause = [\"0\"] }\n";
    let plan = parsed(&format!("{TWO}\n{third}"), &[]).unwrap();
    let cells: Vec<String> = plan.cells.iter().map(|cell| named(&cell.levels)).collect();
    assert_eq!(cells, ["timers kernel, pause 0, n a"]);
}

#[test]
fn several_congestion_controls_are_a_factor() {
    let both = ["--congestion", "reno,bbr,none"];
    let plan = parsed(TWO, &both).unwrap();
    let one = parsed(TWO, &[]).unwrap();
    let allowed = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
    let is_both = allowed.unwrap().contains("bbr");
    let times = if is_both { 2 } else { 1 };
    assert_eq!(plan.cells.len(), times * one.cells.len());
    let design = plan.design();
    assert!(
        design
            .method
            .iter()
            .any(|(name, is)| name == "none" && is.contains("left out"))
    );
    assert_eq!(
        design.effects[0].rows.contains(&CONGESTION.to_owned()),
        is_both
    );
    assert_eq!(
        (&*one.design().congestion, design.congestion.is_empty()),
        ("reno", is_both)
    );
    // They need testbeds of their own.
    assert_eq!(plan.kinds.len(), times * one.kinds.len());
    let error = parsed(TWO, &["--congestion", "none"]).unwrap_err();
    assert!(
        format!("{error:#}").contains("this host allows"),
        "{error:#}"
    );
}

#[test]
fn own_definitions_are_read() {
    let counts = [
        (19 * 2 + 2 + 10, 13 * 2 + 2 + 4),
        (7 * 4 * 5 + 3 * 2, 3 * 2 * 2),
        (3 * 6 * 5, 3 * 2 * 2),
        (18 * 4, 5 * 4),
        (10 + 6 + 6, 4 + 3 + 3),
        (8 * (5 * (10 + 7) + 5 + 3 * 3), 8 * (3 * (3 + 2) + 2 + 1)),
        (6 * (6 * 3 + 2 * 2), 6 * (6 * 3 + 2 * 2)),
    ];
    for ((verb, ..), (cells, quick)) in OWN.iter().zip(counts) {
        let plan = Plan::own(verb, &args(&[])).unwrap();
        assert_eq!((&*plan.design.name, plan.cells.len()), (*verb, cells));
        let plan = Plan::own(verb, &args(&["--quick"])).unwrap();
        assert_eq!(plan.cells.len(), quick);
    }
    // A veth has no delay, and nftables cannot distinguish retransmissions.
    let veth = Plan::own("loss", &args(&["--link", "nft"])).unwrap();
    assert_eq!(veth.cells.len(), 48);
    let method = veth.design().method;
    assert!(
        !method.iter().any(|(_, is)| is.contains("delay = ")),
        "{method:?}"
    );
    let refused = parsed(TWO, &["--link", "nft"]).unwrap_err();
    let refused = format!("{refused:#}");
    assert!(
        refused.contains("delay") && refused.contains("--link relay"),
        "{refused}"
    );
    let example = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples")).unwrap();
    for file in example {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        parsed(&text, &[]).unwrap();
    }
}
