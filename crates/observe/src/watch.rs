//! One VM, looked at again and again.

use std::io;
use std::time::{Duration, Instant};

use ebb_inspect::{
    CounterPlaces, Counters, Guest, NOTES_MAX, Note, RESERVE_BYTES, Request, Untrusted, begins_note,
};
use ebb_sys::process::Process;
use ebb_units::FRAME_BYTES;
use ebb_vm::command_line::CommandLine;

use crate::layout::{Segment, gpa_of, ways};
use crate::ram::{COMMAND_LINE_MAX, NoRam, Ram};
use crate::view::View;

/// Order of the blocks that Ebb reclaims if nothing else is said: 2 MiB.
const LEAST_ORDER: u8 = 9;
/// Bytes of a note's header.
const HEADER_BYTES: usize = 24;

/// Longest time from one search for a kernel to the next.
const SEARCH_AGAIN_MAX: Duration = Duration::from_secs(600);
/// How much longer than the last search it takes to the next at least. So searches take a thousandth
/// of a processor at most.
const SEARCH_PART: u32 = 1000;

/// A VM that is observed.
pub struct Watch {
    ram: Ram,
    ways: Vec<Vec<Segment>>,
    known: Option<Known>,
    in_vain: Option<InVain>,
}

/// A search that found no kernel.
struct InVain {
    why: NotKnown,
    again: Instant,
}

/// A guest's kernel, and where its RAM and its counters are.
struct Known {
    segments: Vec<Segment>,
    guest: Guest,
    places: CounterPlaces,
}

/// What one look found.
#[derive(Clone, PartialEq, Debug)]
pub struct Observed {
    /// The VM's RAM without what is plugged, in bytes.
    pub memory_bytes: u64,
    /// The part of it that takes host memory, in bytes.
    pub resident_bytes: u64,
    /// What its guest uses, or why that is not known.
    pub usage: Result<Usage, NotKnown>,
}

/// What a guest uses its memory for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Its kernel's release.
    pub release: String,
    /// What its kernel counts.
    pub counters: Counters,
    /// Free memory in blocks that Ebb reclaims, without the reserve that it leaves, as far as it
    /// takes host memory: what Ebb would give back now, in bytes.
    pub reclaimable_bytes: u64,
}

/// Why it is not known what a guest uses.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum NotKnown {
    /// Its kernel is not known.
    #[error("{0}")]
    Kernel(Untrusted),
    /// Its kernel has counters in no known order, or has only begun to boot.
    #[error(
        "its kernel's counters were not found: it is still booting, or its kernel is not known"
    )]
    Counters,
}

impl Watch {
    /// Begins to observe a process that is a QEMU. Reads nothing of the guest yet.
    ///
    /// # Errors
    /// [`NoRam`].
    pub fn open(pid: i32) -> Result<Watch, NoRam> {
        let io = |source| NoRam::Io { pid, source };
        let process = Process::open(pid).map_err(io)?;
        let line = line_of(&process).map_err(io)?;
        let ram = Ram::find(process, &line)?;
        let ways = ways(ram.bytes(), line.ram_below_4g());
        Ok(Watch { ram, ways, known: None, in_vain: None })
    }

    /// Looks at the VM. The first look, and the first one after a boot, searches all of the RAM
    /// that is in memory for the kernel's note. If that is in vain, the next search is some time
    /// later. Other looks read some hundred words, and a line of metadata for each free block.
    ///
    /// A VMM that serves its own faults can make a look wait for it.
    ///
    /// # Errors
    /// [`NoRam::Io`]: the process has ended, or may not be inspected any more.
    pub fn look(&mut self) -> Result<Observed, NoRam> {
        let pid = self.ram.process().pid();
        let io = |source| NoRam::Io { pid, source };
        if self.ram.process().has_ended().map_err(io)? {
            return Err(io(io::Error::new(io::ErrorKind::NotFound, "it has ended")));
        }
        if !self.ram.is_open() {
            let line = line_of(self.ram.process()).map_err(io)?;
            self.ram.open(&line)?;
        }
        let resident_bytes = self.ram.resident_bytes().map_err(io)?;
        let usage = match self.known.as_mut().and_then(|known| known.look(&self.ram)) {
            Some(usage) => Ok(usage),
            None => self.search(),
        };
        Ok(Observed { memory_bytes: self.ram.bytes(), resident_bytes, usage })
    }

    /// Closes the files of the VM's RAM until the next look: an open one keeps the memory of a VMM
    /// that has ended.
    pub fn close(&mut self) {
        self.ram.close();
    }

