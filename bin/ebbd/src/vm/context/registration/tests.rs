//! Tests of a made-up kernel that registers its page metadata.

use std::sync::atomic::Ordering::Relaxed;

use ebb_units::Gfn;
use ebb_vprobe::{ACKNOWLEDGEMENT_AT, ANSWER_AT, STATE_AT};
use testkit::forge;
use testkit::vprobe::{PAGE_FREE, Registration};

use super::*;
use crate::model::record::MetadataBy;
use crate::vm::context::VmContext;
use crate::vm::context::insight::KnownGuest;
use crate::vm::context::machine::qemu::Qemu;
use crate::vm::context::machine::{self, Machine};
use crate::vm::trust::Trust;

/// Where the kernel's record is.
const AT: Gpa = Gpa(0x78_0000);
/// CR4 of a processor that runs no guests.
const PLAIN: u64 = 0x6f0;
/// CR4 with VMX on.
const WITH_VMX: u64 = 0x26f0;

fn registration() -> Registration {
    forge::registration(AT)
}

/// Boots a kernel that is known by its registration only, and has written this record.
fn boot(registration: &Registration) -> Option<(VmContext, Machine, Qemu)> {
    let (mut cx, machine) = machine::context()?;
    let qemu = machine.boot(&mut cx);
    let words = machine.words(AT, 512);
    for (word, value) in words.iter().zip(registration.words(AT.0)) {
        word.store(value, Relaxed);
    }
    cx.guest = KnownGuest::new(0, MetadataBy::Registration);
    qemu.runs_with(forge::ROOT, Some(registration.virtual_address), PLAIN);
    Some((cx, machine, qemu))
}

/// Whether there is a trusted kernel, after a look.
fn confirm(cx: &mut VmContext) -> bool {
    cx.guest.confirm(&cx.pager, cx.qmp.socket(), false, cx.record.kernel)
}

fn why(cx: &VmContext) -> String {
    cx.guest.kernel().expect_err("it is not trusted").to_owned()
}

fn withdraw(machine: &Machine) {
    let state = &machine.words(Gpa(AT.0 + STATE_AT / 8 * 8), 1)[0];
    state.store(state.load(Relaxed) as u32 as u64 | 2 << 32, Relaxed);
}

fn word(machine: &Machine, at: u64) -> u64 {
    machine.words(Gpa(AT.0 + at / 8 * 8), 1)[0].load(Relaxed)
}

#[test]
fn a_kernel_that_proves_its_registration_is_trusted_and_told_so() {
    let Some((mut cx, machine, _qemu)) = boot(&registration()) else { return };
    assert!(confirm(&mut cx), "{}", why(&cx));
    assert_eq!(word(&machine, ACKNOWLEDGEMENT_AT), registration().token);
    assert_eq!(word(&machine, ANSWER_AT) as u32, Answer::Accepted.code());
    assert!(cx.guest.guest().is_err() && cx.guest.kernel().is_ok());
    let head = Gfn(4 << 10);
    let kernel = cx.guest.kernel().expect("it is trusted");
    let found = kernel.free_blocks().heads(&cx.pager.view())(head).expect("a free block");
    assert_eq!(found.order, 10);
    assert_eq!(kernel.free_blocks().metadata_frame(head), Some(found.metadata));
}

/// A process may write such a page, but have no breakpoint in the kernel's half of memory.
#[test]
fn a_record_without_proof_is_not_believed() {
    let Some((mut cx, machine, qemu)) = boot(&registration()) else { return };
    for breakpoint in [None, Some(registration().virtual_address + 4096)] {
        qemu.runs_with(forge::ROOT, breakpoint, PLAIN);
        assert!(!confirm(&mut cx));
        assert_eq!(why(&cx), UNPROVEN);
    }
    assert_eq!(word(&machine, ACKNOWLEDGEMENT_AT), 0);
}

/// The registers that QEMU prints may be those of a guest's guest, which chooses them.
#[test]
fn no_proof_counts_while_the_guest_may_run_guests() {
    let Some((mut cx, _machine, qemu)) = boot(&registration()) else { return };
    qemu.runs_with(forge::ROOT, Some(registration().virtual_address), WITH_VMX);
    assert!(!confirm(&mut cx));
    assert_eq!(why(&cx), NESTS);
}

#[test]
fn a_kernel_that_has_been_acknowledged_before_is_asked_for_proof() {
    let Some((mut cx, machine, qemu)) = boot(&registration()) else { return };
    machine.words(Gpa(AT.0 + ACKNOWLEDGEMENT_AT), 1)[0].store(registration().token, Relaxed);
    qemu.runs_with(forge::ROOT, None, PLAIN);
    assert!(!confirm(&mut cx));
    assert_eq!(word(&machine, ACKNOWLEDGEMENT_AT), 0, "the kernel sees that it must prove it");
}

