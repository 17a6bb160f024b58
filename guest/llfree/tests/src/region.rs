//! A zone's state in shared memory, as a guest has it and a host sees it.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;

use ebb_llfree::layout::HEADER_WORDS;
use ebb_llfree::{Fill, Header, Host, Layout, Parts, Touch, Zone};
use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;
use ebb_units::{FRAME_BYTES, HUGE_BYTES};

use crate::CZone;

/// One region; [`Region::again`] maps the same memory at another address.
pub struct Region {
    file: RamFile,
    mapping: Mapping,
    layout: Layout,
}

const SHORT: &str = "the region is as long as its layout";

impl Region {
    /// For a zone of so many frames and cores, all of them free.
    ///
    /// # Errors
    /// As memfd_create(2) and mmap(2), or a size that cannot be.
    pub fn new(frames: u64, cores: u32) -> io::Result<Region> {
        let layout = Layout::new(frames, cores).map_err(io::Error::other)?;
        let file = RamFile::create("llfree", bytes(&layout))?;
        let mapping = Mapping::new(&file, 0, bytes(&layout))?;
        let region = Region { file, mapping, layout };
        let header = Header {
            base_frame: 0,
            frames,
            cores,
            bits: layout.bits_bytes,
            areas: layout.areas_bytes,
            trees: layout.trees_bytes,
            slots: layout.slots_bytes,
        };
        header.write(region.header()).map_err(io::Error::other)?;
        region.zone(()).format(Fill::Free);
        Ok(region)
    }

    /// For a zone whose first frame is `base_frame`, with its state in a guest's RAM: at
    /// `offset`, a whole number of pages, of the file, which is the guest-physical address.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn within(
        ram: &RamFile,
        offset: u64,
        base_frame: u64,
        frames: u64,
        cores: u32,
    ) -> io::Result<Region> {
        let layout = Layout::new(frames, cores).map_err(io::Error::other)?;
        let file = RamFile::from(ram.as_fd().try_clone_to_owned()?);
        let page_bytes = if file.is_hugetlb()? { HUGE_BYTES } else { FRAME_BYTES };
        let length = layout.total_bytes.next_multiple_of(page_bytes);
        let mapping = Mapping::new(&file, offset, length)?;
        let region = Region { file, mapping, layout };
        let header = Header {
            base_frame,
            frames,
            cores,
            bits: offset + layout.bits_bytes,
            areas: offset + layout.areas_bytes,
            trees: offset + layout.trees_bytes,
            slots: offset + layout.slots_bytes,
        };
        header.write(region.header()).map_err(io::Error::other)?;
        region.zone(()).format(Fill::Free);
        Ok(region)
    }

    /// The same memory at another address.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn again(&self) -> io::Result<Region> {
        let file = RamFile::from(self.file.as_fd().try_clone_to_owned()?);
        let mapping = Mapping::new(&file, 0, bytes(&self.layout))?;
        Ok(Region { file, mapping, layout: self.layout })
    }

    /// The words of the header.
    pub fn header(&self) -> &[AtomicU64] {
        self.words(0, HEADER_WORDS)
    }

    /// Any words of it.
    ///
    /// # Panics
    /// Outside of it.
    pub fn words(&self, offset: u64, count: usize) -> &[AtomicU64] {
        self.mapping.words(offset, count).expect(SHORT)
    }

    /// Where what lies.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The arrays.
    pub fn parts(&self) -> Parts<'_> {
        let (layout, counts) = (&self.layout, self.layout.counts());
        Parts {
            bits: self.mapping.words(layout.bits_bytes, counts.rows).expect(SHORT),
            areas: self.mapping.quarter_words(layout.areas_bytes, counts.areas).expect(SHORT),
            trees: self.mapping.half_words(layout.trees_bytes, counts.trees).expect(SHORT),
            slots: self.mapping.words(layout.slots_bytes, counts.slot_words).expect(SHORT),
        }
    }

    /// The guest's side in Rust.
    pub fn zone<T: Touch>(&self, touch: T) -> Zone<'_, T> {
        Zone::new(self.parts(), self.layout.frames, self.layout.cores, touch).expect(SHORT)
    }

    /// The guest's side in C.
    pub fn c_zone<T: Touch + Sync>(&self, touch: T) -> CZone<'_, T> {
        CZone::new(self, touch)
    }

    /// The host's side.
    pub fn host(&self) -> Host<'_> {
        let parts = self.parts();
        Host::new(parts.areas, parts.trees, self.layout.frames).expect(SHORT)
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

fn bytes(layout: &Layout) -> u64 {
    layout.total_bytes.next_multiple_of(4096)
}
