//! What VMs did in the last minutes, as this program saw it.

use std::collections::{BTreeMap, VecDeque};

use ebb_api::{Top, TopVm, VmName};

/// Most moments that are remembered of a VM.
const POINTS_MOST: usize = 600;
/// Most moments of all VMs together.
const ALL_POINTS_MOST: usize = 500_000;

/// A VM at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Point {
    pub resident_bytes: u64,
    pub evicted_bytes: u64,
    pub faults: u64,
    pub refaulted_bytes: u64,
}

/// The last moments of all VMs.
#[derive(Default)]
pub struct Trails(BTreeMap<VmName, VecDeque<Point>>);

impl Trails {
    /// Adds a moment, and forgets VMs that are no longer there.
    pub fn add(&mut self, top: &Top) {
        let most = POINTS_MOST.min(ALL_POINTS_MOST / top.vms.len().max(1)).max(1);
        let mut before = std::mem::take(&mut self.0);
        for vm in &top.vms {
            let mut trail = before.remove(&vm.name).unwrap_or_default();
            trail.push_back(point(vm));
            let excess = trail.len().saturating_sub(most);
            trail.drain(..excess);
            self.0.insert(vm.name.clone(), trail);
        }
    }

    /// The last moments of a VM, the latest last.
    pub fn of(&self, vm: &VmName, count: usize) -> Vec<Point> {
        let Some(trail) = self.0.get(vm) else { return Vec::new() };
        trail.iter().skip(trail.len().saturating_sub(count)).copied().collect()
    }
}

fn point(vm: &TopVm) -> Point {
    let parts = vm.parts.unwrap_or_default();
    Point {
        resident_bytes: parts.resident_bytes(),
        evicted_bytes: parts.evicted_bytes(),
        faults: vm.faults_per_s.unwrap_or(0),
        refaulted_bytes: vm.refaulted_bytes_per_s.unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples::{top, vm};

    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut trails, web) = (Trails::default(), "web".parse().unwrap());
        for faults in 0..2 * POINTS_MOST as u64 {
            let mut figures = top(vec![vm("web"), vm("db")]);
            figures.vms[0].faults_per_s = Some(faults);
            trails.add(&figures);
        }
        let all = trails.of(&web, usize::MAX);
        assert_eq!(all.len(), POINTS_MOST);
        assert_eq!(all.last().unwrap().faults, 2 * POINTS_MOST as u64 - 1);
        assert_eq!(trails.of(&web, 2).len(), 2);
        trails.add(&top(vec![vm("db")]));
        assert!(trails.of(&web, usize::MAX).is_empty());
    }
}
