//! Small file systems that a test fills.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use testkit::{Undo, undo};

use crate::host::{call, permit};

/// A mounted file system. Dropping this unmounts it, so it must be dropped after its users.
pub struct SmallFs {
    at: PathBuf,
    /// For a process that ends before this is dropped.
    _unmounted: Undo,
    _directory: TempDir,
}

impl SmallFs {
    /// A tmpfs of this many bytes.
    ///
    /// # Panics
    /// It cannot be mounted.
    pub fn tmpfs(bytes: u64) -> SmallFs {
        SmallFs::mount(|_, at| {
            let size = format!("size={bytes},mode=0700");
            call(&[&"mount", &"-t", &"tmpfs", &"-o", &size, &"ebb-test", &at]);
        })
    }

    /// An ext4 of this many bytes, in a file.
    ///
    /// # Panics
    /// It cannot be made or mounted.
    pub fn ext4(bytes: u64) -> SmallFs {
        SmallFs::mount(|directory, at| {
            let image = directory.join("image");
            File::create(&image).and_then(|file| file.set_len(bytes)).expect("an image");
            call(&[&"mkfs.ext4", &"-q", &"-F", &"-m", &"0", &image]);
            call(&[&"mount", &"-o", &"loop", &image, &at]);
        })
    }

    fn mount(make: impl FnOnce(&Path, &Path)) -> SmallFs {
        let directory = tempfile::Builder::new().prefix("ebb-test-").tempdir().expect("a place");
        let at = directory.path().join("at");
        fs::create_dir(&at).expect("a place");
        make(directory.path(), &at);
        // QEMUs are users of their own, and their drives may be below.
        [directory.path(), &at].into_iter().for_each(|path| permit(path, 0o711));
        let mounted = at.clone();
        let unmounted = Undo::new(move || {
            // It fails where it is unmounted already: then there is nothing to undo.
            let _ = undo::helper("umount").arg("--lazy").arg(&mounted).output();
        });
        SmallFs { at, _unmounted: unmounted, _directory: directory }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Fills it to the last block. Returns the path of the file that does.
    ///
    /// # Panics
    /// Writing fails for another reason.
    pub fn fill(&self) -> PathBuf {
        let path = self.at.join("fill");
        let mut file = File::options().create(true).append(true).open(&path).expect("a file");
        for length in [1 << 20, 4096, 1] {
            while let Ok(1..) = file.write(&vec![0x5a; length]) {}
        }
        path
    }
}

impl Drop for SmallFs {
    fn drop(&mut self) {
        // A file system in use is unmounted when its last user ends.
        let done = Command::new("umount").arg("--lazy").arg(&self.at).status();
        assert!(done.is_ok_and(|done| done.success()) || std::thread::panicking(), "umount");
    }
}
