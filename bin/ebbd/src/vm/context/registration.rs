//! Finding a registration of the guest's kernel (V-Probe), and who has made it.
//!
//! Any process of the guest can write a page that looks like a record. So a record counts only if
//! the guest's kernel proves that it has written it: until it is acknowledged, a vCPU has a
//! hardware breakpoint at the record's own address in the kernel's half of memory, where no process
//! may have one (decision 49).

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_inspect::{
    GuestMemory, NotRegistered, PageTables, Registered, answer_record, find_records,
    registration_digest,
};
use ebb_pager::{Pager, View};
use ebb_units::Gpa;
use ebb_vm::Qmp;
use ebb_vprobe::{ACKNOWLEDGEMENT_AT, Answer, TOKEN_AT, VIRTUAL_ADDRESS_AT};

use super::kernel::all_run;
use super::vcpus::{Vcpu, vcpus};

/// Why a record without proof is not believed yet.
const UNPROVEN: &str = "a registration is in its memory, and no hardware breakpoint of its kernel's proves yet \
     that the kernel has made it; Ebb looks again by itself";
/// Why no proof counts while a vCPU may run guests.
const NESTS: &str = "a registration is in its memory, but a guest of this guest could fake its proof: \
     unload kvm_intel or kvm_amd in the guest, or start QEMU with -cpu ...,vmx=off,svm=off";
/// Why the record of the registration on record does not count yet. A guest may have been reset
/// while no process heard it, and have left the record in memory.
const AGAIN: &str = "its kernel has not proved its registration again since Ebb's process began or \
     QEMU's control socket was lost; Ebb looks again by itself";
/// Why a record is not believed that no page tables lead to.
const NOT_RUNNING: &str =
    "a registration is in its memory, and its vCPUs do not all run the kernel that has made it";
/// Why a record is not believed that is no longer what was read.
const CHANGED: &str = "its registration has changed while it was read; Ebb looks again by itself";

/// The digests of the registrations that are known already.
#[derive(Clone, Copy, Default, Debug)]
pub struct Known {
    /// The one that this process has seen the proof of. It counts without another one.
    pub proven: Option<u64>,
    /// The one on record. Its kernel is asked to prove it again.
    pub on_record: Option<u64>,
    /// Whether that kernel has time left for it.
    pub may_wait: bool,
}

/// Why a record does not count.
#[derive(Debug)]
enum Doubt {
    /// That is all there is to say.
    Final(String),
    /// It is the one on record, and its kernel runs. It is to prove the registration again.
    Awaited(String),
}

impl From<&str> for Doubt {
    fn from(why: &str) -> Doubt {
        Doubt::Final(why.into())
    }
}

/// Looks for a registration in the guest's memory, and answers the kernel that has made it. `None`:
/// there is no record. An `Err` in the result is why no record counts.
///
/// # Errors
/// QEMU does not tell what its vCPUs run, or the kernel on record has not proved its registration
/// again yet, and has time left.
pub fn find(
    pager: &Pager,
    mut qmp: Option<&mut Qmp>,
    known: Known,
) -> Result<Option<Result<Registered, String>>, String> {
    let view = pager.view();
    let at_first = vcpus(qmp.as_deref_mut())?;
    let comes_first = |at: Gpa, words: &[AtomicU64]| {
        let page = Page::new(at, |byte| words[(byte / 8) as usize].load(Relaxed));
        page.is(known.on_record)
            || page.is(known.proven)
            || at_first.iter().any(|vcpu| page.is_armed(vcpu))
            || (page.is_acknowledged() && page.is_mapped(&view, &at_first))
    };
    let (mut reason, mut awaited) = (None, None);
    for at in find_records(&view, &comes_first) {
        match judge(&view, at, qmp.as_deref_mut(), known)? {
            Ok(registered) => return Ok(Some(Ok(registered))),
            // The first ones are those that the kernel may have made.
            Err(Doubt::Final(why)) => drop(reason.get_or_insert(why)),
            Err(Doubt::Awaited(why)) => awaited = Some(why),
        }
    }
    match awaited {
        Some(why) if known.may_wait => Err(why),
        awaited => Ok(awaited.or(reason).map(Err)),
    }
}

