//! Reads the files on a thread of their own: if a file system hangs, only that thread hangs with
//! it.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use super::{ConfigError, ConfigErrors, Files};
use crate::progress::{self, Progress};

/// How long a file system may take for one step.
pub const STALL_LIMIT: Duration = Duration::from_secs(10);
/// How long reading may take in total.
const READ_LIMIT: Duration = Duration::from_secs(60);
/// How often the caller checks for a stop and for the limit.
const TICK: Duration = Duration::from_millis(50);

/// Reads the files of a configuration; calls its second argument with each path before accessing
/// it.
type Read = dyn Fn(&Path, &dyn Fn(&Path)) -> Files + Send + Sync;

/// Reads files with a time limit.
pub struct FilesReader {
    read: Arc<Read>,
    stall_limit: Duration,
    /// An earlier read that missed its limit and has not returned.
    stuck: Option<Reading>,
}

/// Why there are no files.
#[derive(Debug)]
pub enum ReadError {
    /// The file system does not respond, or no thread can be started.
    Failed(ConfigErrors),
    /// The caller's operation was stopped.
    Interrupted,
}

impl From<ReadError> for ConfigErrors {
    /// For callers that are never stopped.
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Failed(errors) => errors,
            ReadError::Interrupted => Self::default(),
        }
    }
}

/// A read in progress.
struct Reading {
    files: mpsc::Receiver<Files>,
    progress: Progress,
    current: Arc<Mutex<PathBuf>>,
}

impl Default for FilesReader {
    fn default() -> Self {
        Self::new(Files::read_telling, STALL_LIMIT)
    }
}

impl fmt::Debug for FilesReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stuck = self.stuck.is_some();
        f.debug_struct("FilesReader")
            .field("stuck", &stuck)
            .finish_non_exhaustive()
    }
}

impl FilesReader {
    /// Reads with this function; each of its steps may take `stall_limit`.
    pub fn new(
        read: impl Fn(&Path, &dyn Fn(&Path)) -> Files + Send + Sync + 'static,
        stall_limit: Duration,
    ) -> Self {
        Self {
            read: Arc::new(read),
            stall_limit,
            stuck: None,
        }
    }

    /// Reads the configuration file and `policies.d`. Begins no read while an earlier one hangs, as
    /// each would block another thread.
    ///
    /// # Errors
    ///
    /// If the file system does not respond in time, or the caller's operation is stopped.
    pub fn read(&mut self, path: &Path) -> Result<Files, ReadError> {
        if let Some(former) = self.stuck.take()
            && let Err(mpsc::TryRecvError::Empty) = former.files.try_recv()
        {
            let error = hangs(&former, self.stall_limit);
            self.stuck = Some(former);
            return Err(error);
        }
        let reading = self.begin(path)?;
        let begin = Instant::now();
        let (mut steps, mut stepped) = (0, begin);
        loop {
            match reading.files.recv_timeout(TICK) {
                Ok(files) => return Ok(files),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(failed(path, "the thread that read it panicked"));
                }
            }
            // The caller makes progress while it waits, as the wait is limited.
            let is_stopped = progress::checkpoint().is_err();
            let now = reading.progress.steps();
            if now != steps {
                (steps, stepped) = (now, Instant::now());
            }
            let limits = [(stepped, self.stall_limit), (begin, READ_LIMIT)];
            let late = limits
                .iter()
                .find(|(since, limit)| since.elapsed() >= *limit);
            if late.is_some() || is_stopped {
                let error =
                    late.map_or(ReadError::Interrupted, |(_, limit)| hangs(&reading, *limit));
                self.stuck = Some(reading);
                return Err(error);
            }
        }
    }

    fn begin(&self, path: &Path) -> Result<Reading, ReadError> {
        let (sender, files) = mpsc::channel();
        let progress = Progress::default();
        let current = Arc::new(Mutex::new(path.to_owned()));
        let (read, owned) = (self.read.clone(), path.to_owned());
        let (counted, named) = (progress.clone(), current.clone());
        let thread = thread::Builder::new().name("files".to_owned());
        let spawned = thread.spawn(move || {
            counted.count_this_thread();
            let files = read(&owned, &|file| {
                progress::step();
                file.clone_into(&mut named.lock().unwrap_or_else(PoisonError::into_inner));
            });
            // There is no receiver if the read took too long.
            let _ = sender.send(files);
        });
        match spawned {
            Ok(_) => Ok(Reading {
                files,
                progress,
                current,
            }),
            Err(e) => Err(failed(
                path,
                &format!("cannot start a thread to read it: {e}"),
            )),
        }
    }
}

