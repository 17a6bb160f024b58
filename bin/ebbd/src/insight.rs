//! What is known of a guest from its memory, and whether it may be acted on.

use std::time::{Duration, Instant};

use ebb_inspect::{Guest, Untrusted, find_notes};
use ebb_pager::{Pager, View};
use ebb_vm::Qmp;
use ebb_vm::qmp::QmpError;

/// Between two attempts to inspect a guest that is not trusted, at first and
/// at most: looking for its note reads all populated memory.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MOST: Duration = Duration::from_secs(30);
/// How often the vCPUs' page tables are asked for before a kernel counts as
/// one that does not run.
const ROOT_TRIES: u32 = 8;

/// The guest as far as it is known.
pub struct Insight {
    guest: Result<Guest, String>,
    tried: Option<Instant>,
    retry_after: Duration,
}

impl Insight {
    /// Nothing is known yet.
    pub fn new() -> Insight {
        let guest = Err("it was not inspected yet".into());
        Insight { guest, tried: None, retry_after: RETRY_FIRST }
    }

    /// The guest, if it is trusted; else why not.
    pub fn guest(&self) -> Result<&Guest, &str> {
        self.guest.as_ref().map_err(String::as_str)
    }

    /// What was known is void: the guest was reset.
    pub fn forget(&mut self, why: &str) {
        *self = Insight { guest: Err(why.into()), ..Insight::new() };
    }

    /// Whether it is time to try again.
    pub fn is_due(&self) -> bool {
        let waited = |tried: Instant| tried.elapsed() >= self.retry_after;
        self.guest.is_err() && self.tried.is_none_or(waited)
    }

    /// Makes sure that what is known is true of the kernel that runs now: the
    /// note is in place, and a vCPU's page tables are this kernel's. Inspects
    /// anew where it is not. `true`: there is a trusted guest. `moves`: memory comes and goes,
    /// which changes where its metadata lies.
    pub fn confirm(&mut self, pager: &Pager, mut qmp: Option<&mut Qmp>, moves: bool) -> bool {
        let view = pager.view();
        let known = self.guest.as_mut().is_ok_and(|guest| {
            guest.recheck(&view)
                && is_running(guest, &view, qmp.as_deref_mut()) == Ok(true)
                && (!moves || guest.refresh(&view).is_ok())
        });
        if !known {
            self.tried = Some(Instant::now());
            self.retry_after = (self.retry_after * 2).min(RETRY_MOST);
            self.guest = inspect(&view, qmp);
        }
        self.guest.is_ok()
    }
}

/// Looks at every note in memory: one of a kernel that was there before may
/// stand beside that of the kernel that runs.
fn inspect(view: &View<'_>, mut qmp: Option<&mut Qmp>) -> Result<Guest, String> {
    let mut reason = Untrusted::NoNote;
    for note in find_notes(view) {
        match Guest::from_note(view, note, &[]) {
            Ok(guest) if is_running(&guest, view, qmp.as_deref_mut())? => return Ok(guest),
            Ok(_) => reason = reason.or(Untrusted::NotRunning),
            Err(why) => reason = reason.or(why),
        }
    }
    Err(reason.to_string())
}

/// Whether a vCPU runs this kernel. Between QEMU's answer and our look a
/// process may end and its page tables be freed, so one "no" is not believed.
fn is_running(guest: &Guest, view: &View<'_>, mut qmp: Option<&mut Qmp>) -> Result<bool, String> {
    for _ in 0..ROOT_TRIES {
        if guest.runs_on(view, &page_table_roots(qmp.as_deref_mut())?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// CR3 of every vCPU, asked of QEMU.
fn page_table_roots(qmp: Option<&mut Qmp>) -> Result<Vec<u64>, String> {
    let qmp = qmp.ok_or("QEMU's QMP socket is lost, so nobody tells whether this kernel runs")?;
    let text = qmp.human("info registers -a").map_err(|error: QmpError| error.to_string())?;
    let roots = parse_roots(&text);
    // Without roots nobody would ask whether the kernel runs.
    if roots.is_empty() { Err("QEMU does not tell its vCPUs' registers".into()) } else { Ok(roots) }
}

fn parse_roots(registers: &str) -> Vec<u64> {
    let words = registers.split_ascii_whitespace();
    words
        .filter_map(|word| word.strip_prefix("CR3="))
        .filter_map(|hex| u64::from_str_radix(hex, 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_every_processors_root() {
        let text = "CPU#0\nCR0=80050033 CR2=0 CR3=0000000005c0a000 CR4=06f0\n\nCPU#1\nCR3=10 CR4=0";
        assert_eq!(parse_roots(text), [0x5c0_a000, 0x10]);
        assert!(parse_roots("CR3=zz").is_empty());
    }
}
