//! What is known of a guest from its memory, and whether Ebb may act on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_inspect::{Guest, Untrusted, find_notes};
use ebb_pager::{Pager, View};
use ebb_units::{FrameRange, Gfn};
use ebb_vm::Qmp;
use ebb_vm::qmp::QmpError;
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};

use super::searches::Searches;
use crate::support::frame_set::FrameSet;

/// How often QEMU is asked for the vCPUs' page tables before a kernel counts as not running.
const ROOT_TRIES: u32 = 8;
/// A guest whose kernel is unknown after this time may not be booting at all.
const BOOT: Duration = Duration::from_secs(60);
/// Why a guest is not trusted within [`BOOT`].
const BOOTS: &str = "it is still booting; Ebb looks again by itself";
/// The PG bit of CR0.
const PAGING: u64 = 1 << 31;
/// Where a processor stands before it is started.
const RESET_VECTOR: u64 = 0xfff0;

/// The guest, as far as it is known. `vm::trust` keeps it up to date.
pub struct KnownGuest {
    guest: Result<Guest, String>,
    /// Whether the guest's memory and QEMU gave an answer. `false`: nobody answered.
    is_answered: bool,
    /// When the guest was last known to run.
    confirmed: Instant,
    /// The guest may be booting until this time.
    boots_until: Instant,
    searches: Searches,
    /// The guest that the pager asks.
    witness: Option<Arc<Guest>>,
    /// The frames that each look at the witness reads.
    needed: FrameSet,
}

impl KnownGuest {
    /// Makes the guest of a VMM that started `start_ticks` clock ticks after the host. Nothing is
    /// known of it yet.
    pub fn new(start_ticks: u64) -> KnownGuest {
        KnownGuest {
            guest: Err("it was not inspected yet".into()),
            is_answered: false,
            confirmed: Instant::now(),
            boots_until: Instant::now() + BOOT.saturating_sub(age(start_ticks)),
            searches: Searches::new(),
            witness: None,
            needed: FrameSet::default(),
        }
    }

    /// Returns the witness: the trusted guest, as the pager asks it.
    pub fn witness(&self) -> Option<&Arc<Guest>> {
        self.witness.as_ref()
    }

    /// Makes the guest as it is known now the witness. Returns whether the witness changed.
    pub fn renew_witness(&mut self) -> bool {
        let guest = self.guest.as_ref().ok();
        if guest == self.witness.as_deref() {
            return false;
        }
        self.witness = guest.map(|guest| Arc::new(guest.clone()));
        true
    }

