//! A VM in the pool: its limit is what the pool gives it.

use crate::heat::Heat;
use crate::limit::floor_bytes;
use crate::pool::{Member, Share};
use crate::problem::{Answer, failed, not_allowed};
use crate::worker::State;
use ebb_units::Bytes;

impl State {
    /// Puts the VM into the pool, with its share as the first limit, or takes it out, and
    /// lifts the limit.
    pub(crate) fn set_share(&mut self, share: Option<Share>) -> Answer<()> {
        let was = self.held.record.share;
        let Some(share) = share else {
            if was.is_none() {
                return Err(not_allowed(format!(
                    "{} is not in the pool: ebb pool shows who is",
                    self.held.record.name
                )));
            }
            return self.set_limit_on_record(None, None);
        };
        self.may_have(share)?;
        self.put_on_record(|record| record.evicts = true)?;
        self.held.pager.watch_all().map_err(failed("watching the VM's memory"))?;
        if was.is_some() {
            // What it may have now the pool says in a moment.
            return self.put_on_record(|record| record.share = Some(share));
        }
        self.set_limit_on_record(Some(share), Some(share.bytes))
    }

    fn may_have(&mut self, share: Share) -> Answer<()> {
        if let Some(tiers) = &self.held.record.tiers {
            return Err(not_allowed(format!(
                "its tiers, {}, say how much of it is in memory: a share is for a VM started \
                 without --tier",
                tiers.ladder
            )));
        }
        let floor = floor_bytes(self.memory_bytes());
        if share.lower_bytes() < floor {
            return Err(not_allowed(format!(
                "a lower limit of {} is below what keeps this guest alive: give a share of {} or \
                 more, or a higher --lower",
                Bytes(share.lower_bytes()),
                Bytes(floor.saturating_mul(100) / u64::from(share.lower_percent.max(1)) + 1)
            )));
        }
        self.look_at_devices();
        self.may_evict()?;
        self.ask_in_flight()
    }

    /// What the pool lets it have from now on; none: all of its memory.
    pub(crate) fn allow(&mut self, limit_bytes: Option<u64>) {
        let share = self.held.record.share;
        if share.is_none() || self.held.record.limit_bytes == limit_bytes {
            return;
        }
        if let Err(error) = self.set_limit_on_record(share, limit_bytes) {
            tracing::error!("{}: its share of the pool: {error}", self.held.record.name);
        }
    }

    fn set_limit_on_record(&mut self, share: Option<Share>, bytes: Option<u64>) -> Answer<()> {
        let memory_bytes = self.memory_bytes();
        self.put_on_record(|record| {
            record.share = share;
            record.limit_bytes = bytes.filter(|&bytes| bytes < memory_bytes);
            (record.low_bytes, record.high_bytes) = (None, None);
        })?;
        self.apply_limit();
        Ok(())
    }

    /// What the pool wants to know.
    pub(crate) fn member(&self) -> Answer<Option<Member>> {
        let Some(share) = self.held.record.share else { return Ok(None) };
        let held_bytes = self.held.pager.taken_bytes().map_err(failed("the VM's RAM"))?;
        let heat = self.monitor.recent_heat();
        Ok(Some(Member {
            share,
            held_bytes,
            limit_bytes: self.held.record.limit_bytes,
            hot_bytes: heat.map(Heat::reused_bytes),
            unseen_bytes: match (heat, &self.limiter) {
                (Some(heat), Some(limiter)) if heat.is_by_guest() => limiter.kernel_bytes(),
                _ => 0,
            },
            memory_bytes: self.memory_bytes(),
        }))
    }
}
