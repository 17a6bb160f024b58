//! Would the daemon use the run directory, and is that private and in memory?

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use ebb_api::advice;
use ebb_sys::memory_fs::is_in_memory;
use ebb_sys::private_dir::{self, PrivateDirError};

use super::finding::{Finding, Fix};
use crate::daemon;

const CHECK: &str = "run directory";
const COST: &str = "the daemon cannot run";

pub fn check(path: &Path, as_root: bool) -> Finding {
    // Read as the daemon reads it.
    let keys_on_disk = env::var("EBB_ALLOW_KEYS_ON_DISK").is_ok_and(|text| text == "true");
    match as_root {
        true => judge(path, keys_on_disk),
        false => glance(path, keys_on_disk),
    }
}

/// Says what this user can tell of a directory that root has or would make.
fn glance(path: &Path, keys_on_disk: bool) -> Finding {
    if let Err(finding) = in_memory(path, private_dir::nearest(path), keys_on_disk) {
        return finding;
    }
    let owner = fs::symlink_metadata(path).map(|found| found.uid());
    let path = path.display();
    match owner {
        Ok(0) => Finding::unknown(CHECK, format!("{path} is root's")),
        Ok(uid) => {
            let found = format!("{path} belongs to user {uid}, and the daemon is root");
            Finding::missing(CHECK, found, COST, "name another by --run-dir (EBB_RUN_DIR)")
        }
        Err(error) => Finding::unknown(CHECK, format!("{path}: {error}")),
    }
}

/// Judges the directory as the daemon does at its start, in the daemon's words. `keys_on_disk`
/// allows keys on a disk.
fn judge(path: &Path, keys_on_disk: bool) -> Finding {
    let mode = match private_dir::check(path) {
        Ok(found) => found.permissions().mode() & 0o777,
        Err(PrivateDirError::Io(_, error)) if error.kind() == io::ErrorKind::NotFound => {
            return absent(path, keys_on_disk);
        }
        Err(error) => return unusable(&error),
    };
    let in_memory = match in_memory(path, path, keys_on_disk) {
        Ok(in_memory) => in_memory,
        Err(finding) => return finding,
    };
    if mode & 0o077 != 0 {
        let cost = "other users can see what the daemon has there";
        let fixes = vec![Fix::Close { path: path.into() }];
        return Finding::fixable(
            CHECK,
            format!("{} has mode {mode:o}", path.display()),
            cost,
            fixes,
        );
    }
    if !in_memory {
        let cost =
            "keys and records of evicted memory are written to a disk, and may outlive the VMs";
        let found = format!("{} is on a disk, and EBB_ALLOW_KEYS_ON_DISK is set", path.display());
        return Finding::degraded(
            CHECK,
            found,
            cost,
            "name one on tmpfs, as /run is on most systems",
        );
    }
    Finding::ok(CHECK, format!("{}, mode {mode:o}, in memory", path.display()))
}

/// Judges a directory that is missing: the daemon's first start makes it.
fn absent(path: &Path, keys_on_disk: bool) -> Finding {
    let makes = |_| private_dir::check_missing(path).map_err(|error| unusable(&error));
    match in_memory(path, private_dir::nearest(path), keys_on_disk).and_then(makes) {
        Ok(()) => Finding::fixable(
            CHECK,
            format!("{} is not there yet", path.display()),
            "nothing: the daemon's first start makes it",
            vec![Fix::MakeDir { path: path.into() }],
        ),
        Err(finding) => finding,
    }
}

fn unusable(error: &PrivateDirError) -> Finding {
    let advice =
        error.advice().unwrap_or_else(|| "name another by --run-dir, or run ebb as root".into());
    Finding::missing(CHECK, error.why(), COST, advice)
}

