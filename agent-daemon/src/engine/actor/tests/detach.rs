//! Detachments: by a client, and by the configuration.

use rto_agent_core::wire::types::Lasts;

use super::*;

#[test]
fn detached_until_attach_over_reloads_and_restarts() {
    let mut bed = Bed::ready();
    let answer = bed.detach().unwrap();
    assert_eq!((answer.removed.links, answer.notes), (1, Vec::new()));
    let is_detached = |bed: &Bed| {
        let snapshot = bed.engine.snapshot();
        let (mut text, status) = (Vec::new(), status(&snapshot));
        listing::list(&snapshot, &[], |piece| {
            text.extend(piece);
            true
        })
        .unwrap();
        let listed: ListAnswer = serde_json::from_slice(&text).unwrap();
        assert_eq!(
            (status.detached_by, listed.detached_by),
            (Some(BY), Some(BY))
        );
        assert!(!status.healthy && !status.attachment.attached);
        assert!(matches!(snapshot.readiness(), Readiness::Unready(_)));
        assert!(!bed.kernel.state().attached);
    };
    is_detached(&bed);
    // The maps stay, with their counters, and follow changes.
    assert_eq!(bed.status().policies.len(), 1);
    bed.add(request("10.9.0.0/16")).unwrap();
    assert_eq!(bed.entries(), 3);
    let answer = bed.reload().unwrap();
    assert!(
        answer.notes[0].contains("no policy is active: detached by"),
        "{answer:?}"
    );
    is_detached(&bed);
    bed = bed.restart();
    is_detached(&bed);
    let attach = ReloadRequest {
        attach: true,
        ..ReloadRequest::default()
    };
    bed.reload_with(attach).unwrap();
    assert_eq!(bed.engine.snapshot().readiness(), Readiness::Ready);
    bed = bed.restart();
    assert_eq!(bed.engine.snapshot().readiness(), Readiness::Ready);
}

#[test]
fn attach_of_the_configuration_detaches_its_hosts() {
    let bed = Bed::ready();
    let text = bed.text();
    let off = text.replacen("[agent]\n", "[agent]\nattach = false\n", 1);
    bed.load(&off).unwrap();
    let by = || bed.status().detached_by;
    assert_eq!(
        (by(), bed.kernel.state().attached),
        (Some(Caller::CONFIGURATION), false)
    );
    let error = bed.attach().unwrap_err().to_string();
    assert!(error.contains("attach = false in [agent]"), "{error}");
    bed.load(&text).unwrap();
    assert_eq!((by(), bed.kernel.state().attached), (None, true));
    // A detachment by a user of this host is not undone by the files.
    bed.detach().unwrap();
    bed.load(format!("{off}#")).unwrap();
    bed.load(format!("{text}#")).unwrap();
    assert_eq!((by(), bed.kernel.state().attached), (Some(BY), false));
}

#[test]
fn detach_without_mark_is_applied_and_reported() {
    let mut bed = Bed::ready();
    let lasting = bed.dir.path().join("lasting");
    fs::remove_dir_all(&lasting).unwrap();
    fs::write(&lasting, "not a directory").unwrap();
    let kept = bed.detach().unwrap().not_lasting.unwrap();
    assert_eq!(kept.until, Lasts::UntilReboot);
    assert!(!bed.kernel.state().attached);
    let warning = bed.status().warnings.concat();
    assert!(warning.contains(&kept.why), "{warning}");
    bed = bed.restart();
    assert_eq!(bed.status().detached_by, Some(BY));
    bed.attach().unwrap();
    assert!(bed.kernel.state().attached);
    bed = bed.restart();
    assert_eq!(bed.status().detached_by, None);
}

#[test]
fn attachment_is_refused_while_mark_cannot_be_removed() {
    let bed = Bed::ready();
    bed.detach().unwrap();
    let mark = bed.dir.path().join("lasting/detached.json");
    fs::remove_file(&mark).unwrap();
    fs::create_dir_all(mark.join("full")).unwrap();
    let error = bed.attach().unwrap_err().to_string();
    assert!(error.ends_with("nothing was changed"), "{error}");
    assert!(!bed.kernel.state().attached);
    fs::remove_dir_all(&mark).unwrap();
    bed.attach().unwrap();
    assert!(bed.kernel.state().attached);
}

#[test]
fn unreadable_mark_keeps_detached_until_attach() {
    let mut bed = Bed::ready();
    let mark = bed.dir.path().join("lasting/detached.json");
    for text in ["{", "{\"format\":99,\"owner\":\"x\",\"content\":[]}"] {
        bed.engine.stop();
        let (kernel, dir) = bed.ended();
        fs::write(&mark, text).unwrap();
        bed = Bed::restarted(kernel, dir);
        let status = bed.status();
        assert_eq!(status.detached_by, Some(Caller::UNREADABLE_MARK));
        assert!(!status.healthy && !bed.kernel.state().attached);
        assert!(status.warnings.concat().contains("detached.json"));
        bed.attach().unwrap();
        bed = bed.restart();
        assert!(bed.kernel.state().attached && bed.status().warnings.is_empty());
    }
}

#[test]
fn detachment_lasts_when_persistent_dir_changes() {
    let mut bed = Bed::ready();
    bed.detach().unwrap();
    let text = bed.text().replace("/lasting", "/moved");
    bed.load(text).unwrap();
    // As after a reboot.
    let state = bed.dir.path().join("state");
    fs::remove_file(state.join("detached.json")).unwrap();
    bed = bed.restart();
    assert_eq!(bed.status().detached_by, Some(BY));
}
