//! `policies.d/50-cli.toml`: the saved entries.
//!
//! The file is edited, not rewritten: comments, order, owner and mode stay, and a symbolic link is
//! followed. A draft is renamed into place, so that readers never see half a file.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
};

use toml_edit::{Array, DocumentMut, Item, Table, TableLike, value};

use super::{MAX_FILE, atomic_file::AtomicFile, regular_file};
use crate::{
    path_security,
    policy::{Cidr, PolicyName, Settings},
    printable, progress,
};

const HEADER: &str = "# Entries saved by `rto-agent add --save`. You may also edit this file.\n\n";

/// Why the file was not changed.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}; nothing was saved")]
pub struct SaveError {
    /// The file.
    path: PathBuf,
    /// Why.
    reason: String,
}

impl SaveError {
    fn new(path: &Path, reason: impl ToString) -> Self {
        Self {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }
}

/// A draft of an edited file.
#[derive(Debug)]
#[must_use]
pub struct Staged {
    draft: AtomicFile,
    /// A new file cannot have this one's owner.
    in_place: bool,
}

/// An edited text, before it is written.
#[derive(Debug)]
pub struct Edit {
    path: PathBuf,
    /// The same with its links followed.
    target: PathBuf,
    /// The file as it was read; `None` if there was none.
    former: Option<String>,
    text: String,
}

impl Edit {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The edited text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Writes a draft beside the file.
    pub fn stage(&self) -> Result<Staged, SaveError> {
        draft(&self.target, &self.text).map_err(|e| SaveError::new(&self.path, e))
    }

