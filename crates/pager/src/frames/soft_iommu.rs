//! An IOMMU in software: it stands between a device of ours and the guest's memory, as the hardware
//! would between them and a device passed through.
//!
//! One bit a frame: if it is set, the device may use the frame. A request for a frame whose bit is
//! clear fails; nothing waits, and nothing is brought back.
//!
//! The hardware maps the memory that backs a frame, not the frame. If the frame loses its memory
//! and gets other memory without a call of [`IoMapping`], a device still uses the old memory. Here
//! such a frame counts as not mapped.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread;
use std::time::Duration;

use ebb_units::{FrameRange, Gfn};
use ebb_vm::Ram;

use super::io_mapping::IoMapping;
use super::pins::Pins;

const WORD_FRAMES: u64 = u64::BITS as u64;

/// How often a hole is looked at before it counts as one. A page that the host is moving
/// (compaction, or building a huge page) looks like a hole for a moment: lseek(2) asks whether the
/// new page is up to date.
const HOLE_LOOKS: u32 = 20;
const HOLE_LOOK_EVERY: Duration = Duration::from_millis(1);

/// What devices in strict DMA mode may use of one VM's memory.
pub struct SoftIommu {
    ram: Arc<Ram>,
    /// Bit `gfn % 64` of word `gfn / 64`.
    mapped: Box<[AtomicU64]>,
    pins: Pins,
}

impl SoftIommu {
    /// Maps everything. All of `ram` must have memory by then, as that of a VM with a device passed
    /// through: a hole counts as memory that was taken away.
    pub fn new(ram: &Arc<Ram>) -> SoftIommu {
        let end = ram.end().0;
        let words = (0..end.div_ceil(WORD_FRAMES)).map(|_| AtomicU64::new(u64::MAX));
        SoftIommu { ram: Arc::clone(ram), mapped: words.collect(), pins: Pins::new(end) }
    }

    /// Pins frames for a device: until [`SoftIommu::unpin`] none of them is unmapped.
    ///
    /// # Errors
    /// The first frame that no device may use: it is not mapped, it is no RAM, or something that
    /// knows nothing of devices has returned its memory to the host. Nothing is pinned then.
    pub fn pin(&self, frames: FrameRange) -> Result<(), Gfn> {
        // As the pager pins: first counted, then looked at (see `pins`).
        frames.frames().for_each(|gfn| self.pins.pin(gfn));
        match frames.frames().find(|&gfn| !self.is_usable(gfn)) {
            None => Ok(()),
            Some(gfn) => {
                self.unpin(frames);
                Err(gfn)
            }
        }
    }

    /// Ends one [`SoftIommu::pin`] of the same frames.
    pub fn unpin(&self, frames: FrameRange) {
        frames.frames().for_each(|gfn| self.pins.unpin(gfn));
    }

    fn allow(&self, frames: FrameRange) {
        for (word, bits) in self.words(frames) {
            word.fetch_or(bits, Release);
        }
    }

    fn is_usable(&self, gfn: Gfn) -> bool {
        let is_mapped = self.word(gfn).is_some_and(|(word, bit)| word.load(Acquire) & bit != 0);
        is_mapped && !self.stays_hole(gfn)
    }

    fn stays_hole(&self, gfn: Gfn) -> bool {
        self.is_hole(gfn)
            && (1..HOLE_LOOKS).all(|_| {
                thread::sleep(HOLE_LOOK_EVERY);
                self.is_hole(gfn)
            })
    }

    fn is_hole(&self, gfn: Gfn) -> bool {
        self.ram.is_hole(FrameRange::new(gfn, 1)).unwrap_or(true)
    }

    fn word(&self, gfn: Gfn) -> Option<(&AtomicU64, u64)> {
        let word = self.mapped.get(usize::try_from(gfn.0 / WORD_FRAMES).ok()?)?;
        Some((word, 1 << (gfn.0 % WORD_FRAMES)))
    }

    /// The words that contain bits of `frames`, each with a mask of those bits.
    fn words(&self, frames: FrameRange) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let end = frames.end().0;
        let mut at = frames.start.0;
        std::iter::from_fn(move || {
            let next = (at / WORD_FRAMES + 1).saturating_mul(WORD_FRAMES).min(end);
            let count = next.checked_sub(at).filter(|&count| count > 0)?;
            let (word, first) = self.word(Gfn(at))?;
            at = next;
            Some((word, (u64::MAX >> (WORD_FRAMES - count)) * first))
        })
    }
}

impl IoMapping for SoftIommu {
    fn map(&self, frames: FrameRange) -> io::Result<()> {
        self.allow(frames);
        Ok(())
    }

    fn unmap(&self, frames: FrameRange) -> bool {
        for (word, bits) in self.words(frames) {
            word.fetch_and(!bits, Relaxed);
        }
        let in_use = self.pins.has_any(frames);
        if in_use {
            self.allow(frames);
        }
        !in_use
    }

