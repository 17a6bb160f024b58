//! Is the run directory private, and in memory?

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::finding::{Finding, Fix};

const CHECK: &str = "run directory";
/// `TMPFS_MAGIC` of `include/uapi/linux/magic.h`.
const TMPFS: u64 = 0x0102_1994;

pub fn check(path: &Path) -> Finding {
    match fs::metadata(path) {
        Ok(found) => judge(path, &found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Finding::fixable(
            CHECK,
            format!("{} is not there yet", path.display()),
            "nothing: the daemon's first start makes it",
            vec![Fix::MakeDir { path: path.into() }],
        ),
        Err(error) => unusable(path, &error.to_string()),
    }
}

fn unusable(path: &Path, why: &str) -> Finding {
    let found = format!("{}: {why}", path.display());
    Finding::missing(CHECK, found, "the daemon cannot run", "name another by --run-dir, or be root")
}

fn judge(path: &Path, found: &Metadata) -> Finding {
    if !found.is_dir() {
        return unusable(path, "not a directory");
    }
    let text = path.display();
    let owner = rustix::process::geteuid().as_raw();
    if found.uid() != owner {
        let cost = "its owner can take over the daemon's socket and records";
        let mend = format!("chown {owner} {text}, when nothing in it is another's");
        return Finding::degraded(CHECK, format!("{text} is user {}'s", found.uid()), cost, mend);
    }
    let mode = found.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        let cost = "other users can reach the daemon's socket and records";
        let fixes = vec![Fix::Close { path: path.into() }];
        return Finding::fixable(CHECK, format!("{text} has mode {mode:o}"), cost, fixes);
    }
    match is_tmpfs(path) {
        Ok(true) => Finding::ok(CHECK, format!("{text}, mode {mode:o}, tmpfs")),
        Ok(false) => {
            let cost = "records of emptied memory are written to a disk, and outlive the VMs";
            let mend = "use a directory on tmpfs, as /run is on most systems";
            Finding::degraded(CHECK, format!("{text} is not on tmpfs"), cost, mend)
        }
        Err(error) => unusable(path, &error.to_string()),
    }
}

fn is_tmpfs(path: &Path) -> io::Result<bool> {
    Ok(u64::try_from(rustix::fs::statfs(path)?.f_type) == Ok(TMPFS))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn what_is_found_is_mended_by_its_own_fix() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("a/b");
        let absent = check(&dir);
        assert_eq!(absent.fixes, [Fix::MakeDir { path: dir.clone() }]);
        absent.fixes[0].apply().unwrap();
        assert_eq!(check(&dir).fixes, []);

        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        let open = check(&dir);
        assert_eq!(open.fixes, [Fix::Close { path: dir.clone() }]);
        open.fixes[0].apply().unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(check(&dir).fixes, []);
    }

    #[test]
    fn a_file_is_no_run_directory() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(check(file.path()).verdict, Verdict::Missing);
    }

    #[test]
    fn dev_shm_is_tmpfs_and_proc_is_not() {
        assert_eq!(is_tmpfs(Path::new("/dev/shm")).ok(), Some(true));
        assert_eq!(is_tmpfs(Path::new("/proc")).ok(), Some(false));
    }
}
