//! Returning hard-reclaimed huge frames, and ending the sharing.

use ebb_llfree::CHUNK_AREAS;
use ebb_pager::{Pager, Zeros};

use super::zone::Zone;
use super::{HyperAlloc, State};

impl HyperAlloc {
    /// Returns at most `want` hard-reclaimed huge frames to the guest, in the reverse order of the
    /// scan. They get memory when they are touched. Returns how many there were.
    pub fn give(&self, pager: &Pager, want: u64) -> u64 {
        let mut given = 0;
        for zone in self.zones.iter().rev() {
            if zone.host(&self.ram).is_none() {
                continue;
            }
            for index in hard(zone).rev() {
                if given == want {
                    break;
                }
                given += u64::from(self.give_one(pager, zone, index));
            }
            zone.publish_hard(&self.ram, zone.states.count().1);
        }
        given
    }

    fn give_one(&self, pager: &Pager, zone: &Zone, index: usize) -> bool {
        let Some(held) = pager.residency().lock_huge(zone.huge(index)) else { return false };
        if zone.states.get(index) != State::Hard {
            held.abandon();
            return false;
        }
        let host = zone.host_if_there(&self.ram);
        // If the guest has taken it against the rules, that is the guest's concern.
        let _ = host.map(|host| host.return_area(index));
        match held.is_empty() {
            true => {
                zone.states.set(index, State::Soft);
                held.settle(false);
            }
            // It was touched against the rules: its memory stays.
            false => {
                zone.states.set(index, State::Installed);
                if let Some(host) = host {
                    host.install(index);
                }
                held.abandon();
            }
        }
        true
    }

    /// Returns everything, has the pager bring it back, and tells the guest that nothing is
    /// reclaimed. Frames that stay non-resident ([`Zeros::Leave`]) get memory when they are touched.
    ///
    /// # Errors
    /// As [`ebb_pager::Returner::give_back_all`]. What is not back is still shared then.
    pub fn give_back_all(&self, pager: &Pager, zeros: Zeros) -> std::io::Result<u64> {
        self.give(pager, u64::MAX);
        let bytes = pager.returner().give_back_all(zeros)?;
        // No frame is empty by now, so no touch asks for the states meanwhile.
        for zone in &self.zones {
            if zone.host(&self.ram).is_none() {
                continue;
            }
            for index in reclaimed(zone) {
                zone.states.set(index, State::Installed);
                self.clear_evicted(zone, index);
            }
            zone.publish_hard(&self.ram, 0);
        }
        self.forget(pager);
        Ok(bytes)
    }
}

/// The zone's hard areas, as far as is known without locking them.
fn hard(zone: &Zone) -> impl DoubleEndedIterator<Item = usize> {
    let chunks = 0..zone.areas().div_ceil(CHUNK_AREAS);
    chunks.flat_map(|chunk| bits(chunk, zone.states.chunk(chunk).hard))
}

fn reclaimed(zone: &Zone) -> impl Iterator<Item = usize> {
    let chunks = 0..zone.areas().div_ceil(CHUNK_AREAS);
    chunks.flat_map(|chunk| bits(chunk, zone.states.chunk(chunk).reclaimed))
}

fn bits(chunk: usize, mask: u64) -> impl DoubleEndedIterator<Item = usize> {
    let set = (0..CHUNK_AREAS).filter(move |bit| mask >> bit & 1 != 0);
    set.map(move |bit| chunk * CHUNK_AREAS + bit)
}
