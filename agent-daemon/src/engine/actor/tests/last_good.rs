//! A start whose files are rejected uses the last good configuration.

use super::*;

#[test]
fn refused_start_uses_last_good_files_until_fixed() {
    let bed = Bed::ready();
    let good = bed.text();
    bed.write(format!("{good}inital_rto = \"1s\"\n"));
    let bed = bed.restart();
    assert_eq!((bed.entries(), bed.status().entries), (2, 2));
    let refused = |errors: &str| {
        let status = bed.status();
        let reload = &status.last_reload;
        assert!(!status.healthy && !reload.ok && reload.kept_at_s.is_some());
        assert!(reload.errors[0].contains(errors), "{reload:?}");
        let expected = "the last good configuration, saved on disk, is active";
        assert!(
            status.problems[0].ends_with(expected),
            "{:?}",
            status.problems
        );
    };
    refused("inital_rto");
    // Unchanged rejected files are not read again, and other rejected files change nothing.
    bed.engine.notify(Message::FilesChanged);
    bed.verify();
    assert_eq!(bed.status().last_reload.cause, "start");
    bed.load(format!("{good}[policy.\n")).unwrap_err();
    refused("config.toml:");
    assert_eq!(bed.entries(), 2);
    bed.load(&good).unwrap();
    let status = bed.status();
    assert!(status.healthy, "{:?}", status.problems);
    assert_eq!(status.last_reload.kept_at_s, None);
}

#[test]
fn last_good_follows_accepted_files() {
    let bed = Bed::ready();
    let kept = || fs::read_to_string(bed.dir.path().join("lasting/last-good.json")).unwrap();
    let good = bed.text();
    let before = kept();
    bed.load(format!("{good}[policy.\n")).unwrap_err();
    assert_eq!(kept(), before);
    // Valid files, which the kernel refuses.
    bed.kernel.fail(1);
    let more =
        format!("{good}[policy.other]\ninitial_rto = \"300ms\"\ncidrs = [\"10.77.0.0/16\"]\n");
    bed.load(&more).unwrap_err();
    assert_eq!(kept(), before);
    bed.load(&more).unwrap();
    assert!(kept().contains("10.77.0.0/16"));
    bed.save("10.78.0.0/16").unwrap();
    assert!(kept().contains("10.78.0.0/16"));
}

#[test]
fn emptied_files_are_refused_until_allowed() {
    let bed = Bed::ready();
    let good = bed.text();
    let (agent, _) = good.split_once("[policy").unwrap();
    let error = bed.load(agent).unwrap_err().to_string();
    assert!(
        error.contains("no longer have any of the 1 policy; if this is intended"),
        "{error}"
    );
    // A start rejects the emptied files, too.
    let bed = bed.restart();
    let status = bed.status();
    assert!(!status.healthy && status.last_reload.kept_at_s.is_some());
    assert_eq!(bed.entries(), 2);
    let request = ReloadRequest {
        allow_empty: true,
        ..ReloadRequest::default()
    };
    let changed = bed.reload_with(request).unwrap().changed;
    assert_eq!((changed.removed, changed.policies_removed), (2, 0));
    // The policy's counters are kept for a while.
    let is_kept = |bed: &Bed| {
        let status = bed.status();
        assert!(status.healthy, "{:?}", status.problems);
        assert_eq!(status.entries, 0);
        assert!(status.policies.contains(&near()));
    };
    is_kept(&bed);
    is_kept(&bed.restart());
}
