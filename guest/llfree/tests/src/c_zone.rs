//! The C library, behind safe calls.

use std::ffi::{c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr;

use ebb_llfree::{Error, Fill, Header, Kind, Layout, Touch};

use crate::{Allocator, Region};

/// `struct llfree` of `llfree.h`.
#[repr(C)]
struct Raw {
    bits: *mut c_void,
    areas: *mut c_void,
    trees: *mut c_void,
    slots: *mut c_void,
    frames: u64,
    cores: u32,
    area_count: u32,
    tree_count: u32,
    touch: Option<TouchFn>,
    context: *mut c_void,
}

/// `struct llfree_layout`.
#[repr(C)]
#[derive(Default)]
struct RawLayout {
    bits: u64,
    areas: u64,
    trees: u64,
    slots: u64,
    total: u64,
}

/// `struct llfree_header`.
#[repr(C)]
struct RawHeader {
    base_frame: u64,
    frames: u64,
    cores: u32,
    bits: u64,
    areas: u64,
    trees: u64,
    slots: u64,
}

type TouchFn = extern "C" fn(*mut c_void, u64);

// SAFETY: as declared in llfree.h.
unsafe extern "C" {
    fn llfree_layout(frames: u64, cores: u32, layout: *mut RawLayout) -> c_int;
    fn llfree_write_header(words: *mut c_void, header: *const RawHeader) -> c_int;
    fn llfree_init(
        zone: *mut Raw,
        region: *mut c_void,
        frames: u64,
        cores: u32,
        touch: Option<TouchFn>,
        context: *mut c_void,
    ) -> c_int;
    fn llfree_format(zone: *mut Raw, free: bool);
    fn llfree_get(zone: *mut Raw, order: c_uint, kind: c_uint, core: c_uint) -> i64;
    fn llfree_get_at(zone: *mut Raw, frame: u64, order: c_uint) -> c_int;
    fn llfree_put(zone: *mut Raw, frame: u64, order: c_uint) -> c_int;
    fn llfree_drain(zone: *mut Raw);
    fn llfree_is_free(zone: *mut Raw, frame: u64, order: c_uint) -> bool;
    fn llfree_free_frames(zone: *mut Raw) -> u64;
    fn llfree_free_areas(zone: *mut Raw) -> u64;
    fn llfree_verify(zone: *mut Raw, at: *mut u64) -> c_int;
}

/// The guest's side in C, over a region that outlives it.
pub struct CZone<'a, T = ()> {
    raw: Box<Raw>,
    /// What `raw.context` points to.
    _touch: Box<T>,
    _region: PhantomData<&'a Region>,
}

// SAFETY: the library writes nothing of `raw` after `llfree_init`, and the
// region by atomic operations only; `T` is called from many threads.
unsafe impl<T: Sync> Sync for CZone<'_, T> {}

extern "C" fn touch<T: Touch>(context: *mut c_void, frame: u64) {
    // SAFETY: `CZone::new` made it point to the `T` in the zone's box, which
    // lives as long as the zone that is being called.
    let touch = unsafe { &*context.cast::<T>() };
    touch.touch(frame);
}

