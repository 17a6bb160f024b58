//! What is known of a guest from its memory, and whether Ebb may act on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_inspect::{Guest, Untrusted, find_notes};
use ebb_pager::Pager;
use ebb_units::{FrameRange, Gfn};
use ebb_vm::Qmp;
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};

use super::kernel::{Kernel, all_run};
use super::registration::{self, Known};
use super::searches::Searches;
use crate::model::record::MetadataBy;
use crate::support::frame_set::FrameSet;

/// A guest whose kernel is unknown after this time may not be booting at all.
const BOOT: Duration = Duration::from_secs(60);
/// Why a guest is not trusted within [`BOOT`].
const BOOTS: &str = "it is still booting; Ebb looks again by itself";
/// Why nothing but the free memory of a guest is known that has registered its page metadata.
const REGISTERED: &str =
    "its kernel has registered its page metadata, and nothing else of it is known";
/// Why a registration does not count after the control socket was lost.
const UNHEARD: &str = "QEMU's control socket was lost, and a reset may have been missed";
/// Why a guest without a registration is not trusted, where its note may not be read.
const NO_RECORD: &str =
    "no registration is in its memory, and ebbd runs with --metadata-by registration";

/// The guest, as far as it is known. `vm::trust` keeps it up to date.
pub struct KnownGuest {
    kernel: Result<Kernel, String>,
    /// How the kernel's metadata may become known.
    by: MetadataBy,
    /// Whether the guest's memory and QEMU gave an answer. `false`: nobody answered.
    is_answered: bool,
    /// When the guest was last known to run.
    confirmed: Instant,
    /// The guest may be booting until this time.
    boots_until: Instant,
    searches: Searches,
    /// The registration whose proof was seen since the kernel was last lost.
    proven: Option<u64>,
    /// Until when a kernel on record is given time to prove its registration again.
    proves_until: Instant,
    /// The kernel that the pager and the passes go by.
    witness: Option<Kernel>,
    /// The frames that each look at the witness reads.
    needed: FrameSet,
}

impl KnownGuest {
    /// Makes the guest of a VMM that started `start_ticks` clock ticks after the host. Nothing is
    /// known of it yet.
    pub fn new(start_ticks: u64, by: MetadataBy) -> KnownGuest {
        KnownGuest {
            kernel: Err("it was not inspected yet".into()),
            by,
            is_answered: false,
            confirmed: Instant::now(),
            boots_until: Instant::now() + BOOT.saturating_sub(age(start_ticks)),
            searches: Searches::new(),
            proven: None,
            proves_until: Instant::now() + BOOT,
            witness: None,
            needed: FrameSet::default(),
        }
    }

    /// Returns the trusted guest as the pager asks it, if it was inspected.
    pub fn witness(&self) -> Option<&Arc<Guest>> {
        match self.witness.as_ref()? {
            Kernel::Inspected(guest) => Some(guest),
            Kernel::Registered(_) => None,
        }
    }

    /// Returns the kernel that passes go by.
    pub fn trusted_kernel(&self) -> Option<&Kernel> {
        self.witness.as_ref()
    }

    /// Makes the kernel as it is known now the witness. Returns whether the witness changed.
    pub fn renew_witness(&mut self) -> bool {
        let kernel = self.kernel.as_ref().ok();
        if kernel == self.witness.as_ref() {
            return false;
        }
        self.witness = kernel.cloned();
        true
    }

    /// Brings back the frames that each look at the witness reads, and notes them for
    /// [`KnownGuest::needs`]: evicted, they would be read from a disk again and again.
    pub fn bring_back_needed(&mut self, pager: &Pager) {
        let needed = self.witness.as_ref().map(|kernel| kernel.needed_frames(&pager.view()));
        self.needed = FrameSet::new(needed.unwrap_or_default());
        bring_back(pager, self.needed.runs());
    }

    /// Whether a look at the guest reads the frame. Such frames stay resident.
    pub fn needs(&self, gfn: Gfn) -> bool {
        self.needed.contains(gfn)
    }