fn hangs(reading: &Reading, limit: Duration) -> ReadError {
    let current = reading.current.lock();
    let current = current.unwrap_or_else(PoisonError::into_inner);
    let limit = limit.as_secs_f64();
    failed(
        &current,
        &format!(
            "its file system did not answer within {limit} s; check whether it hangs (a network \
             file system whose server is down, or FUSE), or move the configuration to a local disk"
        ),
    )
}

fn failed(path: &Path, why: &str) -> ReadError {
    ReadError::Failed(ConfigErrors(vec![ConfigError::whole(path, why)]))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    const SHORT: Duration = Duration::from_millis(200);
    const CONFIG: &str = "/nonexistent/config.toml";

    /// A file system that responds once `gate` is open, and its number of reads.
    fn hanging(gate: &Arc<AtomicBool>) -> (FilesReader, Arc<AtomicUsize>) {
        let reads = Arc::new(AtomicUsize::new(0));
        let (gate, count) = (gate.clone(), reads.clone());
        let read = move |path: &Path, telling: &dyn Fn(&Path)| {
            count.fetch_add(1, Ordering::Relaxed);
            telling(Path::new("/nonexistent/policies.d/a\u{1b}.toml"));
            while !gate.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(1));
            }
            Files::read_telling(path, telling)
        };
        (FilesReader::new(read, SHORT), reads)
    }

    #[test]
    fn hanging_file_system_times_out_and_is_retried() {
        let gate = Arc::new(AtomicBool::new(false));
        let (mut reader, reads) = hanging(&gate);
        let begin = Instant::now();
        for _ in 0..3 {
            let Err(ReadError::Failed(errors)) = reader.read(Path::new(CONFIG)) else {
                panic!("it was read");
            };
            let text = errors.to_string();
            let named = text.starts_with("/nonexistent/policies.d/a\\u{1b}.toml: ");
            assert!(named && text.contains("did not answer"), "{text}");
        }
        assert!(begin.elapsed() >= SHORT);
        // Only one thread is blocked.
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        gate.store(true, Ordering::Relaxed);
        while reader.read(Path::new(CONFIG)).is_err() {
            assert!(begin.elapsed() < Duration::from_secs(60));
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(reads.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn stopped_read_does_not_wait() {
        let gate = Arc::new(AtomicBool::new(false));
        let (mut reader, _) = hanging(&gate);
        reader.stall_limit = Duration::from_secs(3600);
        let progress = Progress::default();
        progress.count_this_thread();
        progress.stop();
        let stopped = reader.read(Path::new(CONFIG));
        assert!(matches!(stopped, Err(ReadError::Interrupted)));
        gate.store(true, Ordering::Relaxed);
    }

    #[test]
    fn slow_reader_with_progress_is_awaited() {
        let read = |path: &Path, telling: &dyn Fn(&Path)| {
            for _ in 0..8 {
                thread::sleep(SHORT);
                telling(path);
            }
            Files::read_telling(path, telling)
        };
        // Shorter than all steps together, longer than one step on a busy host.
        let mut reader = FilesReader::new(read, SHORT * 7);
        reader.read(Path::new(CONFIG)).unwrap();
    }

    #[test]
    fn panicking_reader_is_error() {
        let read = |_: &Path, _: &dyn Fn(&Path)| -> Files { panic!("on purpose") };
        let mut reader = FilesReader::new(read, SHORT * 100);
        let error = reader.read(Path::new(CONFIG));
        assert!(matches!(error, Err(ReadError::Failed(_))));
    }
}
