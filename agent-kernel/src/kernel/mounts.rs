//! Parses `/proc/self/mountinfo` (proc(5)), as far as cgroups and BPF file systems need it.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The mounted path within its file system; "/" is all of it.
    pub root: PathBuf,
    /// The mount point.
    pub point: PathBuf,
    /// Whether it is mounted read-only.
    pub read_only: bool,
    /// The file system's type.
    pub kind: String,
    /// The file system's own options; for cgroup v1 these include its controllers.
    pub super_options: String,
}

/// The mounts that this process sees, in the order in which they were made.
pub fn read() -> io::Result<Vec<Mount>> {
    Ok(parse(&fs::read_to_string("/proc/self/mountinfo")?))
}

/// Parses mountinfo; skips lines that it cannot parse.
pub fn parse(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_line).collect()
}

/// The mount that a path is on.
pub fn mount_of<'m>(mounts: &'m [Mount], path: &Path) -> Option<&'m Mount> {
    // Of several mounts at one point, the last one covers the others.
    let holding = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    holding.max_by_key(|mount| mount.point.components().count())
}

fn parse_line(line: &str) -> Option<Mount> {
    let (before, after) = line.split_once(" - ")?;
    let mut before = before.split(' ').skip(3);
    let (root, point, options) = (before.next()?, before.next()?, before.next()?);
    let mut after = after.split(' ');
    let kind = after.next()?;
    let super_options = after.nth(1).unwrap_or_default();
    let read_only = |options: &str| options.split(',').any(|option| option == "ro");
    Some(Mount {
        root: unescape(root),
        point: unescape(point),
        read_only: read_only(options) || read_only(super_options),
        kind: kind.to_owned(),
        super_options: super_options.to_owned(),
    })
}

/// Decodes octal escapes of blanks and backslashes.
fn unescape(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|d| std::str::from_utf8(d).ok());
        match octal.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) if first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) const UNIFIED: &str = "\
24 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 24 0:27 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
32 24 0:28 / /sys/fs/bpf rw,nosuid,nodev,noexec,relatime shared:10 - bpf bpf rw,mode=700
";
    pub(crate) const HYBRID: &str = "\
24 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 24 0:26 / /sys/fs/cgroup ro,nosuid shared:8 - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/net_cls,net_prio rw shared:10 - cgroup cgroup rw,net_cls,net_prio
33 30 0:29 / /sys/fs/cgroup/cpu rw shared:11 - cgroup cgroup rw,cpu
";
    pub(crate) const CONTAINER: &str = "\
24 1 254:0 / / rw,relatime - overlay overlay rw
31 24 0:27 /../../system.slice /sys/fs/cgroup ro - cgroup2 cgroup rw
";
    pub(crate) const PRIVATE: &str = "\
24 1 254:0 / / rw,relatime - overlay overlay rw
31 24 0:27 / /sys/fs/cgroup ro - cgroup2 cgroup rw,nsdelegate
";

    #[test]
    fn mountinfo_is_parsed() {
        let mounts = parse(UNIFIED);
        assert_eq!(mounts.len(), 3);
        assert_eq!(mounts[1].kind, "cgroup2");
        let of = |path: &str| mount_of(&mounts, Path::new(path)).unwrap().kind.clone();
        assert_eq!(of("/sys/fs/bpf/rto-agent"), "bpf");
        assert_eq!(of("/sys/fs"), "ext4");
    }

    #[test]
    fn escaped_and_read_only_mounts_are_parsed() {
        let mounts = parse("1 2 0:1 / /a\\040b ro,relatime - bpf bpf rw\n");
        assert_eq!(mounts[0].point, Path::new("/a b"));
        assert!(mounts[0].read_only);
        assert!(parse("nonsense\n\n").is_empty());
    }
}
