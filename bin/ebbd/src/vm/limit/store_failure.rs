//! A store failure: in words, and when to try again.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_reclaim::limit::is_no_room;
use ebb_reclaim::limit::marks::Left;
use ebb_store::{NoRoom, StoreError};

use crate::model::swap_rule::WhenFull;
use crate::vm::context::VmContext;

/// Pause after the first failure. Each further failure doubles it.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest pause: a store that works again may go unnoticed for this long.
const PAUSE_MAX: Duration = Duration::from_secs(8);

/// What is in the way of eviction.
pub struct StoreFailure {
    why: String,
    no_room: bool,
    pause: Duration,
    since: Instant,
}

impl StoreFailure {
    /// Makes a failure that happens now. `before` is the failure before it, if there was one.
    pub fn new(why: String, before: Option<StoreFailure>) -> StoreFailure {
        let pause =
            before.map_or(PAUSE_MIN, |before| (before.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX));
        StoreFailure { why, no_room: false, pause, since: Instant::now() }
    }

    /// Makes a failure for lack of room. Its guest may wait for room, so the next try comes soon.
    pub fn no_room(why: String) -> StoreFailure {
        StoreFailure { why, no_room: true, pause: PAUSE_MIN, since: Instant::now() }
    }

    /// Whether only room is missing.
    pub fn is_no_room(&self) -> bool {
        self.no_room
    }

    /// Returns what failed, and what to do about it.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Whether it is too early to try again.
    pub fn is_paused(&self) -> bool {
        self.since.elapsed() < self.pause
    }
}

/// Returns the failure after a step without an error of its own. `before`: the failure before the
/// step. `why`: what there is no room for, if the step looks for frames that need none. `waits`:
/// first touches wait for room. `over`: more memory is taken than they may bring. While `over`,
/// they go on waiting, even if a step found frames that need no room.
pub fn after_step(
    before: Option<StoreFailure>,
    left: Left,
    why: Option<&String>,
    waits: bool,
    over: impl FnOnce() -> bool,
) -> Option<StoreFailure> {
    let before = before.filter(StoreFailure::is_no_room);
    match left {
        Left::MoreWithoutRoom => before.or_else(|| {
            let why = why.cloned().unwrap_or_default();
            Some(StoreFailure { pause: Duration::ZERO, ..StoreFailure::no_room(why) })
        }),
        Left::More => before.filter(|_| waits && over()),
        Left::Nothing => before.filter(|_| over()),
    }
}

/// Where a VM's store is, and which command ends the need for it.
pub struct Place<'a> {
    /// The VM's swap file.
    pub swap: &'a Path,
    /// The VM's directory in the run directory.
    pub run: &'a Path,
    /// The command that lifts the VM's limit, if it has one.
    pub lift: Option<String>,
}

impl Place<'_> {
    /// Returns what is full, and what helps. A VM's swap file stays where it is, so another
    /// directory only helps later VMs.
    fn full(&self, what: &str, first: &str) -> String {
        let swap = self.swap.display();
        let lift = self.lift.as_ref().map(|line| format!(", or lift the limit: {line}"));
        let lift = lift.unwrap_or_default();
        format!(
            "{swap}: {what}: {first}{lift}, or start ebbd with another --swap-dir for VMs to come"
        )
    }
}