/// Lets another process go on with a VM whose kernel was trusted.
fn next_process(cx: &mut VmContext) {
    assert!(confirm(cx), "{}", why(cx));
    let digest = cx.guest.kernel().expect("it is trusted").digest();
    cx.guest = KnownGuest::new(0, MetadataBy::Registration);
    cx.record.note(|record| record.kernel = Some(digest));
}

/// The guest may have been reset between two processes, and the record be the last kernel's.
#[test]
fn a_kernel_on_record_proves_itself_to_the_next_process() {
    let Some((mut cx, machine, qemu)) = boot(&registration()) else { return };
    next_process(&mut cx);
    qemu.runs_with(forge::ROOT, None, PLAIN);
    assert!(!confirm(&mut cx));
    assert_eq!(word(&machine, ACKNOWLEDGEMENT_AT), 0, "the kernel sees that it must prove it");
    assert!(why(&cx) == AGAIN && !cx.guest.is_answered());
    assert!(!Trust::default().has_lost_its_kernel(&cx), "its memory may stay away");
    qemu.runs_with(forge::ROOT, Some(registration().virtual_address), PLAIN);
    assert!(confirm(&mut cx), "{}", why(&cx));
}

#[test]
fn a_kernel_on_record_that_proves_nothing_is_lost_in_the_end() {
    let Some((mut cx, _machine, qemu)) = boot(&registration()) else { return };
    next_process(&mut cx);
    qemu.runs_with(forge::ROOT, None, PLAIN);
    let known = |may_wait| Known { on_record: cx.record.kernel, may_wait, ..Known::default() };
    let (last, in_time) = (known(false), known(true));
    let mut found = |known| find(&cx.pager, cx.qmp.socket(), known);
    assert_eq!(found(in_time), Err(AGAIN.into()));
    assert_eq!(found(last), Ok(Some(Err(AGAIN.into()))));
}

/// The record of the last kernel may be in memory beside that of the one that runs.
#[test]
fn a_kernel_that_proves_itself_is_found_beside_the_one_on_record() {
    let Some((mut cx, machine, qemu)) = boot(&registration()) else { return };
    next_process(&mut cx);
    let at = Gpa(AT.0 + 0x1_0000);
    let next = Registration { token: registration().token ^ 1, ..forge::registration(at) };
    for (word, value) in machine.words(at, 512).iter().zip(next.words(at.0)) {
        word.store(value, Relaxed);
    }
    qemu.runs_with(forge::ROOT, Some(next.virtual_address), PLAIN);
    assert!(confirm(&mut cx), "{}", why(&cx));
    assert!(Trust::default().has_lost_its_kernel(&cx), "it is another one");
}

#[test]
fn a_kernel_on_record_that_no_page_tables_lead_to_is_lost() {
    let Some((mut cx, machine, qemu)) = boot(&registration()) else { return };
    next_process(&mut cx);
    qemu.runs_with(Gpa(0), None, PLAIN);
    assert!(!confirm(&mut cx));
    assert!(why(&cx) == NOT_RUNNING && Trust::default().has_lost_its_kernel(&cx));
    assert_eq!(word(&machine, ACKNOWLEDGEMENT_AT), registration().token);
}

#[test]
fn a_kernel_on_record_that_has_withdrawn_is_lost() {
    let Some((mut cx, machine, qemu)) = boot(&registration()) else { return };
    next_process(&mut cx);
    withdraw(&machine);
    qemu.runs_with(forge::ROOT, None, PLAIN);
    assert!(!confirm(&mut cx));
    assert!(why(&cx).contains("was withdrawn"), "{}", why(&cx));
    assert!(Trust::default().has_lost_its_kernel(&cx));
}

#[test]
fn a_kernel_on_record_that_may_run_guests_is_told_why_it_does_not_count() {
    let Some((mut cx, _machine, qemu)) = boot(&registration()) else { return };
    next_process(&mut cx);
    qemu.runs_with(forge::ROOT, None, WITH_VMX);
    assert!(!confirm(&mut cx));
    assert!(why(&cx) == NESTS && !Trust::default().has_lost_its_kernel(&cx));
}