    /// Whether the trusted guest says that it shares its allocator.
    pub fn shares_allocator(&self) -> bool {
        self.guest().is_ok_and(|guest| !guest.llfree().is_empty())
    }

    /// Returns the guest if it was inspected and is trusted, else why not.
    pub fn guest(&self) -> Result<&Guest, &str> {
        match self.kernel()? {
            Kernel::Inspected(guest) => Ok(guest),
            Kernel::Registered(_) => Err(REGISTERED),
        }
    }

    /// Returns the kernel of a trusted guest, else why the guest is not trusted.
    pub fn kernel(&self) -> Result<&Kernel, &str> {
        self.kernel.as_ref().map_err(String::as_str)
    }

    /// Whether what is known is an answer. A silent QEMU says nothing of a guest, and neither does
    /// a search that was put off, or a kernel that is yet to prove its registration again.
    pub fn is_answered(&self) -> bool {
        self.is_answered
    }

    /// Returns when a trusted guest was last known to run.
    pub fn confirmed(&self) -> Instant {
        self.confirmed
    }

    /// Drops what was known of the guest, because it was reset.
    pub fn forget(&mut self, why: &str) {
        (self.kernel, self.confirmed) = (Err(why.into()), Instant::now());
        self.boots_until = self.confirmed + BOOT;
        self.is_answered = false;
        self.searches.begin_anew();
    }

    /// Has a registration proved again before it counts: its kernel was lost.
    pub fn forget_proof(&mut self) {
        self.proven = None;
    }

    /// Handles a control socket that was connected anew: a reset may have been missed meanwhile.
    /// What a registration says is not believed until its kernel has proved it again.
    pub fn doubt(&mut self) {
        self.proven = None;
        self.proves_until = Instant::now() + BOOT;
        if let Ok(Kernel::Registered(_)) = self.kernel {
            self.kernel = Err(UNHEARD.into());
            self.is_answered = false;
        }
    }

    /// Whether it is time to inspect an untrusted guest again, or the kernel has said that it is to
    /// be believed no more.
    pub fn is_due(&self, pager: &Pager) -> bool {
        match &self.kernel {
            Ok(kernel) => kernel.is_withdrawn(&pager.view()),
            Err(_) => self.searches.are_due(Instant::now()),
        }
    }

    /// Makes sure that what is known is true of the kernel that runs now: the note or the record is
    /// in place, and the vCPUs' page tables are this kernel's. Else inspects anew. Returns whether
    /// there is a trusted guest. `moves`: memory is plugged and unplugged, which changes where its
    /// metadata lies. `on_record`: the digest of the kernel on record.
    pub fn confirm(
        &mut self,
        pager: &Pager,
        mut qmp: Option<&mut Qmp>,
        moves: bool,
        on_record: Option<u64>,
    ) -> bool {
        let (view, asked) = (pager.view(), Instant::now());
        let known = self.kernel.as_mut().is_ok_and(|kernel| {
            kernel.is_in_place(&view)
                && kernel.is_running(&view, qmp.as_deref_mut()) == Ok(true)
                && (!moves || kernel.refresh(&view).is_ok())
        });
        if !known {
            let may_wait = Instant::now() < self.proves_until;
            let (by, known) = (self.by, Known { proven: self.proven, on_record, may_wait });
            let search = || search(pager, qmp, by, known);
            let found = self.searches.search(Instant::now, search);
            self.is_answered = found.is_ok();
            let boots = Instant::now() < self.boots_until;
            self.kernel = found.and_then(|found| found.map_err(|why| why.in_words(boots)));
            if let Ok(kernel @ Kernel::Registered(_)) = &self.kernel {
                self.proven = Some(kernel.digest());
            }
        }
        self.confirmed = asked;
        self.kernel.is_ok()
    }
}

/// Why a search found no kernel to trust.
enum Unknown {
    /// No note leads to a kernel that passes the gate.
    Note(Untrusted),
    /// No registration counts.
    Registration(String),
}

