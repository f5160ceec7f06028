//! A start whose files are rejected uses the last good configuration.

use super::*;

#[test]
fn refused_start_uses_last_good_files_until_fixed() {
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
        let said = "the last good configuration, saved on disk, is active";
        assert!(status.problems[0].ends_with(said), "{:?}", status.problems);
    };
    refused("inital_rto");
    // Unchanged rejected files are not read again, and other rejected files change nothing.
    bed.engine.notify(Message::FilesChanged);
    verify().unwrap();
    assert_eq!(status().last_reload.cause, "start");
    fs::write(&path, format!("{good}[policy.\n")).unwrap();
    bed.call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
        .unwrap_err();
    refused("config.toml:");
    assert_eq!(bed.entries(), 2);
    fs::write(&path, &good).unwrap();
    bed.call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
        .unwrap();
    let status = status();
    assert!(status.healthy, "{:?}", status.problems);
    assert_eq!(status.last_reload.kept_at_s, None);
}

#[test]
fn last_good_follows_accepted_files() {
    let bed = Bed::ready();
    let path = bed.dir.path().join("config.toml");
    let kept = || fs::read_to_string(bed.dir.path().join("lasting/last-good.json")).unwrap();
    let good = fs::read_to_string(&path).unwrap();
    let reload = |text: &str| {
        fs::write(&path, text).unwrap();
        bed.call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
            .map(drop)
    };
    let before = kept();
    reload(&format!("{good}[policy.\n")).unwrap_err();
    assert_eq!(kept(), before);
    // Valid files, which the kernel refuses.
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

#[test]
fn emptied_files_are_refused_until_that_is_meant() {
    let mut bed = Bed::ready();
    let path = bed.dir.path().join("config.toml");
    let good = fs::read_to_string(&path).unwrap();
    let (agent, _) = good.split_once("[policy").unwrap();
    fs::write(&path, agent).unwrap();
    let reload = |bed: &Bed, allow_empty| {
        let request = ReloadRequest {
            allow_empty,
            ..ReloadRequest::default()
        };
        bed.call(|reply| Message::Reload(request, BY, reply))
    };
    let error = reload(&bed, false).unwrap_err().to_string();
    assert!(
        error.contains("no longer have any of the 1 policy; if this is intended"),
        "{error}"
    );
    // A start rejects the emptied files, too.
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    bed = Bed::restarted(kernel, dir);
    bed.call(Message::Verify).unwrap();
    let status = || bed.engine.snapshot().status();
    assert!(!status().healthy && status().last_reload.kept_at_s.is_some());
    assert_eq!(bed.entries(), 2);
    let answer = reload(&bed, true).unwrap();
    assert_eq!(
        (answer.changed.removed, answer.changed.policies_removed),
        (2, 0)
    );
    // The policy's counters are kept for a while.
    assert!(status().healthy && status().policies.contains(&near()));
    bed.engine.stop();
    let (kernel, dir) = bed.ended();
    bed = Bed::restarted(kernel, dir);
    bed.call(Message::Verify).unwrap();
    let status = bed.engine.snapshot().status();
    assert!(
        status.healthy && status.entries == 0,
        "{:?}",
        status.problems
    );
    assert!(status.policies.contains(&near()));
}
