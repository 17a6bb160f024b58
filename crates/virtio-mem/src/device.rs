//! The device: virtio 1.2, section 5.15, all but its queue.
//!
//! A plug gives memory first, then writes the record, then tells the driver. An unplug writes the
//! record first, then takes the memory. So if a process dies in between, what the driver knows as
//! plugged has memory, and what the driver may use is recorded as plugged.

mod error;
mod options;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::{Config, F_ACPI_PXM, F_UNPLUGGED_INACCESSIBLE, Sizes};
use crate::geometry::Geometry;
use crate::guard::Guard;
use crate::memory::BlockMemory;
use crate::record::Record;
use crate::request::{BlockState, Named, RESPONSE_BYTES, Request, Response};
use crate::saved::{Change, Saved};
pub use error::{SizeError, StartError, Stopped};
pub use options::Options;

/// What a device works with.
pub struct DeviceParts {
    /// Gives blocks their memory, and takes it.
    pub memory: Box<dyn BlockMemory>,
    /// Keeps the device's state.
    pub record: Box<dyn Record>,
    /// Sends the driver a configuration change notification. The thread that calls the device calls
    /// this, without holding a lock.
    pub notify: Box<dyn Fn() + Send + Sync>,
}

/// A virtio-mem device. Any thread may call it; changes of blocks happen one after the other.
pub struct Device {
    geometry: Geometry,
    options: Options,
    guard: Arc<Guard>,
    config: Mutex<Config>,
    work: Mutex<Work>,
    notify: Box<dyn Fn() + Send + Sync>,
}

/// What is needed to change blocks, by one thread at a time.
struct Work {
    memory: Box<dyn BlockMemory>,
    record: Box<dyn Record>,
    last: Option<Change>,
    /// After a start and until the first request: the last change, whose answer the driver may not
    /// have seen. The driver then asks for it again.
    unanswered: Option<Change>,
    stopped: Option<Stopped>,
}

impl Work {
    fn check(&self) -> Result<(), Stopped> {
        self.stopped.clone().map_or(Ok(()), Err)
    }

    fn stop(&mut self, why: String) -> Stopped {
        tracing::error!("virtio-mem: stopped: {why}");
        let stopped = Stopped(why);
        self.stopped = Some(stopped.clone());
        stopped
    }
}

impl Device {
    /// Starts a device that goes on from `saved`. First its memory is made to agree with that.
    ///
    /// # Errors
    /// The memory cannot be changed, or the state cannot be kept.
    pub fn start(saved: Saved, options: Options, parts: DeviceParts) -> Result<Device, StartError> {
        let DeviceParts { memory, record, notify } = parts;
        let Saved { geometry, usable_bytes, requested_bytes, last, words } = saved;
        let guard = Arc::new(Guard::new(geometry));
        guard.blocks.load(&words).ok_or_else(|| Stopped("its state has other blocks".into()))?;
        guard.set_usable(usable_bytes);
        let plugged_bytes = guard.blocks.count() * geometry.block_bytes;
        let sizes = Sizes { usable_bytes, plugged_bytes, requested_bytes };
        let work = Work { memory, record, last, unanswered: last, stopped: None };
        let device = Device {
            geometry,
            options,
            guard,
            config: Mutex::new(Config::new(geometry, sizes)),
            work: Mutex::new(work),
            notify,
        };
        let mut work = device.work();
        device.settle(&mut *work.memory).map_err(StartError::Memory)?;
        device.keep(&mut work, sizes)?;
        drop(work);
        Ok(device)
    }

    /// Makes the memory agree with the record, whatever was begun before the last death.
    fn settle(&self, memory: &mut dyn BlockMemory) -> io::Result<()> {
        let runs = |plugged| self.guard.blocks.runs(plugged).into_iter();
        runs(false).try_for_each(|run| memory.unplug(self.geometry.frames(&run)))?;
        runs(true).try_for_each(|run| memory.plug(self.geometry.frames(&run), false))
    }

    /// Returns the device's region.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the device features to offer (section 5.15.3). The transport adds its own.
    pub fn features(&self) -> u64 {
        let pxm = self.geometry.node.map_or(0, |_| F_ACPI_PXM);
        pxm | if self.options.inaccessible { F_UNPLUGGED_INACCESSIBLE } else { 0 }
    }

    /// Notes the features that the driver has accepted.
    pub fn negotiated(&self, features: u64) {
        self.guard.set_inaccessible(features & self.features() & F_UNPLUGGED_INACCESSIBLE != 0);
    }

