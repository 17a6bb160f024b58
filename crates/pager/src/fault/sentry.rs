//! What is told of touches of unplugged memory.

use ebb_units::Gfn;

/// Knows what a touch of unplugged memory means. Called on the fault path: it must not wait or
/// allocate.
pub trait Sentry: Send + Sync {
    /// A vCPU touches this frame, which is unplugged and stays so until this returns. The vCPU then
    /// finds zeros there, as it would otherwise wait for ever.
    fn touched(&self, gfn: Gfn, write: bool);
}