impl Unknown {
    /// Returns why the guest is not trusted, in words that follow "the guest is not trusted".
    fn in_words(self, boots: bool) -> String {
        match self {
            Unknown::Note(why) => why_not(&why, boots),
            Unknown::Registration(why) => why,
        }
    }
}

/// Looks for the kernel that runs: by its note, and else by its registration.
///
/// # Errors
/// QEMU does not tell what its vCPUs run, or the kernel on record has not proved its registration
/// again yet.
fn search(
    pager: &Pager,
    mut qmp: Option<&mut Qmp>,
    by: MetadataBy,
    known: Known,
) -> Result<Result<Kernel, Unknown>, String> {
    let mut unknown = Unknown::Registration(NO_RECORD.into());
    if by != MetadataBy::Registration {
        match inspect(pager, qmp.as_deref_mut())? {
            Ok(guest) => return Ok(Ok(Kernel::Inspected(Arc::new(guest)))),
            Err(why) => unknown = Unknown::Note(why),
        }
    }
    if by != MetadataBy::Note {
        match registration::find(pager, qmp, known)? {
            Some(Ok(registered)) => return Ok(Ok(Kernel::Registered(Arc::new(registered)))),
            Some(Err(why)) => unknown = Unknown::Registration(why),
            None => {}
        }
    }
    Ok(Err(unknown))
}

/// Returns how long a process has run that started `start_ticks` clock ticks after the host.
fn age(start_ticks: u64) -> Duration {
    let now_s = u64::try_from(clock_gettime(ClockId::Boottime).tv_sec).unwrap_or(0);
    Duration::from_secs(now_s.saturating_sub(start_ticks / clock_ticks_per_second().max(1)))
}

/// Returns why a guest is not trusted, in words that follow "the guest is not trusted".
fn why_not(why: &Untrusted, boots: bool) -> String {
    match boots && why.may_pass() {
        true => BOOTS.into(),
        false => why.to_string(),
    }
}

/// Looks at every note in memory: the note of an earlier kernel may lie beside that of the kernel
/// that runs.
///
/// # Errors
/// QEMU does not tell what its vCPUs run.
fn inspect(pager: &Pager, mut qmp: Option<&mut Qmp>) -> Result<Result<Guest, Untrusted>, String> {
    let view = pager.view();
    let mut reason = Untrusted::NoNote;
    for note in find_notes(&view) {
        let passed = match Guest::from_note(&view, note) {
            Ok(guest)
                if all_run(
                    &|vcpu| guest.runs_on(&view, &[vcpu.root]),
                    &|| guest.image_agrees(&view),
                    qmp.as_deref_mut(),
                )? =>
            {
                // These frames may have been evicted before anybody knew what is in them.
                bring_back(pager, &guest.needed_frames(&view));
                guest.gate(&view).map(|()| guest)
            }
            Ok(_) => Err(Untrusted::NotRunning),
            Err(why) => Err(why),
        };
        match passed {
            Ok(guest) => return Ok(Ok(guest)),
            Err(why) => reason = reason.or(why),
        }
    }
    Ok(Err(reason))
}

/// Makes these frames resident, as far as that is possible.
fn bring_back(pager: &Pager, frames: &[FrameRange]) {
    let frames = frames.iter().flat_map(|frames| frames.frames());
    for gfn in frames.filter(|&gfn| pager.ledger().content(gfn).is_evicted()) {
        let frame = FrameRange::new(gfn, 1);
        match pager.devices().pin(frame, false) {
            Ok(()) => pager.devices().unpin(frame),
            Err(error) => tracing::debug!("{gfn:?}: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_boots_is_reported_as_such() {
        assert_eq!(why_not(&Untrusted::NoNote, true), BOOTS);
        assert!(why_not(&Untrusted::NoNote, false).contains("VMCOREINFO"));
        assert!(why_not(&Untrusted::Encrypted, true).contains("encrypted"));
    }

    #[test]
    fn a_process_is_as_old_as_since_its_start() {
        assert!(age(0) > Duration::ZERO);
        assert_eq!(age(u64::MAX), Duration::ZERO);
    }
}