    /// Fills `bytes` with the configuration space from `offset` on, with zeros where it has no
    /// fields. It never waits for a request that is being served.
    pub fn read_config(&self, offset: u32, bytes: &mut [u8]) {
        self.config().read(offset, bytes);
    }

    /// Returns a number that changes whenever the configuration space does (section 2.5.1).
    pub fn generation(&self) -> u32 {
        self.config().generation()
    }

    /// Returns the current sizes.
    pub fn sizes(&self) -> Sizes {
        self.config().sizes()
    }

    /// Returns the guard, which tells what touches of the region mean.
    pub fn guard(&self) -> &Arc<Guard> {
        &self.guard
    }

    /// Sets the size that the guest should have, in bytes, and notifies the driver. From now on the
    /// driver cannot plug beyond that size. It decides itself when to give back what it has beyond.
    ///
    /// # Errors
    /// The device cannot have this size, and nothing has changed. Or the device has stopped.
    pub fn request_bytes(&self, requested_bytes: u64) -> Result<(), SizeError> {
        let Geometry { region_bytes, block_bytes, .. } = self.geometry;
        if !self.geometry.is_aligned(requested_bytes) {
            return Err(SizeError::Alignment { block_bytes });
        }
        if requested_bytes > region_bytes {
            return Err(SizeError::TooLarge { region_bytes });
        }
        let mut work = self.work();
        work.check()?;
        let before = self.sizes();
        // The usable region does not shrink, as its upper blocks may be plugged (section 5.15.4.2).
        let usable_bytes = before.usable_bytes.max(self.usable_for(requested_bytes));
        let sizes = Sizes { usable_bytes, requested_bytes, ..before };
        if sizes != before {
            self.keep(&mut work, sizes)?;
            self.show(sizes);
            drop(work);
            (self.notify)();
        }
        Ok(())
    }

    /// Answers a request. Takes the bytes that the device reads of a chain, and returns those that
    /// it writes to it. The driver must not see the answer before this returns.
    ///
    /// # Errors
    /// The device has stopped, and the driver gets no answer.
    pub fn handle(&self, request: &[u8]) -> Result<[u8; RESPONSE_BYTES], Stopped> {
        let response = match Request::parse(request) {
            Some(request) => self.answer(request)?,
            None => Response::Error,
        };
        Ok(response.to_bytes())
    }

    /// Answers a request that has been parsed already. See [`Device::handle`].
    ///
    /// # Errors
    /// The device has stopped, and the driver gets no answer.
    pub fn answer(&self, request: Request) -> Result<Response, Stopped> {
        let mut work = self.work();
        work.check()?;
        let done = work.unanswered.take();
        match request {
            Request::Plug(named) => self.plug(&mut work, named, done),
            Request::Unplug(named) => self.unplug(&mut work, named, done),
            Request::UnplugAll => self.unplug_all(&mut work),
            Request::State(named) => Ok(match self.blocks(named) {
                Some(blocks) => Response::AckState(self.guard.blocks.state(&blocks)),
                None => Response::Error,
            }),
        }
    }

    /// Handles a device reset by the driver. No block changes (section 5.15.5.2).
    pub fn reset(&self) {
        self.guard.set_inaccessible(false);
    }

    /// Section 5.15.6.3.
    fn plug(
        &self,
        work: &mut Work,
        named: Named,
        done: Option<Change>,
    ) -> Result<Response, Stopped> {
        let Some(blocks) = self.blocks(named) else { return Ok(Response::Error) };
        let change = Change { plugs: true, blocks: named };
        match self.guard.blocks.state(&blocks) {
            BlockState::Unplugged => {}
            BlockState::Plugged if done == Some(change) => return Ok(Response::Ack),
            _ => return Ok(Response::Error),
        }
        let frames = self.geometry.frames(&blocks);
        let Sizes { plugged_bytes, requested_bytes, .. } = self.sizes();
        if plugged_bytes + frames.bytes() > requested_bytes {
            return Ok(Response::Nack);
        }
        if let Err(error) = work.memory.plug(frames, self.options.prealloc) {
            tracing::warn!("virtio-mem: {frames:?} cannot be plugged: {error}");
            return Ok(Response::Busy);
        }
        self.guard.blocks.set(&blocks, true);
        self.changed(work, Some(change), self.sizes().usable_bytes)?;
        Ok(Response::Ack)
    }

