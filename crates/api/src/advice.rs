//! What `ebbd` and `ebb doctor` say in the same words: what is wrong, and what to do.

use std::path::Path;

use crate::VmName;

/// What small pages cost. Measured for 2 MiB on Linux 6.18: a punch took 602 us in small pages and
/// 9 us in a huge one, giving the memory back 1614 us and 93 us.
pub const SMALL_PAGES_COST: &str = "guest RAM is in pages of 4 KiB: reclaim and return take 15 \
                                    times as long as in huge pages, or longer";

/// How to end the daemon with this process number.
pub fn end(pid: impl std::fmt::Display) -> String {
    format!("end ebbd (`kill {pid}`)")
}

/// Of a run directory on a disk, where `ebb run` and `ebb attach` manage no VM; `daemon`: the
/// process that serves it already.
pub fn keys_on_disk(run_dir: &Path, daemon: Option<i32>) -> (String, String) {
    let why = format!(
        "the run directory {} is on a disk, and the key of the VM's swap file would be, too",
        run_dir.display()
    );
    let first = daemon.map(|pid| format!("{} and ", end(pid))).unwrap_or_default();
    let advice = format!(
        "name one on tmpfs, as /dev/shm/ebb (EBB_RUN_DIR, or --run-dir), with swap files on a \
         disk (EBB_SWAP_DIR), or {first}allow it \
         (EBB_ALLOW_KEYS_ON_DISK=true, or ebbd --allow-keys-on-disk)"
    );
    (why, advice)
}

/// Of a key in this directory of a VM that is managed all the same.
pub fn key_on_disk(directory: &Path) -> String {
    format!(
        "the key of its swap file is on a disk, in {}, and may be found there after the VM has \
         ended: give the next daemon a run directory on tmpfs (EBB_RUN_DIR, or --run-dir)",
        directory.display()
    )
}

/// Of a named swap directory that is not there, with which no VM is started or attached.
pub fn no_swap_dir(swap_dir: &Path) -> (String, String) {
    let path = swap_dir.display();
    let why = format!("there is no swap directory {path}");
    (why, format!("make it (`mkdir -m 700 {path}`), or name another (EBB_SWAP_DIR, or --swap-dir)"))
}

/// Of swap files at this place, which is in memory; they are `named` by a VM's tiers.
pub fn swap_in_memory(place: &Path, named: bool) -> (String, String) {
    let why = format!(
        "swap files in {} are in memory (tmpfs): what is evicted there saves nothing",
        place.display()
    );
    let advice = match named {
        true => "give the VM a file on a disk (ebb run --tier)",
        false => "name a directory on a disk (EBB_SWAP_DIR, or --swap-dir)",
    };
    (why, advice.into())
}

/// Of a swap file that is not where the VM's process has opened it. `detach`: the VM can be
/// detached, which brings its content back to memory.
pub fn swap_is_removed(swap: &Path, vm: &VmName, detach: bool) -> String {
    let what = match detach {
        true => format!("put it back, or bring it back to memory now (`ebb detach {vm}`)"),
        false => "put it back, or power the VM off in its guest".into(),
    };
    format!(
        "its swap file {} was removed, renamed or replaced: what is in it is lost if the VM's \
         process ends; {what}",
        swap.display()
    )
}

/// Of a swap file that is not there when the VM's next process needs these bytes of it.
pub fn swap_is_gone(why: &str, bytes: u64, pid: i32) -> String {
    format!(
        "{why}, and {} MiB of the guest's memory are in its swap file: put it or a whole copy back, \
         and Ebb goes on within a minute; without it, end QEMU (`kill -9 {pid}`) and start the VM \
         anew",
        bytes.div_ceil(1 << 20)
    )
}
