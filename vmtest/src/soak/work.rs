//! What a guest of the soak does, and what it must find in its memory and on its disk.

use std::collections::{BTreeMap, BTreeSet};

use super::chance::Chance;
use super::place::Place;
use super::shared::Shared;
use crate::vm::Vm;

const MIB: u64 = 1 << 20;
/// Names of memory. What begins with `soft` compresses.
const NAMES: [&str; 6] = ["hard1", "soft1", "hard2", "soft2", "hard3", "soft3"];
const FILES: [&str; 2] = ["files1", "files2"];
const FILES_ON_DISK: &str = "files3";
/// Percent of the VM's memory that the guest fills at most, and what one load uses at most.
const FILL_PERCENT: u64 = 45;
const LOAD_PERCENT: u64 = 10;
/// Memory whose accesses are timed.
const WATCHED_MIB: u64 = 12;
const WATCHED: &str = "watched";
/// Bytes on the disk, of files and of a load each.
const ON_DISK_MIB: u64 = 40;

/// Loads that run beside everything else.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Load {
    Churn,
    DiskChurn,
    Access,
}

#[derive(Clone, Copy)]
enum Step {
    Fill,
    Check,
    Refill,
    Free,
    Files,
    CheckFiles,
    RemoveFiles,
    Load(Load),
    Caches,
    Reboot,
}

/// How often a guest does what.
const STEPS: [(u64, Step); 12] = [
    (24, Step::Fill),
    (30, Step::Check),
    (10, Step::Refill),
    (12, Step::Free),
    (8, Step::Files),
    (10, Step::CheckFiles),
    (4, Step::RemoveFiles),
    (10, Step::Load(Load::Churn)),
    (8, Step::Load(Load::DiskChurn)),
    (10, Step::Load(Load::Access)),
    (2, Step::Caches),
    (1, Step::Reboot),
];

/// A guest, and what it has in memory and on its disk.
pub struct Work<'a> {
    shared: &'a Shared<'a>,
    place: &'a Place,
    vm: &'a Vm,
    has_disk: bool,
    memory_mib: u64,
    /// Size of each piece in MiB.
    held: BTreeMap<&'static str, u64>,
    files: BTreeMap<&'static str, u64>,
    loads: BTreeSet<Load>,
}