    /// Brings back the frames that each look at the witness reads, and notes them for
    /// [`KnownGuest::needs`]: evicted, they would be read from a disk again and again.
    pub fn bring_back_needed(&mut self, pager: &Pager) {
        let needed = self.witness.as_ref().map(|guest| guest.needed_frames(&pager.view()));
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

    /// Returns the guest if it is trusted, else why it is not.
    pub fn guest(&self) -> Result<&Guest, &str> {
        self.guest.as_ref().map_err(String::as_str)
    }

    /// Whether what is known is an answer. A silent QEMU says nothing of a guest, and neither does
    /// a search that was put off.
    pub fn is_answered(&self) -> bool {
        self.is_answered
    }

    /// Returns when a trusted guest was last known to run.
    pub fn confirmed(&self) -> Instant {
        self.confirmed
    }

    /// Drops what was known of the guest, because it was reset.
    pub fn forget(&mut self, why: &str) {
        (self.guest, self.confirmed) = (Err(why.into()), Instant::now());
        self.boots_until = self.confirmed + BOOT;
        self.is_answered = false;
        self.searches.begin_anew();
    }

    /// Whether it is time to inspect an untrusted guest again.
    pub fn is_due(&self) -> bool {
        self.guest.is_err() && self.searches.are_due(Instant::now())
    }

    /// Makes sure that what is known is true of the kernel that runs now: the note is in place, and
    /// the vCPUs' page tables are this kernel's. Else inspects anew. Returns whether there is a
    /// trusted guest. `moves`: memory is plugged and unplugged, which changes where its metadata
    /// lies.
    pub fn confirm(&mut self, pager: &Pager, mut qmp: Option<&mut Qmp>, moves: bool) -> bool {
        let (view, asked) = (pager.view(), Instant::now());
        let known = self.guest.as_mut().is_ok_and(|guest| {
            guest.recheck(&view)
                && is_running(guest, &view, qmp.as_deref_mut()) == Ok(true)
                && (!moves || guest.refresh(&view).is_ok())
        });
        if !known {
            let found = self.searches.search(Instant::now, || inspect(pager, qmp));
            self.is_answered = found.is_ok();
            let boots = Instant::now() < self.boots_until;
            self.guest = found.and_then(|found| found.map_err(|why| why_not(&why, boots)));
        }
        self.confirmed = asked;
        self.guest.is_ok()
    }
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
            Ok(guest) if is_running(&guest, &view, qmp.as_deref_mut())? => {
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

/// Whether the vCPUs run this kernel and nothing else. Between QEMU's answer and our look a process
/// may end and its page tables be freed, so a single "no" is not believed.
pub fn is_running(
    guest: &Guest,
    view: &View<'_>,
    mut qmp: Option<&mut Qmp>,
) -> Result<bool, String> {
    for _ in 0..ROOT_TRIES {
        let vcpus = vcpus(qmp.as_deref_mut())?;
        let runs_it = |vcpu: &Vcpu| guest.runs_on(view, &[vcpu.root]);
        // kexec leaves all vCPUs but one halted in the page tables of the old kernel.
        if vcpus.iter().any(runs_it) && vcpus.iter().all(|vcpu| vcpu.waits || runs_it(vcpu)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The registers of a vCPU that tell which kernel it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Vcpu {
    /// The value of CR3.
    root: u64,
    /// Whether it runs nothing: nobody has started it, or the firmware has halted it, and paging is
    /// off.
    waits: bool,
}

/// Asks QEMU for every vCPU.
fn vcpus(qmp: Option<&mut Qmp>) -> Result<Vec<Vcpu>, String> {
    let qmp =
        qmp.ok_or("QEMU's QMP socket is lost, so Ebb cannot tell whether this kernel runs")?;
    let text = qmp.human("info registers -a").map_err(|error: QmpError| error.to_string())?;
    // Without registers nobody could tell whether the kernel runs.
    parse_vcpus(&text).ok_or_else(|| "QEMU does not tell its vCPUs' registers".into())
}

/// Parses all vCPUs. `None`: there is none, or a register of one is missing.
fn parse_vcpus(registers: &str) -> Option<Vec<Vcpu>> {
    let parts = registers.split("CPU#").skip(1);
    let vcpus: Vec<Vcpu> = parts.map(parse_vcpu).collect::<Option<_>>()?;
    (!vcpus.is_empty()).then_some(vcpus)
}

fn parse_vcpu(registers: &str) -> Option<Vcpu> {
    let field = |names: &[&str]| {
        let mut words = registers.split_ascii_whitespace();
        let hex = words.find_map(|word| names.iter().find_map(|name| word.strip_prefix(name)))?;
        u64::from_str_radix(hex, 16).ok()
    };
    let is_paging = field(&["CR0="])? & PAGING != 0;
    let is_halted = field(&["HLT="])? != 0 || field(&["RIP=", "EIP="])? == RESET_VECTOR;
    Some(Vcpu { root: field(&["CR3="])?, waits: !is_paging && is_halted })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: &str = "RAX=0 RIP=ffffffff9e1a10b RFL=2 [-------] CPL=0 II=0 A20=1 SMM=0 HLT=1\n\
        CR0=80050033 CR2=0 CR3=0000000005c0a000 CR4=06f0\n";
    const UNSTARTED: &str = "EAX=0 EIP=0000fff0 EFL=2 [-------] CPL=0 II=0 A20=1 SMM=0 HLT=0\n\
        CR0=60000010 CR2=0 CR3=00000000 CR4=0\n";

    #[test]
    fn every_processor_is_parsed() {
        let text = format!("\nCPU#0\n{RUNNING}\nCPU#1\n{UNSTARTED}");
        let expected = [Vcpu { root: 0x5c0_a000, waits: false }, Vcpu { root: 0, waits: true }];
        assert_eq!(parse_vcpus(&text).unwrap(), expected);
    }

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

    #[test]
    fn who_runs_without_paging_does_not_wait() {
        let parsed = |text: &str| parse_vcpus(&format!("CPU#0\n{text}"));
        let runs = UNSTARTED.replace("fff0", "7c00");
        assert!(!parsed(&runs).unwrap()[0].waits);
        assert!(parsed(&runs.replace("HLT=0", "HLT=1")).unwrap()[0].waits);
        assert_eq!(parsed(&RUNNING.replace("CR3=", "CR9=")), None);
        assert_eq!(parsed(&RUNNING.replace("CR3=0", "CR3=zz")), None);
        assert_eq!(parse_vcpus("no"), None);
    }
}
