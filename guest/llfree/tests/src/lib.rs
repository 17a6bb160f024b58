//! Both sides of the allocator behind one trait, for tests and benchmarks: the
//! C of the guest and the Rust of the host, over one region of shared memory.
//!
//! Not a part of the product, and the one crate beside `ebb-sys` with `unsafe`
//! in it: calls of the C library (`docs/decisions/0015-*`).

mod c_zone;
mod region;

pub use c_zone::{CZone, c_layout, c_write_header, offsets};
pub use region::Region;

use ebb_llfree::{Error, Kind, Touch, Zone};

/// What a guest does, in either language.
pub trait Allocator: Sync {
    /// As [`Zone::get`].
    ///
    /// # Errors
    /// As there, and so below.
    fn get(&self, order: u8, kind: Kind, core: u32) -> Result<u64, Error>;
    /// As [`Zone::get_at`].
    ///
    /// # Errors
    /// As there.
    fn get_at(&self, frame: u64, order: u8) -> Result<(), Error>;
    /// As [`Zone::put`].
    ///
    /// # Errors
    /// As there.
    fn put(&self, frame: u64, order: u8) -> Result<(), Error>;
    /// As [`Zone::drain`].
    fn drain(&self);
    /// As [`Zone::is_free`]; false where there is no such block.
    fn is_free(&self, frame: u64, order: u8) -> bool;
    /// As [`Zone::free_frames`].
    fn free_frames(&self) -> u64;
    /// As [`Zone::free_areas`].
    fn free_areas(&self) -> usize;
    /// As [`Zone::verify`]: the free frames, or what disagrees, in words.
    ///
    /// # Errors
    /// As there.
    fn verify(&self) -> Result<u64, String>;
}

impl<T: Touch + Sync> Allocator for Zone<'_, T> {
    #[inline]
    fn get(&self, order: u8, kind: Kind, core: u32) -> Result<u64, Error> {
        self.get(order, kind, core)
    }

    fn get_at(&self, frame: u64, order: u8) -> Result<(), Error> {
        self.get_at(frame, order)
    }

    #[inline]
    fn put(&self, frame: u64, order: u8) -> Result<(), Error> {
        self.put(frame, order)
    }

    fn drain(&self) {
        self.drain();
    }

    fn is_free(&self, frame: u64, order: u8) -> bool {
        self.is_free(frame, order).unwrap_or(false)
    }

    fn free_frames(&self) -> u64 {
        self.free_frames()
    }

    fn free_areas(&self) -> usize {
        self.free_areas()
    }

    fn verify(&self) -> Result<u64, String> {
        self.verify().map_err(|what| what.to_string())
    }
}