impl<'a, T: Touch + Sync> CZone<'a, T> {
    pub(crate) fn new(region: &'a Region, touched: T) -> CZone<'a, T> {
        let layout = region.layout();
        let boxed = Box::new(touched);
        let mut raw = Box::new(Raw {
            bits: ptr::null_mut(),
            areas: ptr::null_mut(),
            trees: ptr::null_mut(),
            slots: ptr::null_mut(),
            frames: 0,
            cores: 0,
            area_count: 0,
            tree_count: 0,
            touch: None,
            context: ptr::null_mut(),
        });
        let (start, context) = (region.mapping().address().0, ptr::from_ref(&*boxed));
        // SAFETY: the region is mapped, aligned to pages and as long as its
        // layout, for as long as 'a.
        let code = unsafe {
            llfree_init(
                &mut *raw,
                start as *mut c_void,
                layout.frames,
                layout.cores,
                Some(touch::<T>),
                context.cast_mut().cast(),
            )
        };
        assert_eq!(code, 0, "a layout that Rust takes, C takes");
        CZone { raw, _touch: boxed, _region: PhantomData }
    }

    /// As [`ebb_llfree::Zone::format`].
    pub fn format(&self, fill: Fill) {
        // SAFETY: as for `Allocator`, below.
        unsafe { llfree_format(self.zone(), fill == Fill::Free) }
    }

    fn zone(&self) -> *mut Raw {
        ptr::from_ref(&*self.raw).cast_mut()
    }
}

/// What the C side makes of a size: bits, areas, trees, slots, total.
pub fn c_layout(frames: u64, cores: u32) -> Option<[u64; 5]> {
    let mut layout = RawLayout::default();
    // SAFETY: `layout` is one, and written only during the call.
    let code = unsafe { llfree_layout(frames, cores, &mut layout) };
    (code == 0).then_some([layout.bits, layout.areas, layout.trees, layout.slots, layout.total])
}

/// Has the C side write a header into a region; whether it would.
pub fn c_write_header(region: &Region, header: &Header) -> bool {
    let &Header { base_frame, frames, cores, bits, areas, trees, slots } = header;
    let raw = RawHeader { base_frame, frames, cores, bits, areas, trees, slots };
    let words = region.mapping().address().0 as *mut c_void;
    // SAFETY: a region begins with a header's words.
    unsafe { llfree_write_header(words, &raw) == 0 }
}

/// The layout in the C side's order.
pub fn offsets(layout: &Layout) -> [u64; 5] {
    [
        layout.bits_bytes,
        layout.areas_bytes,
        layout.trees_bytes,
        layout.slots_bytes,
        layout.total_bytes,
    ]
}

fn error(code: i64) -> Error {
    match code {
        -1 => Error::Order,
        -2 => Error::Frame,
        -3 => Error::Memory,
        -4 => Error::Taken,
        -5 => Error::NotAllocated,
        _ => unreachable!("llfree.h has no error {code} for this call"),
    }
}

fn result(code: c_int) -> Result<(), Error> {
    if code == 0 { Ok(()) } else { Err(error(code.into())) }
}

// SAFETY, of all calls here: `raw` was filled by `llfree_init` and points into
// a region that outlives it; the library checks frames and orders, and changes
// the region by atomic operations only.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<T: Touch + Sync> Allocator for CZone<'_, T> {
    #[inline]
    fn get(&self, order: u8, kind: Kind, core: u32) -> Result<u64, Error> {
        let frame = unsafe { llfree_get(self.zone(), order.into(), kind as c_uint, core) };
        if frame >= 0 { Ok(frame as u64) } else { Err(error(frame)) }
    }

    fn get_at(&self, frame: u64, order: u8) -> Result<(), Error> {
        result(unsafe { llfree_get_at(self.zone(), frame, order.into()) })
    }

    #[inline]
    fn put(&self, frame: u64, order: u8) -> Result<(), Error> {
        result(unsafe { llfree_put(self.zone(), frame, order.into()) })
    }

    fn drain(&self) {
        unsafe { llfree_drain(self.zone()) }
    }

    fn is_free(&self, frame: u64, order: u8) -> bool {
        unsafe { llfree_is_free(self.zone(), frame, order.into()) }
    }

    fn free_frames(&self) -> u64 {
        unsafe { llfree_free_frames(self.zone()) }
    }

    fn free_areas(&self) -> usize {
        unsafe { llfree_free_areas(self.zone()) as usize }
    }

    fn verify(&self) -> Result<u64, String> {
        let mut at = 0;
        match unsafe { llfree_verify(self.zone(), &mut at) } {
            0 => Ok(self.free_frames()),
            code => Err(format!("llfree_verify: {code} at {at}")),
        }
    }
}
