//! The five lines that `ebb status` prints of a VM, and those about what is out of the ordinary.

use ebb_api::{Mechanism, Mode, VmStatus};
use ebb_units::{Bytes, FRAME_BYTES};

use super::{limit_or_none, reach, reclaim, row, state_word, vm};

/// Returns what an operator looks for first: warnings, and devices that restrict Ebb, then where
/// the memory is.
pub fn brief(status: &VmStatus) -> String {
    let (name, state, pid) = (&status.name, state_word(status.state), status.pid);
    [
        format!("{name}: {state}, QEMU's pid is {pid}; --verbose shows all\n"),
        vm::state(status),
        vm::warnings(status),
        reach::rows(&status.reach),
        row("memory", memory(status)),
        row("guest", guest(status)),
        row("limit", limit(status)),
        row("reclaimed", reclaimed(status)),
    ]
    .concat()
}

fn memory(status: &VmStatus) -> String {
    let size = &status.size;
    let [all, resident] = [status.memory_bytes, status.resident_bytes].map(Bytes);
    let target = size.wanted_bytes.map(|bytes| format!("; target {}", Bytes(bytes)));
    let given = match size.bytes == status.memory_bytes {
        true => String::new(),
        false => format!("; the guest has {}", Bytes(size.bytes)),
    };
    format!("{all}, of which {resident} resident{given}{}", target.unwrap_or_default())
}

fn guest(status: &VmStatus) -> String {
    let guest = &status.guest;
    if !guest.trusted {
        return format!("not trusted: {}", guest.why.as_deref().unwrap_or("not looked at yet"));
    }
    if guest.registered {
        return "its kernel has registered its page metadata".into();
    }
    let figures = [
        (status.guest_free_bytes, "free"),
        (guest.anonymous_bytes, "anonymous"),
        (guest.file_bytes, "file"),
        (guest.slab_bytes, "slab"),
    ];
    let known =
        figures.iter().filter_map(|(bytes, what)| Some(format!("{} {what}", Bytes((*bytes)?))));
    let kernel = guest.kernel.as_ref().map(|kernel| format!("kernel {kernel}"));
    kernel.into_iter().chain(known).collect::<Vec<_>>().join(", ")
}

fn limit(status: &VmStatus) -> String {
    let limit = &status.limit;
    let at = limit_or_none(limit.bytes);
    let compressed = match limit.compressed_pages {
        0 => String::new(),
        pages => format!(
            ", {} of it compressed in {}",
            Bytes(pages.saturating_mul(FRAME_BYTES)),
            Bytes(limit.compressed_bytes)
        ),
    };
    let evicted = match (limit.saved_bytes, limit.on_disk_bytes) {
        (0, 0) => "; nothing is evicted".into(),
        (saved, on_disk) => {
            format!("; evicted: {} saved{compressed}, {} disk-backed", Bytes(saved), Bytes(on_disk))
        }
    };
    let stuck = limit.stuck.as_ref().map(|why| format!("; blocked by: {why}"));
    at + &evicted + &stuck.unwrap_or_default()
}

fn reclaimed(status: &VmStatus) -> String {
    let auto = match status.auto.on {
        true => reclaim::when(&status.auto),
        false => "only by command".into(),
    };
    let by = match (status.mechanism, status.mode) {
        (Mechanism::HyperAlloc, _) => "by HyperAlloc",
        (_, Mode::Strict) => "in strict mode",
        (_, Mode::Release) => "in release mode",
    };
    format!("{} in all, {auto}, {by}", Bytes(status.reclaimed_total_bytes))
}