/// Whether the record at `at` counts. If so, its kernel is told, and otherwise why not.
///
/// The search before may have taken seconds, and the guest goes on meanwhile. So QEMU is asked
/// before and after the record is read, and the proof must be there both times.
///
/// # Errors
/// QEMU does not tell what its vCPUs run.
fn judge(
    view: &View<'_>,
    at: Gpa,
    mut qmp: Option<&mut Qmp>,
    known: Known,
) -> Result<Result<Registered, Doubt>, String> {
    let Some(page) = Page::read(view, at) else { return Ok(Err(CHANGED.into())) };
    let before = vcpus(qmp.as_deref_mut())?;
    if let Err(why) = page.check(view, &before, known.proven) {
        if page.is(known.on_record) {
            return page.again(view, why, qmp).map(Err);
        }
        if why == UNPROVEN && page.is_acknowledged() && page.is_mapped(view, &before) {
            page.ask_for_proof(view);
        }
        return Ok(Err(why.into()));
    }
    let read = Registered::read(view, at);
    let after = vcpus(qmp.as_deref_mut())?;
    if let Err(why) = page.check(view, &after, known.proven) {
        return Ok(Err(why.into()));
    }
    let registered = match read {
        Ok(registered) => registered,
        Err(error) => {
            page.refuse(view, &error);
            return Ok(Err(Doubt::Final(error.to_string())));
        }
    };
    let record = registered.record();
    let is_same = (record.token(), record.virtual_address()) == (page.token, page.va);
    Ok(match is_same && Registered::read(view, at).as_ref() == Ok(&registered) {
        false => Err(CHANGED.into()),
        true if !is_run(&registered, view, qmp)? => Err(NOT_RUNNING.into()),
        true if registered.answer(view, Answer::Accepted) => Ok(registered),
        true => Err(CHANGED.into()),
    })
}

/// Whether the vCPUs run the kernel that has made this record, and nothing else.
///
/// # Errors
/// QEMU does not tell what its vCPUs run.
fn is_run(registered: &Registered, view: &View<'_>, qmp: Option<&mut Qmp>) -> Result<bool, String> {
    let runs = |vcpu: &Vcpu| registered.may_be_mapped_by(view, vcpu.root, vcpu.levels);
    all_run(&runs, &|| true, qmp)
}

/// What every version of a record has in the same place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Page {
    at: Gpa,
    token: u64,
    va: u64,
    acknowledgement: u64,
}

impl Page {
    fn new(at: Gpa, word: impl Fn(u64) -> u64) -> Page {
        let [token, va, acknowledgement] =
            [TOKEN_AT, VIRTUAL_ADDRESS_AT, ACKNOWLEDGEMENT_AT].map(word);
        Page { at, token, va, acknowledgement }
    }

    fn read(view: &View<'_>, at: Gpa) -> Option<Page> {
        let words = view.words(at, ebb_vprobe::RECORD_WORDS)?;
        Some(Page::new(at, |byte| words[(byte / 8) as usize].load(Relaxed)))
    }

    /// Whether it is the registration with this digest.
    fn is(&self, digest: Option<u64>) -> bool {
        digest == Some(registration_digest(self.at, self.token))
    }

    /// Whether the host has acknowledged it, or somebody pretends so.
    fn is_acknowledged(&self) -> bool {
        self.token != 0 && self.acknowledgement == self.token
    }

    /// Whether a vCPU has a breakpoint at its address.
    fn is_armed(&self, vcpu: &Vcpu) -> bool {
        self.va >> 63 != 0 && vcpu.breakpoints.contains(&self.va)
    }

    /// Whether a vCPU's own page tables map its address to it.
    fn is_mapped(&self, view: &View<'_>, vcpus: &[Vcpu]) -> bool {
        vcpus
            .iter()
            .any(|vcpu| PageTables::of_cr3(vcpu.root, vcpu.levels).maps(view, self.va, self.at))
    }

    /// Whether the guest's kernel has made it, as far as these registers tell.
    fn check(
        &self,
        view: &View<'_>,
        vcpus: &[Vcpu],
        proven: Option<u64>,
    ) -> Result<(), &'static str> {
        if self.is(proven) {
            return Ok(());
        }
        if vcpus.iter().any(|vcpu| vcpu.may_nest) {
            return Err(NESTS);
        }
        if !vcpus.iter().any(|vcpu| self.is_armed(vcpu)) {
            return Err(UNPROVEN);
        }
        // Another page may name the kernel's address as its own.
        match self.is_mapped(view, vcpus) {
            true => Ok(()),
            false => Err(NOT_RUNNING),
        }
    }

    /// Asks the kernel on record to prove this record again, if it runs. `why`: the record is not
    /// proved now.
    fn again(&self, view: &View<'_>, why: &str, qmp: Option<&mut Qmp>) -> Result<Doubt, String> {
        let registered = match Registered::read(view, self.at) {
            Ok(registered) => registered,
            // What a record says against itself needs no proof.
            Err(error) => return Ok(Doubt::Final(error.to_string())),
        };
        if !is_run(&registered, view, qmp)? {
            return Ok(NOT_RUNNING.into());
        }
        if why == NESTS {
            return Ok(Doubt::Awaited(why.into()));
        }
        if self.is_acknowledged() {
            self.ask_for_proof(view);
        }
        Ok(Doubt::Awaited(AGAIN.into()))
    }

    /// Takes an acknowledgement back, so that the kernel proves once more that the record is its.
    fn ask_for_proof(&self, view: &View<'_>) {
        answer_record(view, self.at, self.token, None);
    }

    /// Tells the kernel why its record does not count.
    fn refuse(&self, view: &View<'_>, error: &NotRegistered) {
        if let Some(answer) = error.answer() {
            answer_record(view, self.at, self.token, Some(answer));
        }
    }
}