/// Returns what is wrong with a store, and what to do about it, in one line.
pub fn explain(what: Attempt, error: &io::Error, place: &Place<'_>) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<StoreError>());
    let (swap, run) = (place.swap.display(), place.run.display());
    let failure = match inner {
        None => return error.to_string(),
        Some(StoreError::Medium(error)) => match error.kind() {
            io::ErrorKind::StorageFull => {
                place.full("no space left", "make room on its file system")
            }
            io::ErrorKind::QuotaExceeded => place
                .full("the quota of its file system is reached", "make room there, or raise it"),
            io::ErrorKind::WriteZero | io::ErrorKind::FileTooLarge => {
                format!("{swap}: takes no more ({error}): look for a limit or a fault of its disk")
            }
            _ => format!("{swap}: {error}: look for its disk in the host's kernel log (dmesg)"),
        },
        Some(StoreError::NoRoom(NoRoom::Floor)) => place.full(
            "no space left but what ebbd's --swap-keep-free keeps",
            "make room on its file system, or keep less",
        ),
        Some(StoreError::NoRoom(NoRoom::All)) => place.full(
            "all swap files take what ebbd's --swap-max allows",
            "start ebbd with a higher one",
        ),
        Some(StoreError::NoRoom(NoRoom::Each)) => {
            place.full("takes what ebbd's --swap-max-each allows", "start ebbd with a higher one")
        }
        Some(StoreError::Full) => {
            format!("{swap}: all its slots are in use: raise the limit")
        }
        Some(StoreError::RunDirectory(error)) => {
            let lift = place.lift.as_ref().map(|line| format!(", or lift the limit: {line}"));
            format!(
                "{run}: {error}: the run directory needs room for a record of each page saved: make \
                 room there{}",
                lift.unwrap_or_default()
            )
        }
        Some(error) => format!("{swap}: {error}"),
    };
    failure + &format!("; {}", what.consequence())
}

/// Returns why nothing was saved. The text is the same in all turns that try again.
pub fn explain_saving(cx: &VmContext, error: &io::Error) -> String {
    let when_full = cx.record.settings.when_swap_is_full;
    explain_to(cx, Attempt::to_save(error, cx.marks().is_some(), when_full), error)
}

/// Returns why evicting or refilling failed, and what to do.
pub fn explain_to(cx: &VmContext, what: Attempt, error: &io::Error) -> String {
    let record = &cx.record;
    let lift = match (record.share, record.limit_bytes) {
        (Some(_), _) => Some(format!("ebb share {} off", record.name)),
        (None, Some(_)) => Some(format!("ebb limit {} off", record.name)),
        (None, None) => None,
    };
    explain(what, error, &Place { swap: &record.swap, run: record.directory(), lift })
}

/// What was tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attempt {
    /// To save content that is evicted.
    Save,
    /// To save content that is evicted, while the guest waits for room.
    SaveOrWait,
    /// To bring evicted content back.
    Load,
}

impl Attempt {
    /// Returns the attempt for a save that failed with `error`. The guest waits only if room is
    /// missing and a limit is kept.
    pub fn to_save(error: &io::Error, is_limited: bool, when_full: WhenFull) -> Attempt {
        match is_limited && when_full == WhenFull::Wait && is_no_room(error) {
            true => Attempt::SaveOrWait,
            false => Attempt::Save,
        }
    }

    fn consequence(self) -> &'static str {
        match self {
            Attempt::Save => "what cannot be saved stays in memory",
            Attempt::SaveOrWait => "the guest waits where it needs more memory",
            Attempt::Load => "the guest waits for what cannot be read",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    fn place(lift: &str) -> Place<'_> {
        let (swap, run) = (Path::new("/swap/a"), Path::new("/run/a"));
        Place { swap, run, lift: Some(lift.into()) }
    }

    #[test]
    fn each_failure_is_named_with_a_remedy_in_one_line() {
        let medium = |errno: Errno| StoreError::Medium(errno.into());
        for (error, expected) in [
            (medium(Errno::NOSPC), "/swap/a: no space left: make room on its file system, or"),
            (medium(Errno::DQUOT), "/swap/a: the quota of its file system is reached: make room"),
            (
                StoreError::NoRoom(NoRoom::All),
                "/swap/a: all swap files take what ebbd's --swap-max ",
            ),
            (StoreError::NoRoom(NoRoom::Each), "/swap/a: takes what ebbd's --swap-max-each allows"),
            (StoreError::NoRoom(NoRoom::Floor), "/swap/a: no space left but what ebbd's --swap-k"),
            (medium(Errno::IO), "/swap/a: Input/output error (os error 5): look for its disk"),
            (StoreError::Medium(io::ErrorKind::WriteZero.into()), "/swap/a: takes no more ("),
            (StoreError::Full, "/swap/a: all its slots are in use: raise the limit; what"),
            (StoreError::RunDirectory(Errno::NOSPC.into()), "/run/a: No space left on device"),
        ] {
            // Slots are not bytes.
            let has_slots = !matches!(error, StoreError::Full);
            let error = error.into();
            let line = explain(Attempt::Save, &error, &place("ebb limit a off"));
            assert!(line.starts_with(expected) && !line.contains('\n'), "{line}");
            assert!(line.ends_with("stays in memory"), "{line}");
            // Each message about a full store names every way out.
            let full = is_no_room(&error) && has_slots;
            let remedies =
                ["or lift the limit: ebb limit a off, or", "ebbd with another --swap-dir "];
            assert_eq!(remedies.iter().all(|remedy| line.contains(remedy)), full, "{line}");
            let without = explain(Attempt::Save, &error, &Place { lift: None, ..place("") });
            assert!(!without.contains("lift"), "{without}");
        }
        let damaged = io::Error::from(StoreError::Damaged { slot: 7 });
        let line = explain(Attempt::Load, &damaged, &place(""));
        assert!(line.starts_with("/swap/a: slot 7 of the store is damaged; the guest waits"));
        let other = io::Error::from(Errno::NOMEM);
        let line = explain(Attempt::Save, &other, &place(""));
        assert_eq!(line, other.to_string());
    }

