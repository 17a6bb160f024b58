//! Who is told of touches of unplugged memory.

use ebb_units::Gfn;

/// Who knows what a touch of unplugged memory means. Called on the fault path: no waiting, no
/// allocation.
pub trait Sentry: Send + Sync {
    /// A processor touches this frame, which is guarded and stays so until this returns; it finds
    /// zeros there for all that, or it would wait for ever.
    fn touched(&self, gfn: Gfn, write: bool);
}