/// Whether `path` is in memory, judged by what is at `place`. If Ebb would refuse every VM there,
/// it returns a finding.
fn in_memory(path: &Path, place: &Path, keys_on_disk: bool) -> Result<bool, Finding> {
    match is_in_memory(place) {
        Ok(false) if !keys_on_disk => {
            let (why, advice) = advice::keys_on_disk(path, daemon::pid(path));
            Err(Finding::missing(CHECK, why, "ebb run and ebb attach refuse every VM", advice))
        }
        Ok(is) => Ok(is),
        Err(error) => Err(unusable(&PrivateDirError::Io(path.into(), error))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::super::finding::Verdict;
    use super::*;

    /// Makes a directory in memory.
    fn shared() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    /// A path that does not exist, and would not be in memory.
    const NOWHERE: &str = "/proc/self/nowhere";

    #[test]
    fn each_finding_has_a_fix_that_mends_it() {
        let temp = shared();
        let dir = temp.path().join("a/b");
        let absent = judge(&dir, false);
        assert_eq!(absent.fixes, [Fix::MakeDir { path: dir.clone() }]);
        absent.fixes[0].apply().unwrap();
        assert_eq!(judge(&dir, false).verdict, Verdict::Ok);

        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        let open = judge(&dir, false);
        assert_eq!(open.fixes, [Fix::Close { path: dir.clone() }]);
        open.fixes[0].apply().unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(judge(&dir, false).verdict, Verdict::Ok);
    }

    #[test]
    fn a_directory_that_the_daemon_refuses_is_missing_in_its_words() {
        let temp = shared();
        let [dir, link, file] = ["dir", "link", "file"].map(|name| temp.path().join(name));
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
        symlink(&dir, &link).unwrap();
        fs::write(&file, "").unwrap();
        for path in [dir, link, file] {
            let (finding, daemons) = (judge(&path, true), private_dir::make(&path).unwrap_err());
            assert_eq!(finding.verdict, Verdict::Missing, "{finding:?}");
            assert_eq!(
                format!("{}: {}", finding.found, finding.mend.unwrap()),
                daemons.to_string()
            );
            assert_eq!(finding.fixes, []);
        }
    }

    #[test]
    fn a_place_on_a_disk_is_missing_unless_it_is_allowed() {
        // Neither path is in memory. The second does not exist.
        for path in [PathBuf::from("/proc/self"), NOWHERE.into()] {
            let finding = in_memory(&path, Path::new("/proc"), false).unwrap_err();
            assert_eq!(finding.verdict, Verdict::Missing, "{finding:?}");
            let (why, advice) = advice::keys_on_disk(&path, None);
            assert_eq!((finding.found, finding.mend), (why, Some(advice)));
            assert_eq!(in_memory(&path, Path::new("/proc"), true).ok(), Some(false));
        }
        assert_eq!(judge(Path::new(NOWHERE), false).verdict, Verdict::Missing);
    }

    #[test]
    fn a_user_who_is_not_root_is_not_advised_to_take_a_directory() {
        let temp = shared();
        let finding = glance(temp.path(), false);
        let is_roots = fs::metadata(temp.path()).unwrap().uid() == 0;
        let expected = if is_roots { Verdict::Unknown } else { Verdict::Missing };
        assert_eq!(finding.verdict, expected, "{finding:?}");
        assert!(!finding.text().contains("chown"), "{finding:?}");
        assert_eq!(glance(&temp.path().join("a/b"), false).verdict, Verdict::Unknown);
        assert_eq!(glance(Path::new(NOWHERE), false).verdict, Verdict::Missing);
    }

    #[test]
    fn a_daemon_that_runs_is_named() {
        let temp = tempfile::tempdir().unwrap();
        assert_eq!(daemon::pid(temp.path()), None);
        let _listener = UnixListener::bind(temp.path().join("ebbd.sock")).unwrap();
        let pid = daemon::pid(temp.path());
        assert_eq!(pid, i32::try_from(std::process::id()).ok());
        let (_, advice) = advice::keys_on_disk(temp.path(), pid);
        assert!(advice.contains(&format!("(`kill {}`)", std::process::id())), "{advice}");
    }
}
