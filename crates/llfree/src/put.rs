//! Putting blocks.

use crate::area::Area;
use crate::error::Error;
use crate::layout::{AREA_FRAMES, AREA_ROWS, HUGE_ORDER};
use crate::rows;
use crate::zone::{Touch, Zone};

impl<T: Touch> Zone<'_, T> {
    /// Frees a block. Parts of a greater block may be freed one by one.
    ///
    /// # Errors
    /// There is no such block, or it is not allocated as a whole. The atomic operation that frees
    /// the block finds that out: if two threads free it at once, one gets the error.
    #[inline]
    pub fn put(&self, frame: u64, order: u8) -> Result<(), Error> {
        self.check(frame, order)?;
        let index = (frame / AREA_FRAMES) as usize;
        match order {
            0..HUGE_ORDER => self.put_part(index, (frame % AREA_FRAMES) as usize, order),
            HUGE_ORDER => self.put_area(index),
            _ => self.put_pair(index),
        }
    }

    #[inline]
    fn put_part(&self, index: usize, first: usize, order: u8) -> Result<(), Error> {
        let mut seen = self.counters.area(index).ok_or(Error::Frame)?;
        if seen.is_allocated() {
            seen = self.split(index, seen)?;
        }
        let freed = rows::give(&self.bits[index], first, order, seen.flip());
        if freed == 0 {
            return Err(Error::NotAllocated);
        }
        let counted = self.counters.update_from(index, seen, |area| {
            // The area was inverted since, so the freed bits did not belong to the caller.
            if area.flip() == seen.flip() { area.plus(freed) } else { None }
        });
        if counted.is_none() {
            rows::take_at(&self.bits[index], first, order, seen.flip());
        }
        if counted.is_some() && freed == 1 << order { Ok(()) } else { Err(Error::NotAllocated) }
    }

    /// Makes each frame of the area allocated by itself. The bits already say so.
    #[cold]
    fn split(&self, index: usize, mut seen: Area) -> Result<Area, Error> {
        while seen.is_allocated() {
            if self.is_hosts(index, seen) {
                return Err(Error::NotAllocated);
            }
            match self.counters.replace(index, seen, seen.split()) {
                Ok(()) => seen = seen.split(),
                Err(now) => seen = now,
            }
        }
        Ok(seen)
    }

    fn put_area(&self, index: usize) -> Result<(), Error> {
        let given = self.counters.update(index, |area| {
            let whole = area.is_allocated() && !self.is_hosts(index, area);
            whole.then_some(area.given_back())
        });
        match given {
            Some(_) => Ok(()),
            None if self.counters.area(index).is_some_and(Area::is_allocated) => {
                Err(Error::NotAllocated)
            }
            None => self.put_part(index, 0, HUGE_ORDER),
        }
    }

    /// Whether the area is hard-reclaimed: allocated, but its bits mean "free".
    #[inline(always)]
    fn is_hosts(&self, index: usize, area: Area) -> bool {
        area.is_evicted() && rows::is_free(&self.bits[index], 0, 0, area.flip())
    }

    fn put_pair(&self, index: usize) -> Result<(), Error> {
        if !self.is_taken(index) || !self.is_taken(index + 1) {
            return Err(Error::NotAllocated);
        }
        self.put_area(index)?;
        self.put_area(index + 1)
    }

    /// Whether the guest has allocated the whole area.
    fn is_taken(&self, index: usize) -> bool {
        let Some(area) = self.counters.area(index) else { return false };
        rows::are_taken(&self.bits[index], 0, AREA_ROWS, area.flip())
    }

    /// Gives up claims on frames of an area.
    pub(crate) fn give_back(&self, index: usize, claims: u16) {
        if claims > 0 {
            self.counters.update(index, |area| area.plus(claims));
        }
    }
}