    /// Section 5.15.6.4.
    fn unplug(
        &self,
        work: &mut Work,
        named: Named,
        done: Option<Change>,
    ) -> Result<Response, Stopped> {
        let Some(blocks) = self.blocks(named) else { return Ok(Response::Error) };
        let change = Change { plugs: false, blocks: named };
        match self.guard.blocks.state(&blocks) {
            BlockState::Plugged => {}
            BlockState::Unplugged if done == Some(change) => return Ok(Response::Ack),
            _ => return Ok(Response::Error),
        }
        self.take(work, &[blocks], Some(change), self.sizes().usable_bytes)
    }

    /// Section 5.15.6.5.
    fn unplug_all(&self, work: &mut Work) -> Result<Response, Stopped> {
        let usable_bytes = self.usable_for(self.sizes().requested_bytes);
        self.take(work, &self.guard.blocks.runs(true), None, usable_bytes)
    }

    /// Unplugs all of these plugged blocks, or none of them.
    fn take(
        &self,
        work: &mut Work,
        runs: &[Range<u64>],
        change: Option<Change>,
        usable_bytes: u64,
    ) -> Result<Response, Stopped> {
        let blocks = &self.guard.blocks;
        let are_plugged = || runs.iter().all(|run| blocks.state(run) == BlockState::Plugged);
        debug_assert!(are_plugged(), "{runs:?}: not all are plugged");
        let before = (work.last, self.sizes().usable_bytes);
        runs.iter().for_each(|run| self.guard.blocks.set(run, false));
        // The record comes before the memory. The driver does not know yet: it sees the old sizes.
        work.last = change;
        self.keep(work, self.count(usable_bytes))?;
        for (index, run) in runs.iter().enumerate() {
            if let Err(error) = work.memory.unplug(self.geometry.frames(run)) {
                tracing::warn!("virtio-mem: {run:?} cannot be unplugged: {error}");
                self.put_back(work, runs.get(..index).unwrap_or_default())?;
                runs.iter().for_each(|run| self.guard.blocks.set(run, true));
                self.changed(work, before.0, before.1)?;
                return Ok(Response::Busy);
            }
        }
        self.show(self.count(usable_bytes));
        Ok(Response::Ack)
    }

    /// Gives memory back to blocks that the driver is about to hear are still plugged.
    fn put_back(&self, work: &mut Work, runs: &[Range<u64>]) -> Result<(), Stopped> {
        let mut runs = runs.iter().map(|run| self.geometry.frames(run));
        let result = runs.try_for_each(|frames| work.memory.plug(frames, false));
        result.map_err(|error| work.stop(format!("memory does not come back: {error}")))
    }

    /// Records a change of memory that is done, and shows it to the driver.
    fn changed(
        &self,
        work: &mut Work,
        change: Option<Change>,
        usable_bytes: u64,
    ) -> Result<(), Stopped> {
        work.last = change;
        let sizes = self.count(usable_bytes);
        self.keep(work, sizes)?;
        self.show(sizes);
        Ok(())
    }

    fn keep(&self, work: &mut Work, sizes: Sizes) -> Result<(), Stopped> {
        let state = Saved {
            geometry: self.geometry,
            usable_bytes: sizes.usable_bytes,
            requested_bytes: sizes.requested_bytes,
            last: work.last,
            words: self.guard.blocks.words(),
        };
        debug_assert!(state.makes_sense(), "{state:?} would be refused at the next start");
        let result = work.record.keep(&state);
        result.map_err(|error| work.stop(format!("its state cannot be saved: {error}")))
    }

    fn show(&self, sizes: Sizes) {
        self.guard.set_usable(sizes.usable_bytes);
        self.config().set(sizes);
    }

    /// Returns the sizes, with the plugged blocks counted anew.
    fn count(&self, usable_bytes: u64) -> Sizes {
        let plugged_bytes = self.guard.blocks.count() * self.geometry.block_bytes;
        Sizes { usable_bytes, plugged_bytes, ..self.sizes() }
    }

    /// Returns the named blocks, if they are whole blocks of the usable region.
    fn blocks(&self, named: Named) -> Option<Range<u64>> {
        let Named { start, count } = named;
        self.geometry.blocks_at(start, count, self.sizes().usable_bytes)
    }

    fn usable_for(&self, requested_bytes: u64) -> u64 {
        if requested_bytes == 0 {
            return 0;
        }
        let wanted = requested_bytes.saturating_add(self.options.spare_bytes);
        // The region is made of whole blocks.
        wanted.min(self.geometry.region_bytes).next_multiple_of(self.geometry.block_bytes)
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn config(&self) -> MutexGuard<'_, Config> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