    /// Moves the draft into place.
    ///
    /// # Errors
    ///
    /// If another process has changed the file, or the directory cannot be changed. The file is
    /// unchanged then.
    pub fn commit(&self, staged: Staged) -> io::Result<()> {
        let named = |e: io::Error| {
            io::Error::new(e.kind(), format!("{}: {e}", printable::path(&self.path)))
        };
        if read(&self.path).map_err(named)? != self.former {
            return Err(named(io::Error::other(
                "another process has changed it; try again",
            )));
        }
        let Staged { draft, in_place } = staged;
        let written = match &self.former {
            Some(former) if in_place => draft.commit_in_place(former.as_bytes()),
            _ => draft.commit(),
        };
        written.map_err(named)?;
        let dir = self.target.parent().unwrap_or(Path::new("."));
        if let Err(e) = fs::File::open(dir).and_then(|dir| dir.sync_all()) {
            tracing::warn!(
                "{}: {e}; the saved data may be lost if the power fails",
                dir.display()
            );
        }
        Ok(())
    }
}

/// Completes or removes what a killed daemon has left of an edit.
pub fn finish(path: &Path) -> io::Result<()> {
    AtomicFile::finish(&path_security::resolved(path))
}

/// A file's text; `None` if the file does not exist.
fn read(path: &Path) -> io::Result<Option<String>> {
    match regular_file::read(path, MAX_FILE) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Adds entries of a policy. Entries that another policy in the file has are moved; `settings` are
/// written for a policy that is not defined anywhere else.
pub fn add(
    path: &Path,
    cidrs: &[Cidr],
    policy: &PolicyName,
    settings: Option<&Settings>,
) -> Result<Edit, SaveError> {
    edit(path, |text| added(text, cidrs, policy, settings))
}

/// A file's text with entries of a policy added.
pub fn added(
    text: &str,
    cidrs: &[Cidr],
    policy: &PolicyName,
    settings: Option<&Settings>,
) -> Result<String, String> {
    let mut document = parse(text)?;
    extract(&mut document, cidrs, Some(policy));
    let table = policy_table(&mut document, policy)?;
    if let Some(settings) = settings {
        for (key, value) in settings.to_toml() {
            table.insert(&key, value);
        }
    }
    let list = table.entry("cidrs").or_insert_with(|| value(Array::new()));
    let list = list
        .as_array_mut()
        .ok_or_else(|| format!("cidrs of {policy} is not a list"))?;
    for cidr in progress::stepping(cidrs) {
        list.push(cidr.to_string());
    }
    Ok(document.to_string())
}

/// Removes entries.
///
/// # Errors
///
/// If an entry is not in the file, or the file cannot be read or parsed.
pub fn remove(path: &Path, cidrs: &[Cidr]) -> Result<Edit, SaveError> {
    edit(path, |text| removed(text, cidrs))
}

/// A file's text without entries, all of which must be in it.
pub fn removed(text: &str, cidrs: &[Cidr]) -> Result<String, String> {
    let mut document = parse(text)?;
    let found = extract(&mut document, cidrs, None);
    match cidrs.iter().find(|cidr| !found.contains(cidr)) {
        Some(cidr) => Err(format!(
            "{cidr} is not in it; remove entries of other files by editing those files"
        )),
        None => Ok(document.to_string()),
    }
}

fn parse(text: &str) -> Result<DocumentMut, String> {
    // The error's own text cites the file, which may be a link to a secret.
    text.parse().map_err(|e: toml_edit::TomlError| {
        format!("{}; rto-agent check names the line", e.message().trim_end())
    })
}

fn edit(
    path: &Path,
    change: impl FnOnce(&str) -> Result<String, String>,
) -> Result<Edit, SaveError> {
    let former = read(path).map_err(|e| SaveError::new(path, e))?;
    let header = if former.is_none() { HEADER } else { "" };
    let text = change(former.as_deref().unwrap_or_default());
    let text = text.map_err(|e| SaveError::new(path, e))?;
    Ok(Edit {
        path: path.to_owned(),
        target: path_security::resolved(path),
        former,
        text: format!("{header}{text}"),
    })
}

/// Removes entries from all policies, and policies of `add --save` that become empty (except
/// `keep`); returns the removed entries. Scans each list once, regardless of the number of entries.
fn extract(document: &mut DocumentMut, cidrs: &[Cidr], keep: Option<&PolicyName>) -> HashSet<Cidr> {
    let mut found = HashSet::new();
    let Some(policies) = document.get_mut("policy").and_then(Item::as_table_like_mut) else {
        return found;
    };
    let wanted: HashSet<&Cidr> = cidrs.iter().collect();
    let mut emptied = Vec::new();
    for (name, policy) in policies.iter_mut() {
        // (An item's own get_mut() would insert the key.)
        let table = policy.as_table_like_mut();
        let list = table.and_then(|table| table.get_mut("cidrs"));
        let Some(list) = list.and_then(Item::as_array_mut) else {
            continue;
        };
        let before = list.len();
        list.retain(|item| {
            let cidr: Option<Cidr> = item.as_str().and_then(|text| text.parse().ok());
            let goes = cidr.filter(|cidr| wanted.contains(cidr));
            found.extend(goes);
            goes.is_none()
        });
        progress::step();
        let is_named = keep.is_some_and(|keep| keep.as_str() == name.get());
        if list.is_empty() && before > 0 && !is_named {
            emptied.push(name.get().to_owned());
        }
    }
    for name in emptied {
        let is_ours = policies
            .get(&name)
            .is_some_and(|policy| is_made_by_add(&name, policy));
        if is_ours {
            policies.remove(&name);
        }
    }
    found
}

/// Whether a policy without entries is as `add --save` writes it, so that nothing of a user's is
/// lost with it: without comments, and without settings other than those its name is made of.
fn is_made_by_add(name: &str, policy: &Item) -> bool {
    let Some(table) = policy.as_table() else {
        return false;
    };
    let prefix = table.decor().prefix().and_then(|prefix| prefix.as_str());
    if prefix.is_some_and(|prefix| prefix.contains('#')) || table.to_string().contains('#') {
        return false;
    }
    let mut rest = table.clone();
    rest.remove("cidrs");
    let settings = toml_edit::de::from_str::<Settings>(&rest.to_string());
    rest.is_empty()
        || settings.is_ok_and(|settings| {
            name.parse()
                .is_ok_and(|name: PolicyName| name.is_made_of(&settings))
        })
}

fn policy_table<'d>(
    document: &'d mut DocumentMut,
    policy: &PolicyName,
) -> Result<&'d mut dyn TableLike, String> {
    let policies = document.entry("policy").or_insert_with(|| {
        let mut table = Table::new();
        table.set_implicit(true);
        Item::Table(table)
    });
    policies
        .as_table_like_mut()
        .ok_or("policy is not a table")?
        .entry(policy.as_str())
        .or_insert_with(|| Item::Table(Table::new()))
        .as_table_like_mut()
        .ok_or_else(|| format!("policy.{policy} is not a table"))
}

