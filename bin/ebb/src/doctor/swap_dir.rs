//! Is there a place to swap to, and does it save memory?

use std::env;
use std::io;
use std::path::{Path, PathBuf};

use ebb_api::{advice, route};
use ebb_sys::memory_fs::is_in_memory;
use ebb_sys::private_dir::{self, PrivateDirError};

use super::finding::Finding;

const CHECK: &str = "swap directory";
const COST: &str = "no VM is started or attached";

/// Judges the swap directory as a daemon started by `ebb` finds it.
pub fn check(run_dir: &Path, as_root: bool) -> Finding {
    judge(run_dir, env::var_os("EBB_SWAP_DIR").map(PathBuf::from).as_deref(), as_root)
}

fn judge(run_dir: &Path, named: Option<&Path>, as_root: bool) -> Finding {
    let path = match std::path::absolute(route::swap_dir(run_dir, named)) {
        Ok(path) => path,
        Err(error) => return Finding::missing(CHECK, error.to_string(), COST, "give a path"),
    };
    if named.is_some() && !path.exists() {
        let (why, advice) = advice::no_swap_dir(&path);
        return Finding::missing(CHECK, why, COST, advice);
    }
    let shown = path.display();
    let found = match private_dir::check(&path) {
        Ok(_) => Ok(shown.to_string()),
        Err(PrivateDirError::Io(_, error)) if error.kind() == io::ErrorKind::NotFound => {
            private_dir::check_missing(&path)
                .map(|()| format!("{shown}, which the daemon's first start makes"))
        }
        Err(error) => Err(error),
    };
    if let (Err(error), true) = (&found, as_root) {
        let advice = error.advice().unwrap_or_else(|| "name another (EBB_SWAP_DIR)".into());
        return Finding::missing(CHECK, error.why(), COST, advice);
    }
    if is_in_memory(private_dir::nearest(&path)).is_ok_and(|is| is) {
        let (why, advice) = advice::swap_in_memory(&path, false);
        return Finding::degraded(CHECK, why, "a limit on memory saves none", advice);
    }
    found.map_or_else(
        |error| Finding::unknown(CHECK, error.why()),
        |found| Finding::ok(CHECK, found),
    )
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn a_directory_in_memory_is_reported_also_by_default() {
        let shared = tempfile::tempdir_in("/dev/shm").unwrap();
        for (run_dir, named) in [
            (shared.path(), None),
            (Path::new("/dev/shm/nowhere"), None),
            (Path::new(route::RUN_DIR_DEFAULT), Some(shared.path())),
        ] {
            let finding = judge(run_dir, named, true);
            assert_eq!(finding.verdict, Verdict::Degraded, "{finding:?}");
            assert!(finding.found.contains("saves nothing"), "{finding:?}");
        }
    }

    #[test]
    fn one_that_others_can_write_is_refused_also_in_memory() {
        let shared = tempfile::tempdir_in("/dev/shm").unwrap();
        fs::set_permissions(shared.path(), Permissions::from_mode(0o777)).unwrap();
        let finding = judge(Path::new("/run/ebb"), Some(shared.path()), true);
        assert_eq!(finding.verdict, Verdict::Missing, "{finding:?}");
        assert!(finding.mend.unwrap().contains("chmod go-w"));
    }

    #[test]
    fn one_that_cannot_be_written_is_missing() {
        let test = "doctor::swap_dir::tests::one_that_cannot_be_written_is_missing";
        let Some(path) = testkit::mounted(test, "ro,mode=0700") else { return };
        for (run_dir, named) in [(Path::new("/run/ebb"), Some(&*path)), (&path.join("run"), None)] {
            let finding = judge(run_dir, named, true);
            assert_eq!(finding.verdict, Verdict::Missing, "{finding:?}");
            assert!(finding.found.contains("Read-only file system"), "{finding:?}");
        }
    }

    #[test]
    fn a_named_one_has_to_be_there() {
        let finding = judge(Path::new("/run/ebb"), Some(Path::new("/nowhere/swap")), true);
        assert_eq!(finding.verdict, Verdict::Missing, "{finding:?}");
        assert!(finding.mend.unwrap().contains("mkdir -m 700 /nowhere/swap"));
        // The daemon makes the default directory.
        let finding = judge(Path::new("/nowhere/run"), None, true);
        assert_eq!(finding.verdict, Verdict::Ok, "{finding:?}");
    }
}
