//! The memory of one NUMA node as a tier.

use std::sync::Arc;

use ebb_sys::process::Process;
use ebb_units::{FrameRange, Gfn, Hva};
use ebb_vm::Ram;

use crate::ladder::Kind;
use crate::mover::Mover;
use crate::tier::{Outcome, Tier, TierError};

/// A node, for the pages that a VMM has mapped of its guest's RAM. What it has not mapped is
/// [`Outcome::Nothing`], also where the RAM's file has memory.
pub struct Node {
    number: u32,
    process: Arc<Process>,
    ram: Arc<Ram>,
    mover: Arc<Mover>,
}

impl Node {
    /// Node `number`, for the VM of this process.
    pub fn new(number: u32, process: Arc<Process>, ram: Arc<Ram>, mover: Arc<Mover>) -> Node {
        Node { number, process, ram, mover }
    }

    fn hva(&self, gfn: Gfn) -> Option<Hva> {
        Some(self.ram.hva_range(FrameRange::new(gfn, 1))?.start)
    }
}

impl Tier for Node {
    fn kind(&self) -> Kind {
        Kind::Node(self.number)
    }

    fn bring(&self, frames: &[Gfn]) -> Result<Vec<Outcome>, TierError> {
        let (places, pages): (Vec<usize>, Vec<Hva>) = { frames.iter().enumerate() }
            .filter_map(|(at, gfn)| Some((at, self.hva(*gfn)?)))
            .unzip();
        // What is not RAM holds no page.
        let mut outcomes = vec![Outcome::Nothing; frames.len()];
        let moved = self.mover.run(&self.process, &pages, self.number)?;
        for (at, outcome) in places.into_iter().zip(moved) {
            outcomes.get_mut(at).into_iter().for_each(|to| *to = outcome);
        }
        Ok(outcomes)
    }
}