/// Writes a draft that only root can read until it has the owner and mode of the existing file.
fn draft(path: &Path, text: &str) -> io::Result<Staged> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    let draft = AtomicFile::write(path, 0o600, text.as_bytes())?;
    let (mode, owner) = match fs::metadata(path) {
        Ok(meta) => (meta.mode() & 0o7777, Some((meta.uid(), meta.gid()))),
        Err(_) => (0o644, None),
    };
    let made = fs::metadata(draft.path())?;
    let differs = owner.filter(|owner| *owner != (made.uid(), made.gid()));
    // The mode first: the next owner may not be allowed to set it.
    fs::set_permissions(draft.path(), fs::Permissions::from_mode(mode))?;
    let in_place =
        differs.is_some_and(|(uid, gid)| chown(draft.path(), Some(uid), Some(gid)).is_err());
    Ok(Staged { draft, in_place })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    fn write(edit: Result<Edit, SaveError>) {
        let edit = edit.unwrap();
        edit.commit(edit.stage().unwrap()).unwrap();
    }

    #[test]
    fn saved_file_adds_moves_and_removes_entries() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policies.d/50-cli.toml");
        let settings = Settings {
            initial_rto: Some(Duration::from_millis(100).into()),
            ..Settings::default()
        };
        let (near, own) = ("near".parse().unwrap(), "own".parse().unwrap());
        write(add(
            &path,
            &[cidr("10.1.0.0/16"), cidr("10.2.0.0/16")],
            &near,
            None,
        ));
        write(add(&path, &[cidr("10.2.0.0/16")], &own, Some(&settings)));
        let text = fs::read_to_string(&path).unwrap();
        insta::assert_snapshot!(text);

        write(remove(&path, &[cidr("10.2.0.0/16")]));
        assert!(!fs::read_to_string(&path).unwrap().contains("10.2.0.0/16"));
        let error = remove(&path, &[cidr("10.2.0.0/16")])
            .map(|_| ())
            .unwrap_err()
            .to_string();
        assert!(error.contains("10.2.0.0/16 is not in it"), "{error}");
    }

    #[test]
    fn settings_with_tables_are_read_again() {
        let json = r#"{"initial_rto":{"auto":true,"min":"50ms"},"rto_min":"50ms","guard":"on","mode":"advise"}"#;
        let settings: Settings = serde_json::from_str(json).unwrap();
        let own: PolicyName = "own".parse().unwrap();
        let text = added("", &[cidr("10.2.0.0/16")], &own, Some(&settings)).unwrap();
        assert!(
            text.contains("initial_rto = { auto = true, min = \"50ms\" }\n"),
            "{text}"
        );
        let host = &crate::testing::HOST;
        let config = crate::config::Config::from_text(Path::new("a.toml"), text, host).unwrap();
        assert_eq!(config.set.policies[&own].settings, settings);
    }

    #[test]
    fn policy_without_cidrs_gets_saved_cidrs() {
        let near = "near".parse().unwrap();
        let settings = "[policy.near]\ninitial_rto = \"auto\"\n";
        let text = added(settings, &[cidr("10.2.0.0/16")], &near, None).unwrap();
        assert_eq!(text, format!("{settings}cidrs = [\"10.2.0.0/16\"]\n"));
    }

    #[test]
    fn save_keeps_comments_and_appends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("50-cli.toml");
        let text = "# mine\n[policy.near]\ncidrs = [\n  \"10.1.0.0/16\", # rack 1\n]\n";
        fs::write(&path, text).unwrap();
        let edit = add(
            &path,
            &[cidr("10.2.0.0/16")],
            &"near".parse().unwrap(),
            None,
        )
        .unwrap();
        let edited = edit.text();
        assert!(
            edited.contains("# mine")
                && edited.contains("# rack 1")
                && edited.contains("10.2.0.0/16")
        );
        let draft = edit.stage().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        // Not if another process has changed the file first.
        fs::write(&path, "").unwrap();
        let error = edit.commit(draft).unwrap_err().to_string();
        assert!(
            error.contains("50-cli.toml: another process has changed it"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        fs::write(&path, text).unwrap();
        edit.commit(edit.stage().unwrap()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), edited);
    }

    /// The time per entry removed from a list of `count` entries.
    fn time_per_entry(count: u32) -> Duration {
        let cidrs: Vec<Cidr> = (0..count)
            .map(|i| cidr(&format!("10.{}.{}.0/24", i >> 8, i & 0xff)))
            .collect();
        let near: PolicyName = "near".parse().unwrap();
        let text = added("", &cidrs, &near, None).unwrap();
        let begin = std::time::Instant::now();
        let removed = removed(&text, &cidrs);
        let took = begin.elapsed();
        assert!(!removed.unwrap().contains("10."));
        took / count
    }

    /// With one search per entry, this took ten times as long.
    #[test]
    fn removing_many_entries_is_linear() {
        const TOLERANCE: u32 = 4;
        let tries = (0..5).map(|_| (time_per_entry(400), time_per_entry(4000)));
        let tries: Vec<_> = tries.collect();
        let is_linear = |(few, many): &(Duration, Duration)| *many < *few * TOLERANCE;
        assert!(tries.iter().any(is_linear), "{tries:?}");
    }

    #[test]
    fn user_policy_stays_without_entries() {
        for kept in [
            "[policy.near]\ninitial_rto = \"100ms\"\ncidrs = [\"10.1.0.0/16\"]\n",
            "# mine\n[policy.near]\ncidrs = [\"10.1.0.0/16\"]\n",
            "[policy.near]\n# mine\ncidrs = [\"10.1.0.0/16\"]\n",
            "[policy.near]\ncidrs = [\"10.1.0.0/16\"] # mine\n",
            "[policy.near]\ndescription = \"mine\"\ncidrs = [\"10.1.0.0/16\"]\n",
            // Settings that its name is not made of.
            "[policy.adhoc-00000000]\ninitial_rto = \"100ms\"\ncidrs = [\"10.1.0.0/16\"]\n",
        ] {
            let text = removed(kept, &[cidr("10.1.0.0/16")]).unwrap();
            assert_eq!(text, kept.replace("\"10.1.0.0/16\"", ""));
            let other = "other".parse().unwrap();
            let moved = added(kept, &[cidr("10.1.0.0/16")], &other, None).unwrap();
            assert!(moved.starts_with(&text), "{moved}");
        }
        // What add --save wrote goes again.
        let settings = Settings {
            initial_rto: Some(Duration::from_millis(100).into()),
            ..Settings::default()
        };
        let own = PolicyName::for_settings(&settings, |_| false);
        let former = "[policy.far]\ninitial_rto = \"300ms\"\n";
        for (name, settings) in [(own, Some(&settings)), ("far".parse().unwrap(), None)] {
            let before = if settings.is_some() { former } else { "" };
            let text = added(before, &[cidr("10.1.0.0/16")], &name, settings).unwrap();
            assert_eq!(removed(&text, &[cidr("10.1.0.0/16")]).unwrap(), before);
        }
    }

    #[test]
    fn save_keeps_symlink_owner_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let (path, target) = (dir.path().join("50-cli.toml"), dir.path().join("real.toml"));
        std::os::unix::fs::symlink("real.toml", &path).unwrap();
        let near = "near".parse().unwrap();
        // The link's target may be missing.
        write(add(&path, &[cidr("10.1.0.0/16")], &near, None));
        assert!(path.is_symlink() && fs::metadata(&target).unwrap().mode() & 0o777 == 0o644);
        fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).unwrap();
        let is_root = nix::unistd::geteuid().is_root();
        if is_root {
            chown(&target, Some(0), Some(12_345)).unwrap();
        }
        let before = fs::metadata(&target).unwrap();
        write(add(&path, &[cidr("10.2.0.0/16")], &near, None));
        let after = fs::metadata(&target).unwrap();
        assert!(path.is_symlink() && fs::read_to_string(&target).unwrap().contains("10.2.0.0/16"));
        let owner = |meta: &fs::Metadata| (meta.mode(), meta.uid(), meta.gid());
        assert_eq!(owner(&after), owner(&before));
        // The file that an unprivileged daemon cannot make: the same file stays.
        let edit = add(&path, &[cidr("10.3.0.0/16")], &near, None).unwrap();
        let staged = Staged {
            in_place: true,
            ..edit.stage().unwrap()
        };
        edit.commit(staged).unwrap();
        assert_eq!(fs::metadata(&target).unwrap().ino(), after.ino());
        assert!(fs::read_to_string(&target).unwrap().contains("10.3.0.0/16"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn invalid_file_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("50-cli.toml");
        fs::write(&path, "[policy.near\n").unwrap();
        let near = "near".parse().unwrap();
        let error = add(&path, &[cidr("10.2.0.0/16")], &near, None).unwrap_err();
        // The file's text is not shown, as the file may be a link.
        let error = error.to_string();
        assert!(
            !error.contains("[policy.near") && error.contains("rto-agent check"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "[policy.near\n");
    }
}
