//! A start whose files are refused, with what an earlier run has kept.

use super::*;

#[test]
fn a_refused_start_goes_on_with_the_last_good_files_until_they_are_good() {
    let bed = Bed::ready();
    let path = bed.dir.path().join("config.toml");
    let good = fs::read_to_string(&path).unwrap();
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    assert!(!kernel.state().attached);
    fs::write(&path, format!("{good}inital_rto = \"1s\"\n")).unwrap();
    let bed = Bed::restarted(kernel, dir);
    let verify = || bed.call(Message::Verify).map(drop);
    verify().unwrap();
    let status = || bed.engine.snapshot().status();
    assert_eq!((bed.entries(), status().entries), (2, 2));
    let refused = |errors: &str| {
        let status = status();
        let reload = &status.last_reload;
        assert!(!status.healthy && !reload.ok && reload.kept_at_s.is_some());
        assert!(reload.errors[0].contains(errors), "{reload:?}");
        let said = "the last good configuration, kept on disk, is in force";
        assert!(status.problems[0].ends_with(said), "{:?}", status.problems);
    };
    refused("inital_rto");
    // Those that were refused are not read again for nothing, and others that are refused change nothing.
    bed.engine.notify(Message::FilesChanged);
    verify().unwrap();
    assert_eq!(status().last_reload.cause, "start");
    fs::write(&path, format!("{good}[policy.\n")).unwrap();
    bed.call(|reply| Message::Reload(BY, reply)).unwrap_err();
    refused("config.toml:");
    assert_eq!(bed.entries(), 2);
    fs::write(&path, &good).unwrap();
    bed.call(|reply| Message::Reload(BY, reply)).unwrap();
    let status = status();
    assert!(status.healthy, "{:?}", status.problems);
    assert_eq!(status.last_reload.kept_at_s, None);
}

#[test]
fn what_is_kept_follows_what_is_taken_over() {
    let bed = Bed::ready();
    let path = bed.dir.path().join("config.toml");
    let kept = || fs::read_to_string(bed.dir.path().join("lasting/last-good.json")).unwrap();
    let good = fs::read_to_string(&path).unwrap();
    let reload = |text: &str| {
        fs::write(&path, text).unwrap();
        bed.call(|reply| Message::Reload(BY, reply)).map(drop)
    };
    let before = kept();
    reload(&format!("{good}[policy.\n")).unwrap_err();
    assert_eq!(kept(), before);
    // Good by themselves, and not taken by the kernel.
    bed.kernel.fail(1);
    let more =
        format!("{good}[policy.other]\ninitial_rto = \"300ms\"\ncidrs = [\"10.77.0.0/16\"]\n");
    reload(&more).unwrap_err();
    assert_eq!(kept(), before);
    reload(&more).unwrap();
    assert!(kept().contains("10.77.0.0/16"));
    let saved = AddRequest {
        save: true,
        ..request("10.78.0.0/16")
    };
    bed.add(saved).unwrap();
    assert!(kept().contains("10.78.0.0/16"));
}