    /// Returns whether there is a failure for lack of room after each of these steps.
    fn waits_after(steps: &[Option<Left>], waits: bool, over: bool) -> Vec<bool> {
        let why = String::from("full");
        let mut failure = None;
        let step = |left: &Option<Left>| {
            failure = match *left {
                None => Some(StoreFailure::no_room(why.clone())),
                Some(left) => after_step(failure.take(), left, Some(&why), waits, || over),
            };
            failure.as_ref().is_some_and(|failure| failure.is_no_room() && failure.why() == why)
        };
        steps.iter().map(step).collect()
    }

    #[test]
    fn a_guest_waits_while_what_needs_no_room_is_looked_for() {
        use Left::{More, MoreWithoutRoom, Nothing};
        // The first step after the pause found frames that need no room, and the next one did not.
        let steps = [None, Some(More), Some(MoreWithoutRoom), Some(More), Some(Nothing)];
        assert_eq!(waits_after(&steps, true, true), [true; 5]);
        // Nobody waits, so the failure does not outlast a step that evicts again.
        assert_eq!(waits_after(&steps, false, true), [true, false, true, false, false]);
        assert_eq!(waits_after(&steps, true, false), [true, false, true, false, false]);
        // The same in the first search.
        assert_eq!(waits_after(&[Some(More), Some(MoreWithoutRoom)], true, true), [false, true]);
        let found = after_step(None, MoreWithoutRoom, None, true, || true);
        let found = found.inspect(|found| assert!(!found.is_paused(), "it goes on at once"));
        assert!(StoreFailure::new("broken".into(), found).is_paused(), "but not what is worse");
        let broken = || Some(StoreFailure::new("broken".into(), None));
        assert!(after_step(broken(), More, None, true, || true).is_none());
        assert!(after_step(broken(), Nothing, None, true, || true).is_none());
    }

    #[test]
    fn a_guest_waits_for_room_under_a_limit_alone() {
        use WhenFull::{GiveWay, Wait};
        let message = |error: StoreError, is_limited, when_full| {
            let error = error.into();
            let attempt = Attempt::to_save(&error, is_limited, when_full);
            explain(attempt, &error, &place(""))
        };
        let all = || StoreError::NoRoom(NoRoom::All);
        let waits = "; the guest waits where it needs more memory";
        assert!(message(all(), true, Wait).ends_with(waits));
        let broken = || StoreError::Medium(Errno::IO.into());
        for (error, is_limited, when_full) in
            [(all(), false, Wait), (all(), true, GiveWay), (broken(), true, Wait)]
        {
            let line = message(error, is_limited, when_full);
            assert!(line.ends_with("; what cannot be saved stays in memory"), "{line}");
        }
    }

    #[test]
    fn pauses_grow_up_to_an_end() {
        let (mut failure, mut pauses) = (StoreFailure::new(String::new(), None), Vec::new());
        for _ in 0..6 {
            pauses.push(failure.pause.as_secs());
            failure = StoreFailure::new(String::new(), Some(failure));
        }
        assert_eq!(pauses, [1, 2, 4, 8, 8, 8]);
        assert!(failure.is_paused());
    }
}
