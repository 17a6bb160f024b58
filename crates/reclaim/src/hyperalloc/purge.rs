//! Asking the guest to free its caches.

use super::HyperAlloc;

impl HyperAlloc {
    /// Asks for `frames` frames, in the largest zone.
    pub fn ask_purge(&self, frames: u64) {
        if let Some(zone) = self.zones.iter().max_by_key(|zone| zone.span().count) {
            zone.ask_purge(&self.ram, frames);
        }
    }

    /// Asks for the least that can be asked for, in each zone. The guest compacts its free memory
    /// after that.
    pub fn ask_to_compact(&self) {
        self.zones.iter().for_each(|zone| zone.ask_purge(&self.ram, 1));
    }

    /// Whether the guest has tried all that it was asked for, with or without success.
    pub fn has_purged(&self) -> bool {
        self.zones.iter().all(|zone| zone.has_purged(&self.ram))
    }
}
