//! A block device as a swap file.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::noise;
use ebb_store::{Page, Protection, Store, StoreError, SwapFile};

const SLOTS: u64 = 512;
const MIB: u64 = 1 << 20;

/// A file as a loop device, until this is dropped.
struct Loop {
    device: PathBuf,
}

impl Loop {
    /// Makes a loop device. `None`: root or loop devices are missing, which it prints.
    fn new(file: &Path) -> Option<Loop> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        match output {
            Ok(output) if output.status.success() => {
                let device = String::from_utf8(output.stdout).unwrap();
                Some(Loop { device: PathBuf::from(device.trim()) })
            }
            _ => {
                eprintln!("SKIPPED: no loop devices");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.device).status();
        assert!(detached.unwrap().success());
    }
}

fn unusable(device: &Loop, run: &Path, slots: u64) -> String {
    match SwapFile::open(&device.device, run, slots, Protection::Encrypted) {
        Err(StoreError::Unusable(why)) => why,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("{} was taken", device.device.display()),
    }
}

#[test]
fn an_empty_device_is_used_but_for_its_ends() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let file = File::create_new(&path).unwrap();
    file.set_len(SLOTS * 4096 + 2 * MIB).unwrap();
    let Some(device) = Loop::new(&path) else { return };
    let open = || SwapFile::open(&device.device, dir.path(), SLOTS, Protection::Encrypted).unwrap();
    let store = open();
    assert!(unusable(&device, dir.path(), SLOTS).contains("in use"));
    let pages: Vec<Page> = (0..SLOTS).map(noise).collect();
    let batch = store.save_batch(&pages);
    assert!(batch.error.is_none());
    drop(store);
    let store = open();
    for (slot, page) in batch.slots.iter().flatten().zip(&pages) {
        let mut back = [0; 4096];
        store.claim(*slot).unwrap();
        store.load(*slot, &mut back).unwrap();
        assert!(back == *page);
        store.release(*slot);
    }
    store.trim().unwrap();
    drop((store, device));
    let bytes = std::fs::read(&path).unwrap();
    let mib = MIB as usize;
    assert!(bytes[..mib].iter().chain(&bytes[bytes.len() - mib..]).all(|&byte| byte == 0));
}

#[test]
fn a_device_with_something_on_it_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(SLOTS * 4096 + 2 * MIB).unwrap();
    file.write_all_at(&[0x53, 0xef], 1080).unwrap();
    let Some(device) = Loop::new(&path) else { return };
    assert!(unusable(&device, dir.path(), SLOTS).contains("ext4 file system"));
    assert!(unusable(&device, dir.path(), SLOTS + 1).contains("are needed"));
}