impl<'a> Work<'a> {
    /// Begins with a guest that has just booted.
    ///
    /// # Errors
    /// It cannot mount its disk.
    pub fn new(shared: &'a Shared<'a>, place: &'a Place, vm: &'a Vm) -> Result<Work<'a>, String> {
        let mut work = Work {
            shared,
            place,
            vm,
            has_disk: place.kind.has_disk(),
            memory_mib: place.kind.memory_mib(),
            held: BTreeMap::new(),
            files: BTreeMap::new(),
            loads: BTreeSet::new(),
        };
        work.mount()?;
        Ok(work)
    }

    fn mount(&mut self) -> Result<(), String> {
        if self.has_disk {
            self.ask("mount", "mount ext4 /dev/vda /mnt")?;
        }
        Ok(())
    }

    /// Whether it has memory whose content is known.
    pub fn holds_something(&self) -> bool {
        !self.held.is_empty()
    }

    /// Does one thing.
    ///
    /// # Errors
    /// The guest does not answer, or fails at what it must be able to do.
    pub fn step(&mut self, chance: &mut Chance) -> Result<(), String> {
        match chance.weighted(&STEPS) {
            Step::Fill => self.fill(chance.of(&NAMES), chance.within(2, 40)),
            Step::Check => self.check(chance.of(&NAMES)),
            Step::Refill => self.refill(chance.of(&NAMES)),
            Step::Free => self.free(chance.of(&NAMES)),
            Step::Files => self.write_files(chance.of(&FILES), chance.within(1, 16)),
            Step::CheckFiles => self.check_files(chance.of(&self.all_files())),
            Step::RemoveFiles => self.remove_files(chance.of(&self.all_files())),
            Step::Load(load) => self.load(load, chance),
            Step::Caches => self.ask("drop caches", "dropcaches").map(drop),
            Step::Reboot => self.reboot(),
        }
    }

    /// Checks all that is there, and leaves the disk.
    ///
    /// # Errors
    /// Those of [`Work::step`].
    pub fn finish(&mut self) -> Result<(), String> {
        for load in [Load::Access, Load::Churn, Load::DiskChurn] {
            self.stop(load)?;
        }
        NAMES.into_iter().try_for_each(|name| self.check(name))?;
        self.all_files().into_iter().try_for_each(|name| self.check_files(name))?;
        if self.has_disk {
            // Once more, from the disk.
            self.ask("drop caches", "dropcaches")?;
            self.check_files(FILES_ON_DISK)?;
            self.remove_files(FILES_ON_DISK)?;
            self.ask("umount", "umount /mnt")?;
        }
        Ok(())
    }

    fn all_files(&self) -> Vec<&'static str> {
        FILES.into_iter().chain(self.has_disk.then_some(FILES_ON_DISK)).collect()
    }

    fn filled_mib(&self) -> u64 {
        let in_memory = self.files.iter().filter(|(name, _)| **name != FILES_ON_DISK);
        self.held.values().sum::<u64>() + in_memory.map(|(_, mib)| mib).sum::<u64>()
    }

    fn is_full(&self, more_mib: u64) -> bool {
        self.filled_mib() + more_mib > self.memory_mib * FILL_PERCENT / 100
    }

    fn fill(&mut self, name: &'static str, mib: u64) -> Result<(), String> {
        if self.is_full(mib) {
            return self.free(name);
        }
        // What had this name is gone, whether there is room for more or not.
        self.held.remove(name);
        if self.ask("fill", &format!("fill {name} {mib}M"))?.is_some() {
            self.held.insert(name, mib);
        }
        Ok(())
    }

    fn check(&mut self, name: &'static str) -> Result<(), String> {
        let Some(mib) = self.held.get(name).copied() else { return Ok(()) };
        let answer = self.ask("check", &format!("check {name}"))?;
        self.checked(name, answer, mib)
    }

    fn refill(&mut self, name: &'static str) -> Result<(), String> {
        if self.held.contains_key(name) {
            self.check(name)?;
            self.ask("refill", &format!("refill {name}"))?;
        }
        Ok(())
    }

    fn free(&mut self, name: &'static str) -> Result<(), String> {
        if self.held.contains_key(name) {
            self.check(name)?;
            self.ask("free", &format!("free {name}"))?;
            self.held.remove(name);
        }
        Ok(())
    }

    fn write_files(&mut self, name: &'static str, mib: u64) -> Result<(), String> {
        let (name, mib, place) = match self.has_disk {
            true => (FILES_ON_DISK, mib * 2, " /mnt"),
            false => (name, mib, ""),
        };
        if place.is_empty() && self.is_full(mib) {
            return self.remove_files(name);
        }
        self.files.remove(name);
        if self.ask("write files", &format!("files {name} {mib}M{place}"))?.is_some() {
            self.files.insert(name, mib);
        }
        Ok(())
    }

    fn check_files(&mut self, name: &'static str) -> Result<(), String> {
        let Some(mib) = self.files.get(name).copied() else { return Ok(()) };
        let answer = self.ask("check files", &format!("checkfiles {name}"))?;
        self.checked(name, answer, mib)
    }

    fn remove_files(&mut self, name: &'static str) -> Result<(), String> {
        if self.files.contains_key(name) {
            self.check_files(name)?;
            self.ask("remove files", &format!("rmfiles {name}"))?;
            self.files.remove(name);
        }
        Ok(())
    }

    /// Starts a load, or looks at the one that runs, or ends it.
    fn load(&mut self, load: Load, chance: &mut Chance) -> Result<(), String> {
        if load == Load::DiskChurn && !self.has_disk {
            return Ok(());
        }
        if !self.loads.contains(&load) {
            let share_mib = (self.memory_mib * LOAD_PERCENT / 100).max(8);
            let pages = WATCHED_MIB * MIB / 4096;
            let request = match load {
                Load::Churn => format!("churn load 86400 {share_mib}M"),
                Load::DiskChurn => format!("diskchurn disk /mnt {ON_DISK_MIB}M"),
                Load::Access => format!("access {WATCHED} {WATCHED_MIB}M hot 0 {pages}"),
            };
            if self.ask("begin a load", &request)?.is_some() {
                self.loads.insert(load);
            }
            return Ok(());
        }
        match load {
            Load::Access => self.look_at_times()?,
            Load::Churn => self.ask("wait for a load", "churnon load 1").map(drop)?,
            Load::DiskChurn => self.ask("wait for a load", "churnon disk 1").map(drop)?,
        }
        if chance.once_in(3) { self.stop(load) } else { Ok(()) }
    }

    fn look_at_times(&mut self) -> Result<(), String> {
        let answer = self.ask("look at times", &format!("accesstimes {WATCHED}"))?;
        let longest = answer.as_deref().and_then(|text| text.split(' ').nth(2)?.parse().ok());
        let longest_ms = longest.unwrap_or(0_u64) / 1000;
        self.shared.tally(|tally| tally.longest_stall_ms = tally.longest_stall_ms.max(longest_ms));
        Ok(())
    }

    fn stop(&mut self, load: Load) -> Result<(), String> {
        if !self.loads.contains(&load) {
            return Ok(());
        }
        if load == Load::Access {
            self.look_at_times()?;
        }
        let request = match load {
            Load::Churn => "churnstop load".to_owned(),
            Load::DiskChurn => "churnstop disk".to_owned(),
            Load::Access => format!("accessstop {WATCHED}"),
        };
        self.loads.remove(&load);
        let Some(answer) = self.ask("end a load", &request)? else { return Ok(()) };
        let (count, wrong) = answer.split_once(' ').unwrap_or((&answer, ""));
        if load == Load::Access {
            return self.checked(WATCHED, Some(wrong.to_owned()), WATCHED_MIB);
        }
        let rounds: u64 = count.parse().map_err(|_| format!("{request}: {answer}"))?;
        self.shared.tally(|tally| tally.checked_rounds += rounds);
        self.checked(&request, Some(wrong.to_owned()), 0)
    }

    /// Reboots the guest, which loses all memory and keeps its disk.
    fn reboot(&mut self) -> Result<(), String> {
        for load in [Load::Access, Load::Churn, Load::DiskChurn] {
            self.stop(load)?;
        }
        NAMES.into_iter().try_for_each(|name| self.check(name))?;
        if self.has_disk {
            self.remove_files(FILES_ON_DISK)?;
            self.ask("umount", "umount /mnt")?;
        }
        self.held.clear();
        self.files.clear();
        self.shared.worked("reboot");
        let booted = self.place.served(|| self.vm.try_reboot());
        booted.map_err(|why| format!("{}: reboot: {}", self.vm.name(), why.0))?;
        self.mount()
    }

    /// Takes an answer of a check: `0`, or `17 first at ...`.
    fn checked(&self, what: &str, answer: Option<String>, mib: u64) -> Result<(), String> {
        let answer = answer.ok_or_else(|| format!("{}: {what} is gone", self.vm.name()))?;
        let first = answer.split(' ').next().unwrap_or_default();
        let wrong: u64 =
            first.parse().map_err(|_| format!("{}: {what}: {answer}", self.vm.name()))?;
        self.shared.tally(|tally| {
            tally.checked_bytes += mib * MIB;
            tally.wrong_bytes += wrong;
        });
        match wrong {
            0 => Ok(()),
            _ => Err(format!("{}: wrong bytes in {what}: {answer}", self.vm.name())),
        }
    }

    /// Asks the guest. Returns nothing if it has no room for that.
    fn ask(&self, what: &str, request: &str) -> Result<Option<String>, String> {
        let fail = |why: String| format!("{}: {request}: {why}", self.vm.name());
        let answer = self.vm.ask(request).map_err(|why| fail(why.0))?;
        self.shared.worked(what);
        match answer {
            Ok(text) => Ok(Some(text)),
            Err(why) if is_for_room(&why.0) => {
                self.shared.tally(|tally| tally.without_room += 1);
                Ok(None)
            }
            Err(why) => Err(fail(why.0)),
        }
    }
}

/// Whether a guest could not do something for want of memory, or of room on its disk.
fn is_for_room(why: &str) -> bool {
    [" available", "No space left", "Cannot allocate memory"].iter().any(|text| why.contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_want_of_room_is_no_failure() {
        assert!(is_for_room("64 MiB asked for, 40 MiB available"));
        assert!(is_for_room("/mnt/a: No space left on device (os error 28)"));
        assert!(!is_for_room("/mnt/a: Input/output error (os error 5)"));
    }
}
