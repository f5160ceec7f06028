//! Detachments: by a client, and by the configuration.

use super::*;

#[test]
fn detached_until_attach_over_reloads_and_restarts() {
    let mut bed = Bed::ready();
    let answer = bed.detach().unwrap();
    assert_eq!((answer.removed.links, answer.notes), (1, Vec::new()));
    let is_detached = |bed: &Bed| {
        let snapshot = bed.engine.snapshot();
        let (mut list, status) = (Vec::new(), snapshot.status());
        snapshot
            .list(&[], |piece| {
                list.extend(piece);
                true
            })
            .unwrap();
        let listed: ListAnswer = serde_json::from_slice(&list).unwrap();
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
fn detachment_that_cannot_be_kept_is_made_and_reported() {
    let bed = Bed::ready();
    let lasting = bed.dir.path().join("lasting");
    fs::remove_dir_all(&lasting).unwrap();
    fs::write(&lasting, "not a directory").unwrap();
    let answer = bed.detach().unwrap();
    assert!(answer.notes[0].contains("detached.json"), "{answer:?}");
    assert!(!bed.kernel.state().attached);
    assert_eq!(bed.status().warnings, answer.notes);
    // Attaching is refused as well, as the next start would detach again.
    let error = bed.attach().unwrap_err().to_string();
    assert!(error.ends_with("nothing was changed"), "{error}");
    fs::remove_file(&lasting).unwrap();
    bed.attach().unwrap();
    assert!(bed.kernel.state().attached);
}
