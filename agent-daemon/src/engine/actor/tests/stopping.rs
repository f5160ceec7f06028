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
fn next_start_undoes_interrupted_change() {
    let bed = Bed::with("on_exit = \"keep\"\n");
    let before = bed.kernel.state().maps.clone();
    bed.kernel.stop_at(30, bed.engine.progress().clone());
    let error = bed.add(many(100)).unwrap_err();
    assert!(error.is_interrupted(), "{error:?}");
    assert!(error.to_string().contains("the next start"), "{error}");
    assert!(!bed.status().in_sync);
    // The engine ends without a further message, and leaves the kernel as it is.
    let (kernel, dir) = bed.ended();
    assert!(kernel.state().attached);
    assert_eq!(kernel.state().maps.entries.len(), 2 + 30);
    let bed = Bed::restarted(kernel, dir);
    assert_eq!(bed.kernel.state().maps, before);
    assert!(bed.status().healthy);
}

#[test]
fn next_start_completes_interrupted_reload() {
    let bed = Bed::with("on_exit = \"keep\"\n");
    let cidrs: String = (0..100).map(|i| format!("\"10.9.{i}.0/24\", ")).collect();
    let text = bed.text();
    bed.write(text.replace("cidrs = [", &format!("cidrs = [{cidrs}")));
    bed.kernel.stop_at(30, bed.engine.progress().clone());
    let error = bed.reload().unwrap_err();
    assert!(error.is_interrupted(), "{error:?}");
    let (kernel, dir) = bed.ended();
    let bed = Bed::restarted(kernel, dir);
    assert_eq!(bed.entries(), 102);
}

#[test]
fn interrupted_change_ends_detached() {
    let bed = Bed::ready();
    bed.kernel.stop_at(30, bed.engine.progress().clone());
    assert!(bed.add(many(100)).unwrap_err().is_interrupted());
    let (kernel, _dir) = bed.ended();
    assert!(!kernel.state().attached);
    assert!(kernel.state().maps.entries.is_empty());
}

#[test]
fn start_can_be_interrupted() {
    let mut bed = Bed::start(FakeHost::default(), Bed::configured(""), Some(2), |_| {});
    let ended = bed.thread.take().unwrap().join().unwrap();
    let error = ended.unwrap_err();
    let error = error.downcast_ref::<EngineError>().unwrap();
    assert!(error.is_interrupted(), "{error:?}");
    assert!(!bed.kernel.state().attached);
}

#[test]
fn engine_stops_while_files_hang() {
    let slow = Arc::new(SlowFiles::default());
    let bed = Bed::reading(slow.reader(Duration::from_secs(600)));
    let _hang = slow.hang();
    bed.engine.notify(Message::FilesChanged);
    slow.await_reader();
    let kernel = bed.kernel.clone();
    drop(bed);
    assert!(!kernel.state().attached);
}