    fn lost(&self, frames: FrameRange) {
        for gfn in frames.frames().filter(|&gfn| self.is_hole(gfn)) {
            if let Some((word, bit)) = self.word(gfn) {
                word.fetch_and(!bit, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_sys::mapping::Mapping;
    use ebb_sys::ram_file::RamFile;
    use ebb_units::{Gpa, Hva};
    use ebb_vm::ram::Backing;
    use ebb_vm::{Puncher, Region};

    fn iommu() -> SoftIommu {
        of_own_ram().0
    }

    /// An IOMMU, and what punches its RAM.
    fn of_own_ram() -> (SoftIommu, Puncher) {
        let bytes = 2 << 20;
        let file = RamFile::create("iommu-test", bytes).unwrap();
        let mapping = Mapping::new(&file, 0, bytes).unwrap();
        let region = Region { gpa: Gpa(0), bytes, hva: Hva(1 << 30), file: 0, offset: 0 };
        let ram = Ram::new(vec![region], vec![Backing::new(file, mapping)]).unwrap();
        let puncher = Puncher::new(ram);
        puncher.ram().populate(FrameRange::new(Gfn(0), 512)).unwrap();
        (SoftIommu::new(puncher.ram()), puncher)
    }

    fn run(start: u64, count: u64) -> FrameRange {
        FrameRange::new(Gfn(start), count)
    }

    #[test]
    fn what_is_unmapped_is_refused_and_nothing_beside_it() {
        for (start, count) in [(0, 1), (63, 1), (63, 2), (64, 64), (70, 200), (511, 1)] {
            let iommu = iommu();
            assert!(iommu.unmap(run(start, count)));
            for gfn in 0..512 {
                let refused = (start..start + count).contains(&gfn);
                assert_eq!(iommu.pin(run(gfn, 1)).is_err(), refused, "{start}, {count}, {gfn}");
            }
            assert_eq!(iommu.pin(run(0, 512)), Err(Gfn(start)));
            iommu.allow(run(start, count));
            assert_eq!(iommu.pin(run(0, 512)), Ok(()));
        }
    }

    #[test]
    fn what_a_device_uses_stays_mapped() {
        let iommu = iommu();
        iommu.pin(run(100, 2)).unwrap();
        iommu.pin(run(101, 1)).unwrap();
        iommu.unpin(run(100, 2));
        assert!(!iommu.unmap(run(64, 64)));
        iommu.pin(run(64, 64)).unwrap();
        iommu.unpin(run(64, 64));
        iommu.unpin(run(101, 1));
        assert!(iommu.unmap(run(64, 64)));
        // What was refused is not pinned.
        assert_eq!(iommu.pin(run(60, 10)), Err(Gfn(64)));
        assert!(iommu.unmap(run(0, 512)));
    }

    #[test]
    fn a_hole_and_what_is_no_ram_are_refused() {
        let (iommu, puncher) = of_own_ram();
        puncher.punch(run(7, 1)).unwrap();
        assert_eq!(iommu.pin(run(6, 3)), Err(Gfn(7)));
        assert_eq!(iommu.pin(run(511, 2)), Err(Gfn(512)));
        assert_eq!(iommu.pin(run(1 << 40, 1)), Err(Gfn(1 << 40)));
        assert!(iommu.unmap(run(1 << 40, 1)));
    }

    #[test]
    fn what_others_punched_stays_lost_until_it_is_mapped_again() {
        let (iommu, puncher) = of_own_ram();
        puncher.punch(run(7, 2)).unwrap();
        iommu.lost(run(0, 512));
        iommu.ram.populate(run(7, 2)).unwrap();
        assert_eq!(iommu.pin(run(0, 512)), Err(Gfn(7)));
        iommu.allow(run(7, 1));
        assert_eq!(iommu.pin(run(0, 512)), Err(Gfn(8)));
        assert_eq!(iommu.pin(run(9, 503)), Ok(()));
    }

    /// A thread that unmaps and a device use the same frames: the device never has a frame that is
    /// unmapped.
    #[test]
    fn a_device_and_an_eviction_never_have_a_frame_at_once() {
        let iommu = iommu();
        let unmapped: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let (mut used, mut taken) = (0, 0);
        std::thread::scope(|scope| {
            let device = scope.spawn(|| {
                let mut used = 0;
                for turn in 0..200_000u64 {
                    let gfn = turn % 4;
                    if iommu.pin(run(gfn, 1)).is_ok() {
                        assert_eq!(unmapped[gfn as usize].load(Relaxed), 0);
                        iommu.unpin(run(gfn, 1));
                        used += 1;
                    }
                }
                used
            });
            for turn in 0..200_000u64 {
                let gfn = turn % 4;
                if iommu.unmap(run(gfn, 1)) {
                    unmapped[gfn as usize].store(1, Relaxed);
                    std::hint::spin_loop();
                    unmapped[gfn as usize].store(0, Relaxed);
                    iommu.allow(run(gfn, 1));
                    taken += 1;
                }
            }
            used = device.join().unwrap();
        });
        assert!(used > 0 && taken > 0, "{used}, {taken}");
    }
}
