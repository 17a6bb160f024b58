//! What one controller finds out and another must act on. Controllers never call each other.

use ebb_pager::Zeros;
use ebb_vm::reach::Reach;

use super::Worker;
use super::size::Size;
use crate::support::open_files::OpenFiles;
use crate::vm::context::liveness::End;
use crate::vm::devices::Narrowed;
use crate::vm::hyperalloc::Wants;

impl Worker {
    /// Whether the guest is trusted and its kernel runs now. Inspects the guest if need be.
    pub(super) fn confirm(&mut self) -> bool {
        // A search takes long, and only refill threads have faults wait for room meanwhile.
        let searches = self.cx.guest.kernel().is_err();
        if searches
            && self.cx.marks().is_some()
            && let Err(error) = self.cx.expect_refills()
        {
            tracing::error!("the refill threads: {error}");
        }
        let runs = self.trust.look(&mut self.cx);
        if self.trust.has_lost_its_kernel(&self.cx) {
            self.lose_kernel();
        }
        let is_trusted = self.trust.settle(&mut self.cx, runs);
        if self.hyperalloc.share_again(&mut self.cx) {
            // The size counts from the initial memory, which QEMU may not have reported yet.
            if self.cx.capabilities.is_none() {
                self.resize.glance(&mut self.cx);
            }
            self.settle_shared_size();
        }
        is_trusted
    }

    /// Confirms the guest for a command that would be refused if it is unknown.
    pub(super) fn confirm_if_unknown(&mut self) {
        if self.cx.guest.kernel().is_err() {
            self.confirm();
        }
    }

    /// Acts on a reset if QEMU reported one, and on one that may have been missed.
    pub(super) fn notice_reset(&mut self) {
        if self.cx.qmp.hears_reset() {
            self.after_reset();
            return;
        }
        // A QEMU that waits for room answers nobody. A guest that is not trusted has nothing to lose,
        // but the operator is to know.
        let may_ask = !self.cx.waits();
        if self.cx.qmp.is_deaf(may_ask) && self.cx.guest.trusted_kernel().is_some() {
            self.trust.on_reset(&mut self.cx, "libvirt does not tell whether it was reset");
            self.trust.tell_pager(&mut self.cx);
        }
    }

    /// Acts on a liveness check that found that the trusted kernel does not run any more.
    pub(super) fn route(&mut self, ended: Option<End>) {
        match ended {
            Some(End::Reset) => self.after_reset(),
            Some(End::Unknown) => {
                let why = "its vCPUs do not all run the kernel that is known";
                tracing::info!("{why}");
                self.trust.on_reset(&mut self.cx, why);
                self.lose_kernel();
                self.trust.tell_pager(&mut self.cx);
            }
            None => {}
        }
    }

    /// Drops all that was known of the guest: nothing of it is true after a reset.
    fn after_reset(&mut self) {
        self.trust.on_reset(&mut self.cx, "it was reset and is booting");
        self.lose_kernel();
        self.hyperalloc.forget_reserve();
        self.resize.on_reset(&mut self.cx);
        self.trust.tell_pager(&mut self.cx);
    }

    /// Drops what was known of the kernel, because another one may run.
    fn lose_kernel(&mut self) {
        self.hyperalloc.on_reset(&self.cx);
        self.limit.on_reset();
        self.tiering.on_reset();
        self.trust.bring_back_for_next(&mut self.cx);
    }

    /// Starts a guest that waits before its first instruction until it is managed, or that was
    /// stopped until its memory is back.
    pub(super) fn begin(&mut self) {
        let waits = self.devices.must_stay_stopped(&self.cx) || self.trust.must_stay_stopped();
        if !self.cx.record.begin || waits {
            return;
        }
        self.cx.qmp.reconnect();
        if !self.cx.qmp.is_connected() {
            return;
        }
        match self.cx.guest_state().as_deref() {
            Some("paused" | "prelaunch") => {}
            // It goes on already; or it has left for another host, and must not run on both.
            Some("running" | "postmigrate") => {
                return self.cx.record.note(|record| record.begin = false);
            }
            // It is on its way to another state, or QEMU does not tell. The next tick asks again.
            _ => return,
        }
        match self.cx.command_guest("cont") {
            Ok(()) => self.cx.record.note(|record| record.begin = false),
            Err(error) => tracing::error!("its guest does not go on: {error}"),
        }
    }

    pub(super) fn look_at_devices(&mut self) {
        let narrowed = self.devices.look(&mut self.cx);
        self.settle(narrowed);
    }

    pub(super) fn glance_at_devices(&mut self) {
        let narrowed = self.devices.glance(&mut self.cx);
        self.settle(narrowed);
    }

    pub(super) fn keep_devices(&mut self, open: &mut OpenFiles) {
        let narrowed = self.devices.keep(&mut self.cx, open);
        self.settle(narrowed);
    }

    /// Brings back the memory that newly found devices may ask for.
    fn settle(&mut self, narrowed: Option<Narrowed>) {
        let Some(narrowed) = narrowed else { return };
        let back = match narrowed.reach {
            Reach::Nothing => self.hyperalloc.give_back_all(&self.cx, Zeros::Fill),
            _ => self.cx.pager.returner().give_back_in_use(),
        };
        let is_back = back.is_ok();
        self.devices.settle(&narrowed, back);
        if is_back {
            self.begin();
        }
    }

    /// Lends the controllers of the size, and acts on what they have seen of the guest's kernel.
    pub(super) fn with_size<T>(&mut self, act: impl FnOnce(&mut Size<'_>) -> T) -> T {
        let Worker { cx, resize, hyperalloc, .. } = self;
        let mut size = Size { cx, resize, hyperalloc, ended: None };
        let result = act(&mut size);
        let ended = size.ended;
        self.route(ended);
        result
    }

    /// Keeps the shared allocator at its part of the size on record; checks that now and then.
    pub(super) fn keep_shared_size(&mut self) {
        if self.hyperalloc.step_after(&self.cx).is_none() && self.hyperalloc.is_due() {
            self.settle_shared_size();
        }
    }

    fn settle_shared_size(&mut self) {
        match self.hyperalloc.wants(&self.cx) {
            Wants::Give => self.hyperalloc.give(&self.cx),
            Wants::Take if self.confirm() => self.with_size(|size| size.take_missing()),
            Wants::Take | Wants::Nothing => {}
        }
    }

    /// Does what is due of a monitoring.
    pub(super) fn keep_heat(&mut self) {
        if !self.tiering.may_be_due(&self.cx) {
            return;
        }
        let is_trusted = self.cx.guest.guest().is_ok() && self.confirm();
        let Worker { tiering, limit, cx, .. } = self;
        let evicted = limit.evicted();
        let mut before_forgetting = |cx: &_| limit.note_mapped(cx);
        let ended = tiering.monitor(cx, is_trusted, &mut before_forgetting, evicted);
        self.route(ended);
    }
}
