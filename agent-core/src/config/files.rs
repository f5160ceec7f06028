//! The texts of the configuration file, of `policies.d`, and of the lists that they name.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    hash::{BuildHasher as _, Hash as _, Hasher as _},
    io,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use foldhash::quality::FixedState;

use super::{
    exposure, list, parse,
    source::{self, ConfigError},
};

pub(super) const POLICIES_DIR: &str = "policies.d";

/// A snapshot of the configuration's files.
pub struct Files {
    /// Path and content of each file; the main file is first.
    files: Vec<(PathBuf, io::Result<Arc<String>>)>,
    /// The same of each `cidrs_file`.
    lists: Vec<(PathBuf, io::Result<Arc<String>>)>,
    pub(super) dir_error: Option<ConfigError>,
    /// Warnings about users other than root who can change the files.
    pub(super) exposed: Vec<String>,
    fingerprint: OnceLock<u64>,
}

impl Files {
    /// Reads the configuration file and `policies.d`, without a time limit; see [`super::FilesReader`].
    pub fn read(path: &Path) -> Self {
        Self::read_telling(path, &|_| {})
    }

    /// As [`Self::read`]; calls `telling` with each path before accessing it.
    pub(super) fn read_telling(path: &Path, telling: &dyn Fn(&Path)) -> Self {
        let policies = policies_dir(path);
        telling(&policies);
        let (more, dir_error) = match list(&policies) {
            Ok(files) => (files, None),
            Err(e) => {
                let error = ConfigError::whole(&policies, e.to_string());
                (Vec::new(), Some(error))
            }
        };
        let all = std::iter::once(path.to_owned()).chain(more);
        let read = |path: PathBuf| {
            telling(&path);
            let text = source::read(&path).map(Arc::new);
            (path, text)
        };
        let files: Vec<_> = all.map(read).collect();
        let texts = files
            .iter()
            .filter_map(|(path, text)| Some((path, text.as_ref().ok()?)));
        let lists: BTreeSet<_> = texts
            .flat_map(|(path, text)| parse::lists(path, text))
            .collect();
        let lists: Vec<_> = lists.into_iter().map(read).collect();
        let paths = files.iter().chain(&lists).map(|(path, _)| path);
        Self {
            // On this thread, as the file system may hang.
            exposed: exposure::exposed(&policies, paths),
            files,
            lists,
            dir_error,
            fingerprint: OnceLock::new(),
        }
    }

    /// Files whose texts were read earlier.
    #[must_use]
    pub fn of_texts(texts: Vec<(PathBuf, String)>) -> Self {
        let mut files = Vec::new();
        let mut lists = Vec::new();
        for (path, text) in texts {
            let is_list = !files.is_empty() && !is_policy_file(&path);
            let into = if is_list { &mut lists } else { &mut files };
            into.push((path, Ok(Arc::new(text))));
        }
        Self {
            files,
            lists,
            dir_error: None,
            exposed: Vec::new(),
            fingerprint: OnceLock::new(),
        }
    }

    /// The texts of all readable files: the main one, those of `policies.d`, and lists.
    pub fn texts(&self) -> impl Iterator<Item = (&Path, &str)> {
        let files = self.files.iter().chain(&self.lists);
        files.filter_map(|(path, text)| Some((path.as_path(), text.as_ref().ok()?.as_str())))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Path, Result<Arc<String>, &io::Error>)> {
        let files = self.files.iter();
        files.map(|(path, text)| (path.as_path(), text.as_ref().map(Arc::clone)))
    }

    pub(super) fn lists(&self) -> impl Iterator<Item = (&Path, Result<Arc<String>, &io::Error>)> {
        let lists = self.lists.iter();
        lists.map(|(path, text)| (path.as_path(), text.as_ref().map(Arc::clone)))
    }

    /// `persistent_dir`, as far as it can be parsed, even from rejected files.
    pub fn persistent_dir(&self) -> PathBuf {
        let main = self.iter().next();
        let agent = main.and_then(|(path, text)| {
            let source = source::Source::new(path, text.ok()?);
            Some(parse::agent(&source))
        });
        agent.unwrap_or_default().persistent_dir
    }

    /// Replaces the text of one file, or adds a file.
    #[must_use]
    pub fn with(mut self, path: &Path, text: String) -> Self {
        let text = Arc::new(text);
        match self.files.iter_mut().find(|(other, _)| other == path) {
            Some((_, former)) => *former = Ok(text),
            None => {
                self.files.push((path.to_owned(), Ok(text)));
                // The main file stays first, the others are in name order.
                self.files[1..].sort_by(|(a, _), (b, _)| a.cmp(b));
            }
        }
        self.fingerprint = OnceLock::new();
        self
    }

    /// Upper bounds of the numbers of CIDRs: in TOML, where each is quoted, and in lists.
    pub fn cidrs(&self) -> [usize; 2] {
        let sum = |files: &[(PathBuf, io::Result<Arc<String>>)], count: fn(&str) -> usize| {
            let texts = files.iter().filter_map(|(_, text)| text.as_ref().ok());
            texts.map(|text| count(text)).sum::<usize>()
        };
        let quotes = |text: &str| memchr::memchr2_iter(b'"', b'\'', text.as_bytes()).count();
        [sum(&self.files, quotes) / 2, sum(&self.lists, list::lines)]
    }

    /// A hash of all files: differs if any file differs.
    pub fn fingerprint(&self) -> u64 {
        *self.fingerprint.get_or_init(|| self.hash())
    }

    fn hash(&self) -> u64 {
        // Needs no protection against deliberate collisions, so a fast hash is enough.
        let mut hasher = FixedState::default().build_hasher();
        for (path, text) in self.files.iter().chain(&self.lists) {
            path.hash(&mut hasher);
            text.as_ref().map_err(io::Error::kind).hash(&mut hasher);
        }
        // An unreadable directory must differ from one without files.
        let dir_error = self.dir_error.as_ref();
        dir_error.map(ToString::to_string).hash(&mut hasher);
        hasher.finish()
    }
}

/// Whether a file of `policies.d` is read, judged by its name.
pub fn is_policy_file(path: &Path) -> bool {
    let name = path.file_name().map(OsStr::as_encoded_bytes);
    name.is_some_and(|name| !name.starts_with(b".") && name.ends_with(b".toml"))
}

/// The directory of policies beside this configuration file.
pub fn policies_dir(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(POLICIES_DIR)
}

/// The files of `policies.d` in name order. Skips hidden files and a ConfigMap's `..data`, which
/// begin with a dot, and editors' backups (`x.toml~`), which do not end in `.toml`.
fn list(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if is_policy_file(&path) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
