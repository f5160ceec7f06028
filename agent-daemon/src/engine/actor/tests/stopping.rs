//! An engine that is stopped in the middle of an operation.

use super::*;

/// Enough entries to stop a change in the middle.
fn many(count: usize) -> AddRequest {
    AddRequest {
        cidrs: (0..count).map(|i| format!("10.9.{i}.0/24")).collect(),
        ..request("")
    }
}

#[test]
fn a_change_that_is_stopped_is_undone_by_the_next_start() {
    let bed = Bed::with("on_exit = \"keep\"\n");
    bed.call(Message::Verify).unwrap();
    let before = bed.kernel.state().maps.clone();
    bed.kernel.stop_at(30, bed.engine.progress().clone());
    let error = bed.add(many(100)).unwrap_err();
    assert!(error.is_interrupted(), "{error:?}");
    assert!(error.to_string().contains("the next start"), "{error}");
    assert!(!bed.engine.snapshot().status().in_sync);
    // The engine ends without a further message, and leaves the kernel as it is.
    let (kernel, dir) = bed.ended();
    assert!(kernel.state().attached);
    assert_eq!(kernel.state().maps.entries.len(), 2 + 30);
    let bed = Bed::restarted(kernel, dir);
    bed.call(Message::Verify).unwrap();
    assert_eq!(bed.kernel.state().maps, before);
    assert!(bed.engine.snapshot().status().healthy);
    bed.stop();
}

#[test]
fn a_reload_that_is_stopped_is_completed_by_the_next_start() {
    let bed = Bed::with("on_exit = \"keep\"\n");
    bed.call(Message::Verify).unwrap();
    let path = bed.dir.path().join("config.toml");
    let text = fs::read_to_string(&path).unwrap();
    let cidrs: String = (0..100).map(|i| format!("\"10.9.{i}.0/24\", ")).collect();
    fs::write(
        &path,
        text.replace("cidrs = [", &format!("cidrs = [{cidrs}")),
    )
    .unwrap();
    bed.kernel.stop_at(30, bed.engine.progress().clone());
    let error = bed
        .call(|reply| Message::Reload(ReloadRequest::default(), BY, reply))
        .unwrap_err();
    assert!(error.is_interrupted(), "{error:?}");
    let (kernel, dir) = bed.ended();
    let bed = Bed::restarted(kernel, dir);
    bed.call(Message::Verify).unwrap();
    assert_eq!(bed.entries(), 102);
    bed.stop();
}

#[test]
fn stopped_in_the_middle_it_detaches() {
    let bed = Bed::ready();
    bed.kernel.stop_at(30, bed.engine.progress().clone());
    assert!(bed.add(many(100)).unwrap_err().is_interrupted());
    let (kernel, _dir) = bed.ended();
    assert!(!kernel.state().attached);
    assert!(kernel.state().maps.entries.is_empty());
}

#[test]
fn a_start_is_stopped_as_well() {
    let bed = Bed::start(FakeHost::default(), Bed::configured(""), Some(2), |_| {});
    let error = bed.thread.join().unwrap().unwrap_err();
    let error = error.downcast_ref::<EngineError>().unwrap();
    assert!(error.is_interrupted(), "{error:?}");
    assert!(!bed.kernel.state().attached);
}

#[test]
fn engine_stops_while_files_hang() {
    let slow = Arc::new(SlowFiles::default());
    let bed = Bed::reading(slow.reader(Duration::from_secs(600)));
    bed.call(Message::Verify).unwrap();
    slow.hang();
    bed.engine.notify(Message::FilesChanged);
    slow.await_reader();
    let kernel = bed.kernel.clone();
    bed.stop();
    assert!(!kernel.state().attached);
    slow.answer();
}