/// vCPUs may seem to run something else for a moment.
#[test]
fn a_kernel_that_this_process_knows_proves_nothing_again_until_it_is_lost() {
    let Some((mut cx, _machine, qemu)) = boot(&registration()) else { return };
    let confirm_on = |cx: &mut VmContext, root| {
        qemu.runs_with(root, None, PLAIN);
        confirm(cx)
    };
    next_process(&mut cx);
    qemu.runs_with(forge::ROOT, Some(registration().virtual_address), PLAIN);
    assert!(confirm(&mut cx), "{}", why(&cx));
    assert!(!confirm_on(&mut cx, Gpa(0)));
    assert!(confirm_on(&mut cx, forge::ROOT), "{}", why(&cx));
    Trust::default().bring_back_for_next(&mut cx);
    assert!(!confirm_on(&mut cx, Gpa(0)) && !confirm_on(&mut cx, forge::ROOT));
    assert_eq!(why(&cx), UNPROVEN);
}

/// A reset may have been missed meanwhile.
#[test]
fn a_socket_that_is_connected_anew_asks_for_a_new_proof() {
    let Some((mut cx, _machine, qemu)) = boot(&registration()) else { return };
    next_process(&mut cx);
    qemu.runs_with(forge::ROOT, Some(registration().virtual_address), PLAIN);
    assert!(confirm(&mut cx), "{}", why(&cx));
    qemu.runs_with(forge::ROOT, None, PLAIN);
    assert!(confirm(&mut cx), "{}", why(&cx));
    cx.guest.doubt();
    assert!(!cx.guest.is_answered() && !confirm(&mut cx));
    assert_eq!(why(&cx), AGAIN);
}

#[test]
fn a_kernel_that_does_not_run_is_not_believed() {
    let Some((mut cx, machine, qemu)) = boot(&registration()) else { return };
    qemu.runs_with(Gpa(0), Some(registration().virtual_address), PLAIN);
    assert!(!confirm(&mut cx));
    assert_eq!(why(&cx), NOT_RUNNING);
    assert_eq!(word(&machine, ACKNOWLEDGEMENT_AT), 0);
}

/// Another page names the address that the kernel has its breakpoint at.
#[test]
fn a_page_elsewhere_is_not_believed() {
    let va = registration().virtual_address + 4096;
    let Some((mut cx, machine, qemu)) =
        boot(&Registration { virtual_address: va, ..registration() })
    else {
        return;
    };
    qemu.runs_with(forge::ROOT, Some(va), PLAIN);
    assert!(!confirm(&mut cx));
    assert_eq!(why(&cx), NOT_RUNNING);
    assert_eq!(word(&machine, ACKNOWLEDGEMENT_AT), 0);
}

#[test]
fn a_kernel_that_withdraws_is_believed_no_more() {
    let Some((mut cx, machine, _qemu)) = boot(&registration()) else { return };
    assert!(confirm(&mut cx) && !cx.guest.is_due(&cx.pager));
    withdraw(&machine);
    assert!(cx.guest.is_due(&cx.pager));
    assert!(!confirm(&mut cx));
    assert!(why(&cx).contains("was withdrawn"), "{}", why(&cx));
}

#[test]
fn a_refused_helper_is_named_and_the_guest_is_told() {
    let mut refused = registration();
    // mov [rdi+0x30], eax
    refused.page_free = [&[0x89], &PAGE_FREE[1..]].concat();
    let Some((mut cx, machine, _qemu)) = boot(&refused) else { return };
    assert!(!confirm(&mut cx));
    let why = why(&cx);
    assert!(why.contains("page_free") && why.contains("rule 3"), "{why}");
    assert_eq!(word(&machine, ANSWER_AT) as u32, 2 | 5 << 8 | 3 << 16);
    assert_eq!(word(&machine, ACKNOWLEDGEMENT_AT), refused.token);
}

#[test]
fn metadata_outside_of_ram_is_refused() {
    let mut outside = registration();
    outside.ranges[0][1] += forge::RAM_BYTES;
    outside.ranges[0][3] += forge::RAM_BYTES / forge::PAGE_BYTES;
    let Some((mut cx, machine, _qemu)) = boot(&outside) else { return };
    assert!(!confirm(&mut cx));
    assert!(why(&cx).contains("does not lie in RAM"), "{}", why(&cx));
    assert_eq!(word(&machine, ANSWER_AT) as u32, 2 | 4 << 8);
}

#[test]
fn a_note_is_read_only_if_that_is_allowed() {
    let Some((mut cx, _machine, qemu)) = boot(&registration()) else { return };
    for (by, inspected) in [(MetadataBy::Either, true), (MetadataBy::Note, true)] {
        cx.guest = KnownGuest::new(0, by);
        qemu.runs_with(forge::ROOT, None, PLAIN);
        assert!(confirm(&mut cx), "{}", why(&cx));
        assert_eq!(cx.guest.guest().is_ok(), inspected);
    }
}
