//! Tests of a process that a cgroup freezes.

use std::io::Write;
use std::path::PathBuf;

use super::*;

/// A cgroup for the victim. At the end it is thawed and removed.
struct Freezer {
    directory: PathBuf,
    parent: PathBuf,
    words: [(&'static str, &'static str); 2],
    state: (&'static str, &'static str),
    pid: i32,
}

impl Freezer {
    /// Makes a cgroup of each kind that this host has mounted.
    fn all(pid: i32) -> Vec<Freezer> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mut all = Vec::new();
        for mount in mounts.lines() {
            let words: Vec<&str> = mount.split(' ').collect();
            let (words, state) = match (words[2], words[3].split(',').any(|o| o == "freezer")) {
                ("cgroup", true) => (
                    [("freezer.state", "FROZEN"), ("freezer.state", "THAWED")],
                    ("freezer.state", "FROZEN\n"),
                ),
                ("cgroup2", _) => (
                    [("cgroup.freeze", "1"), ("cgroup.freeze", "0")],
                    ("cgroup.events", "frozen 1"),
                ),
                _ => continue,
            };
            let parent = PathBuf::from(mount.split(' ').nth(1).unwrap());
            let directory = parent.join(format!("ebb-test-{pid}"));
            if fs::create_dir(&directory).is_ok() {
                fs::write(directory.join("cgroup.procs"), pid.to_string()).unwrap();
                all.push(Freezer { directory, parent, words, state, pid });
            }
        }
        all
    }

    fn freeze(&self) {
        fs::write(self.directory.join(self.words[0].0), self.words[0].1).unwrap();
        let path = self.directory.join(self.state.0);
        wait_until(path.to_str().unwrap(), |text| text.contains(self.state.1));
    }

    fn thaw(&self) {
        fs::write(self.directory.join(self.words[1].0), self.words[1].1).unwrap();
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.thaw();
        let moved = fs::write(self.parent.join("cgroup.procs"), self.pid.to_string());
        let removed = moved.and_then(|()| fs::remove_dir(&self.directory));
        if !std::thread::panicking() {
            removed.unwrap();
        }
    }
}

#[test]
fn a_frozen_process_finds_back_once_it_is_thawed() {
    if !may_trace() {
        return;
    }
    let mut victim = Victim::of("read");
    for freezer in Freezer::all(victim.pid()) {
        freezer.freeze();
        let mut helper = helper_for(format!("close {} 9999", victim.pid()));
        let output = helper.env("EBB_TIMEOUT_MS", "50").output().unwrap();
        assert!(said(&output).contains("TimedOut"), "{output:?}");
        freezer.thaw();
        victim.goes_on();
        // The process is frozen amid a call, whose helper dies, too.
        let helper = helper_in_a_call(&victim);
        freezer.freeze();
        kill(helper);
        freezer.thaw();
        victim.input.as_mut().unwrap().write_all(b"x").unwrap();
        victim.goes_on();
        // The process is frozen on its way into a call.
        let helper = helper_for(format!("close {} 9999", victim.pid()));
        let helper = paused_at(helper, INTO_A_CALL);
        fs::write(freezer.directory.join(freezer.words[0].0), freezer.words[0].1).unwrap();
        kill(helper);
        freezer.freeze();
        freezer.thaw();
        victim.goes_on();
    }
    victim.ends_well();
}
