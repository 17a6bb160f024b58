//! Asking the guest to free what it can do without.

use super::HyperAlloc;

impl HyperAlloc {
    /// Asks for so many frames, in the largest zone.
    pub fn ask_purge(&self, frames: u64) {
        if let Some(zone) = self.zones.iter().max_by_key(|zone| zone.span().count) {
            zone.ask_purge(&self.ram, frames);
        }
    }

    /// Whether the guest has tried all that it was asked for, with or without success.
    pub fn has_purged(&self) -> bool {
        self.zones.iter().all(|zone| zone.has_purged(&self.ram))
    }
}