    /// Finds the kernel, unless that was in vain a short time ago.
    fn search(&mut self) -> Result<Usage, NotKnown> {
        let began = Instant::now();
        if let Some(before) = self.in_vain.as_ref().filter(|before| began < before.again) {
            return Err(before.why.clone());
        }
        let found = self.find();
        let pause = (began.elapsed() * SEARCH_PART).min(SEARCH_AGAIN_MAX);
        let in_vain = |why: &NotKnown| InVain { why: why.clone(), again: began + pause };
        self.in_vain = found.as_ref().err().map(in_vain);
        found
    }

    /// Finds the kernel, and looks at it.
    fn find(&mut self) -> Result<Usage, NotKnown> {
        self.known = None;
        let mut reason = NotKnown::Kernel(Untrusted::NoNote);
        let mut best: Option<(Known, Usage)> = None;
        let notes = notes(&self.ram);
        for segments in &self.ways {
            for offset in &notes {
                match Known::of(&self.ram, segments, *offset) {
                    // Where RAM was placed wrongly, parts of it are missing.
                    Ok(found)
                        if best.as_ref().is_none_or(|best| found.1.total() > best.1.total()) =>
                    {
                        best = Some(found);
                    }
                    Ok(_) => {}
                    Err(NotKnown::Counters) => reason = NotKnown::Counters,
                    Err(NotKnown::Kernel(why)) => {
                        if let NotKnown::Kernel(before) = reason {
                            reason = NotKnown::Kernel(before.or(why));
                        }
                    }
                }
            }
        }
        let (known, usage) = best.ok_or(reason)?;
        self.known = Some(known);
        Ok(usage)
    }
}

fn line_of(process: &Process) -> io::Result<CommandLine> {
    process.command_line_within(COMMAND_LINE_MAX).map(CommandLine::new)
}

impl Usage {
    fn total(&self) -> u64 {
        self.counters.total_bytes
    }

    /// Memory in use that is no page cache, in bytes.
    pub fn used_bytes(&self) -> u64 {
        let Counters { total_bytes, free_bytes, cache_bytes, .. } = self.counters;
        total_bytes.saturating_sub(free_bytes).saturating_sub(cache_bytes)
    }
}

impl Known {
    /// The kernel whose note is at this offset, if RAM is placed like this.
    fn of(ram: &Ram, segments: &[Segment], offset: u64) -> Result<(Known, Usage), NotKnown> {
        let view = View::new(ram, segments);
        let none = NotKnown::Kernel(Untrusted::NoNote);
        let gpa = gpa_of(segments, offset).ok_or(none.clone())?;
        let note = Note::read(&view, gpa).ok_or(none)?;
        let guest = Guest::from_note(&view, note).map_err(NotKnown::Kernel)?;
        let places = guest.counter_places(&view).ok_or(NotKnown::Counters)?;
        let usage = usage(&guest, &places, &view).ok_or(NotKnown::Counters)?;
        Ok((Known { segments: segments.to_vec(), guest, places }, usage))
    }

    /// What the guest uses now. `None`: it runs another kernel, or is not readable now.
    fn look(&mut self, ram: &Ram) -> Option<Usage> {
        let view = View::new(ram, &self.segments);
        if !self.guest.recheck(&view) {
            return None;
        }
        self.guest.refresh(&view).ok()?;
        usage(&self.guest, &self.places, &view)
    }
}

fn usage(guest: &Guest, places: &CounterPlaces, view: &View<'_>) -> Option<Usage> {
    let counters = guest.counters(view, places)?;
    let mut blocks = Vec::new();
    let request =
        Request { min_order: LEAST_ORDER, reserve_bytes: RESERVE_BYTES, want_bytes: u64::MAX };
    guest.victims(view, request, &mut blocks);
    let present = blocks.iter().map(|block| {
        let frames = block.frames();
        view.present_in(frames.start.gpa(), frames.bytes())
    });
    let reclaimable_bytes = present.sum();
    Some(Usage { release: guest.release().into(), counters, reclaimable_bytes })
}

/// Offsets in RAM at which a note begins.
fn notes(ram: &Ram) -> Vec<u64> {
    let mut found = Vec::new();
    ram.present(0, ram.bytes(), |start, bytes| {
        for offset in (start..start + bytes).step_by(FRAME_BYTES as usize) {
            let mut header = [0; HEADER_BYTES];
            if found.len() < NOTES_MAX
                && ram.read(offset, &mut header).is_some()
                && begins_note(&header)
            {
                found.push(offset);
            }
        }
    });
    found
}
