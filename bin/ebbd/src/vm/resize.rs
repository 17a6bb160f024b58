//! A VM's size, by whatever can change it. The part of a shared allocator is in `vm::reclaim`.

mod blocked;
mod progress;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ebb_api::{
    BalloonStatus, OnViolation, ResizeReport, ResizeRequest, SizeMechanism, SizeState, SizeStatus,
};
use ebb_policy::need::Figures;
use ebb_policy::resize::{self, Driver, Mechanism, Offer, Plan, Refusal, Wish};
use ebb_reclaim::limit::marks::floor_bytes;
use ebb_units::{Bytes, FRAME_BYTES, HUGE_BYTES};
use ebb_vm::balloon;

use self::progress::Progress;
use super::context::VmContext;
use super::context::capabilities::Capabilities;
use super::context::shared_part::{Moved, SharedPart};
use crate::model::api_error::{Answer, ApiError, failed, not_allowed};
use crate::model::record::SizeRecord;
use crate::support::nanoseconds::nanoseconds;

/// Time between two looks at a size that does not move, and at the guest's need.
const STEP_EVERY: Duration = Duration::from_secs(1);
/// Seconds between two figures of the guest while its size is to change.
const POLL_BUSY_S: u64 = 1;
/// Seconds between two figures of the guest while its size stays.
const POLL_IDLE_S: u64 = 5;
/// Figures older than this, in seconds, do not tell whether the guest is under pressure now.
const PRESSURE_AGE_S: u64 = 5;
/// A guest that has told no figures for this long tells none.
const SILENCE: Duration = Duration::from_secs(5);
/// Memory that Linux takes out of its balloon at once before it kills a process.
const OOM_PIECE_BYTES: u64 = 1 << 20;

/// The controller of one VM's size.
#[derive(Default)]
pub struct Resize {
    /// When the last step was made.
    stepped: Option<Instant>,
    progress: Option<Progress>,
    /// What the balloon was last told to hold, in bytes.
    asked_bytes: Option<u64>,
    /// The most that the balloon has held since it was last told, in bytes.
    most_bytes: u64,
    /// How often the balloon was emptied because the guest needed that.
    releases: u64,
    /// Seconds between two figures that the guest was asked for.
    polled_s: Option<u64>,
    /// What the shared allocator was not told yet, even if a later request failed.
    goal: SharedGoal,
}

/// A size that this VM can have, before anything is done for it.
pub struct Prepared {
    plan: Plan,
    offer: Offer,
    wish: Wish,
}

impl Prepared {
    /// Whether the shared allocator is to bring the VM to that size.
    pub fn is_by_sharing(&self) -> bool {
        self.plan.mechanism == Mechanism::HyperAlloc
    }
}

/// Whether the shared allocator is to make for another part of the size than before.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[must_use]
pub enum SharedGoal {
    /// The part is as before.
    #[default]
    Same,
    /// The part is another one, and on record.
    New,
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Resize {
    /// Asks the VMM by what the size can change.
    ///
    /// # Errors
    /// The VMM does not tell.
    pub fn look(&mut self, cx: &mut VmContext) -> Answer<()> {
        cx.qmp.reconnect();
        let qmp = cx.qmp.socket();
        let qmp = qmp.ok_or_else(|| not_allowed("QEMU's QMP socket does not answer"))?;
        let found = Capabilities::ask(qmp, &cx.growth).map_err(not_allowed)?;
        let wanted_s = if cx.record.size.is_some() { POLL_BUSY_S } else { POLL_IDLE_S };
        let ready = found.balloon_offer().is_some_and(|balloon| balloon.driver != Driver::Absent);
        if let Some(balloon) = found.balloon.as_ref().filter(|_| ready)
            && self.polled_s != Some(wanted_s)
        {
            balloon::poll_stats(qmp, balloon, wanted_s).map_err(not_allowed)?;
            self.polled_s = Some(wanted_s);
        }
        cx.capabilities = Some(found);
        Ok(())
    }

    /// Does as [`Resize::look`], for a caller that does not depend on it.
    pub fn glance(&mut self, cx: &mut VmContext) {
        if let Err(error) = self.look(cx) {
            tracing::debug!("{}: its size: {error}", cx.name());
        }
    }

    /// Finds out how the VM can be brought to another size. The guest was confirmed before, if that
    /// was possible.
    ///
    /// # Errors
    /// The VM cannot have that size.
    pub fn prepare(&self, cx: &VmContext, wish: Wish, shared: &SharedPart) -> Answer<Prepared> {
        cx.may_take()?;
        let offer = offer(cx, shared);
        let plan = plan(&offer, &wish);
        let plan = plan.and_then(|plan| plan.check_drivers(&offer).map(|()| plan));
        let plan = plan.map_err(|refusal| match cx.guest.guest() {
            Err(why) if is_about_the_guest(&refusal) => {
                not_allowed(format!("{refusal}; the guest is not trusted: {why}"))
            }
            _ => not_allowed(refusal),
        })?;
        Ok(Prepared { plan, offer, wish })
    }

    /// Begins to bring the VM to that size.
    ///
    /// # Errors
    /// The record cannot be written; then nothing has changed.
    pub fn begin(
        &mut self,
        cx: &mut VmContext,
        request: ResizeRequest,
        prepared: &Prepared,
    ) -> Answer<SharedGoal> {
        let Prepared { plan, offer, wish } = prepared;
        let resident = cx.pager.ram().resident_bytes().map_err(failed("the VM's RAM"))?;
        let shared_bytes = shared_bytes(cx, offer, plan);
        // In one change: if it cannot be written, nothing is done for the size.
        cx.record.change(|record| {
            record.on_violation = request.on_violation.unwrap_or(record.on_violation);
            record.size =
                Some(SizeRecord { bytes: wish.bytes, node: request.node, by: request.by });
            if prepared.is_by_sharing() {
                record.size_bytes = shared_bytes;
            }
        })?;
        self.progress = Some(Progress::new(plan, offer.size_of(wish), resident, now_s()));
        Ok(if prepared.is_by_sharing() { SharedGoal::New } else { SharedGoal::Same })
    }

    /// Makes the present size the one that stays. [`Resize::take_goal`] then returns what the
    /// shared allocator is to make for.
    ///
    /// # Errors
    /// QEMU does not obey, or the record cannot be written.
    pub fn stay(
        &mut self,
        cx: &mut VmContext,
        on_violation: Option<OnViolation>,
        shared: &SharedPart,
    ) -> Answer<ResizeReport> {
        let offer = offer(cx, shared);
        let now = Plan {
            mechanism: Mechanism::VirtioMem,
            reason: "it stays as it is".into(),
            requested_bytes: offer.devices.iter().map(|device| device.plugged_bytes).collect(),
            ballooned_bytes: offer.ballooned_bytes(),
            hard_bytes: offer.hard_bytes.unwrap_or(0),
        };
        self.apply(cx, &offer, &now).map_err(not_allowed)?;
        let stopped_by = no_more(cx.record.size);
        cx.record.change(|record| {
            record.on_violation = on_violation.unwrap_or(record.on_violation);
            record.size = None;
        })?;
        let size = offer.size_bytes();
        self.progress = None;
        Ok(ResizeReport {
            bytes: size,
            wanted_bytes: size,
            node: None,
            mechanism: SizeMechanism::VirtioMem,
            reason: now.reason,
            state: SizeState::Off,
            least_bytes: None,
            taken_bytes: 0,
            emptied_bytes: 0,
            returned_bytes: 0,
            purges: 0,
            duration_ns: 0,
            stopped_by,
        })
    }

    /// Returns what the shared allocator was not told yet, and counts it as told.
    pub fn take_goal(&mut self) -> SharedGoal {
        std::mem::take(&mut self.goal)
    }

    /// Whether a step towards the size on record is due.
    pub fn is_due(&self, cx: &VmContext, shared: &SharedPart) -> bool {
        if cx.record.size.is_none() || cx.waits() {
            return false;
        }
        let since = self.stepped.is_none_or(|stepped| stepped.elapsed() >= STEP_EVERY);
        since || self.state(cx, shared) == SizeState::Moving
    }

    /// Makes a step towards the size on record.
    pub fn pursue(&mut self, cx: &mut VmContext, shared: &SharedPart) -> SharedGoal {
        self.stepped = Some(Instant::now());
        if let Err(error) = self.take_step(cx, shared) {
            tracing::debug!("{}: its size: {error}", cx.name());
            self.note_failure(&error);
        }
        self.take_goal()
    }

    /// Notes why a step could not be made.
    pub fn note_failure(&mut self, error: &ApiError) {
        if let Some(progress) = &mut self.progress {
            progress.failure = Some(error.to_string());
        }
    }

    fn take_step(&mut self, cx: &mut VmContext, shared: &SharedPart) -> Answer<()> {
        let Some(wish) = wish(cx) else { return Ok(()) };
        cx.may_take()?;
        self.look(cx)?;
        let offer = offer(cx, shared);
        self.begin_progress(cx, &offer, &wish)?;
        let pressed = self.is_pressed(cx, &offer);
        let figures = self.figures(cx);
        let Some(progress) = &mut self.progress else { return Ok(()) };
        progress.saw(offer.size_of(&wish), wish.bytes, now_s());
        if pressed && offer.ballooned_bytes() > 0 && progress.rests_for().is_none() {
            progress.rest();
            self.releases += 1;
        }
        let bytes = match figures {
            // The driver unplugs what the guest can do without, and nothing else.
            Told::Nobody if progress.mechanism == Mechanism::VirtioMem => wish.bytes,
            Told::Nobody | Told::NotYet => progress.step(wish.bytes, None, piece_bytes(&offer)),
            Told::Figures(figures) => progress.step(wish.bytes, Some(figures), piece_bytes(&offer)),
        };
        let bytes = if progress.mechanism == Mechanism::HyperAlloc { wish.bytes } else { bytes };
        let rests = progress.rests_for().is_some();
        let mut plan = plan(&offer, &Wish { bytes, ..wish }).map_err(not_allowed)?;
        if rests {
            plan.ballooned_bytes = 0;
        }
        if pressed || rests {
            let devices = plan.requested_bytes.iter_mut().zip(&offer.devices);
            devices.for_each(|(bytes, device)| *bytes = (*bytes).max(device.plugged_bytes));
        }
        let told = self.apply(cx, &offer, &plan);
        if let Some(progress) = &mut self.progress {
            progress.failure = told.as_ref().err().map(ToString::to_string);
        }
        told.map_err(not_allowed)
    }

    /// Begins the progress, if the process before this one was on its way to the size.
    fn begin_progress(&mut self, cx: &VmContext, offer: &Offer, wish: &Wish) -> Answer<()> {
        if self.progress.is_none() {
            let plan = plan(offer, wish).map_err(not_allowed)?;
            let resident = cx.pager.ram().resident_bytes();
            let resident = resident.map_err(failed("the VM's RAM"))?;
            self.progress = Some(Progress::new(&plan, offer.size_of(wish), resident, now_s()));
        }
        Ok(())
    }

    /// Whether the guest is about to run out of memory: it says so, or it has taken some out of its
    /// balloon by itself.
    fn is_pressed(&mut self, cx: &VmContext, offer: &Offer) -> bool {
        let held = offer.ballooned_bytes();
        self.most_bytes = self.most_bytes.max(held);
        let asked = self.asked_bytes.unwrap_or(0);
        let deflated = self.most_bytes <= asked && held + OOM_PIECE_BYTES <= self.most_bytes;
        let since_s = now_s().saturating_sub(PRESSURE_AGE_S);
        let figures = cx.capabilities.as_ref().and_then(|found| found.figures(since_s));
        deflated || figures.is_some_and(|figures| figures.is_pressed())
    }

    /// Returns what the guest tells of the memory that it has now.
    fn figures(&self, cx: &VmContext) -> Told {
        let since_s = self.progress.as_ref().map_or(0, Progress::figures_since_s);
        let found = cx.capabilities.as_ref();
        if let Some(figures) = found.and_then(|found| found.figures(since_s)) {
            return Told::Figures(figures);
        }
        let balloon = found.and_then(Capabilities::balloon_offer);
        let may_tell = balloon.is_some_and(|balloon| balloon.driver != Driver::Absent);
        let is_silent =
            self.progress.as_ref().is_some_and(|progress| progress.since_change() > SILENCE);
        if may_tell && !is_silent {
            return Told::NotYet;
        }
        // Without a balloon that tells: what the guest's metadata says. Shared memory counts as
        // cache.
        let Ok(guest) = cx.guest.guest() else {
            return if may_tell { Told::NotYet } else { Told::Nobody };
        };
        let view = cx.pager.view();
        let counts = guest.counts(&view);
        let free = guest.free_bytes(&view).unwrap_or(0);
        Told::Figures(Figures {
            total_bytes: guest.memmap().frames() * FRAME_BYTES,
            available_bytes: free + counts.file_frames * FRAME_BYTES,
        })
    }

    /// Tells the record and the devices the parts of the plan that are new.
    fn apply(&mut self, cx: &mut VmContext, offer: &Offer, plan: &Plan) -> Result<(), String> {
        let text = |error: ebb_vm::qmp::QmpError| error.to_string();
        let hard_bytes = plan.hard_bytes.next_multiple_of(HUGE_BYTES);
        if offer.hard_bytes.is_some() && cx.wanted_hard() * HUGE_BYTES != hard_bytes {
            let shared_bytes = shared_bytes(cx, offer, plan);
            let noted = cx.record.change(|record| record.size_bytes = shared_bytes);
            noted.map_err(|error| error.to_string())?;
            self.goal = SharedGoal::New;
        }
        let VmContext { capabilities, qmp, .. } = cx;
        let (Some(found), Some(qmp)) = (capabilities, qmp.socket()) else { return Ok(()) };
        let devices = found.pluggers.iter().zip(&offer.devices).zip(&plan.requested_bytes);
        for ((plugger, device), &bytes) in devices {
            if device.requested_bytes != bytes {
                plugger.request(qmp, bytes)?;
            }
        }
        let wanted = plan.ballooned_bytes;
        let is_news = self.asked_bytes != Some(wanted)
            && (wanted > 0 || self.asked_bytes.is_some() || offer.ballooned_bytes() > 0);
        if is_news && offer.balloon.is_some_and(|balloon| balloon.driver != Driver::Absent) {
            balloon::request(qmp, offer.initial_bytes, wanted).map_err(text)?;
            (self.asked_bytes, self.most_bytes) = (Some(wanted), 0);
        }
        Ok(())
    }

    /// Notes why the shared allocator has not all of its part, or that it has.
    pub fn note_word(&mut self, word: String) {
        if let Some(progress) = &mut self.progress {
            progress.last_word = Some(word);
        }
    }

    /// Forgets that note: the shared allocator begins anew.
    pub fn forget_word(&mut self) {
        if let Some(progress) = &mut self.progress {
            progress.last_word = None;
        }
    }

    /// Handles a reset of the guest. The balloon must not be in the new kernel's way; it is filled
    /// again once that kernel tells what it needs.
    pub fn on_reset(&mut self, cx: &mut VmContext) {
        if let Some(progress) = &mut self.progress {
            progress.begin_again(now_s());
        }
        self.empty_balloon(cx);
    }

    /// Has the guest take out of its balloon all that was put there.
    fn empty_balloon(&mut self, cx: &mut VmContext) {
        let asked = self.asked_bytes.take().is_some_and(|bytes| bytes > 0);
        self.most_bytes = 0;
        let VmContext { capabilities, qmp, record, .. } = cx;
        if let (true, Some(found), Some(qmp)) = (asked, capabilities, qmp.socket())
            && let Err(error) = balloon::request(qmp, found.initial_bytes, 0)
        {
            tracing::error!("{}: its balloon: {error}", record.name);
        }
    }

    /// Prepares a detach: nothing is left in the balloon, and nobody asks it for figures.
    pub fn give_balloon_back(&mut self, cx: &mut VmContext) {
        self.empty_balloon(cx);
        let VmContext { capabilities, qmp, record, .. } = cx;
        let balloon = capabilities.as_ref().and_then(|found| found.balloon.as_ref());
        if let (Some(_), Some(balloon), Some(qmp)) = (self.polled_s.take(), balloon, qmp.socket())
            && let Err(error) = balloon::poll_stats(qmp, balloon, 0)
        {
            tracing::debug!("{}: its balloon: {error}", record.name);
        }
    }

    fn state(&self, cx: &VmContext, shared: &SharedPart) -> SizeState {
        let piece = match self.progress.as_ref().map(|progress| progress.mechanism) {
            Some(Mechanism::HyperAlloc) => HUGE_BYTES,
            _ => 1,
        };
        match self.progress.as_ref().map_or(SizeState::Off, |progress| progress.state(piece)) {
            // The guest waits for room, and QEMU may: until there is some, neither makes progress.
            SizeState::Moving if cx.waits() => SizeState::Waiting,
            SizeState::Waiting if shared.is_moving && !cx.waits() => SizeState::Moving,
            state => state,
        }
    }

    /// Reports how far the VM is on its way to its target.
    ///
    /// # Errors
    /// No size was asked for.
    pub fn report(&self, cx: &VmContext, shared: &SharedPart) -> Answer<ResizeReport> {
        let (Some(wish), Some(progress)) = (wish(cx), &self.progress) else {
            return Err(not_allowed("no size was asked for: ebb resize does"));
        };
        let offer = offer(cx, shared);
        let (bytes, state) = (offer.size_of(&wish), self.state(cx, shared));
        let resident = cx.pager.ram().resident_bytes().map_err(failed("the VM's RAM"))?;
        let start_bytes = progress.start_bytes;
        let emptied_bytes = progress.start_resident_bytes.saturating_sub(resident);
        let moved = match progress.mechanism {
            Mechanism::HyperAlloc => shared.moved,
            _ => Moved {
                taken_bytes: start_bytes.saturating_sub(bytes),
                emptied_bytes,
                returned_bytes: bytes.saturating_sub(start_bytes),
                purges: shared.moved.purges,
            },
        };
        Ok(ResizeReport {
            bytes,
            wanted_bytes: wish.bytes,
            node: wish.node,
            mechanism: api(progress.mechanism),
            reason: progress.reason.clone(),
            state,
            least_bytes: progress.least_bytes,
            taken_bytes: moved.taken_bytes,
            emptied_bytes: moved.emptied_bytes,
            returned_bytes: moved.returned_bytes,
            purges: moved.purges,
            duration_ns: nanoseconds(progress.took(state)),
            stopped_by: self.what_stops_it(cx, (&offer, &wish), state, shared).unwrap_or_default(),
        })
    }

    fn what_stops_it(
        &self,
        cx: &VmContext,
        (offer, wish): (&Offer, &Wish),
        state: SizeState,
        shared: &SharedPart,
    ) -> Option<String> {
        let progress = self.progress.as_ref()?;
        match state {
            SizeState::Reached => Some("the size asked for was reached".into()),
            SizeState::Moving | SizeState::Off => None,
            SizeState::Waiting => {
                Some(blocked::reason(cx, (offer, wish), progress, shared.rests_for))
            }
        }
    }

    /// Returns the size that the VM has, and those that it could have.
    pub fn status(&self, cx: &VmContext, shared: &SharedPart) -> SizeStatus {
        let offer = offer(cx, shared);
        let (state, progress, wish) = (self.state(cx, shared), &self.progress, wish(cx));
        let found = cx.capabilities.as_ref();
        SizeStatus {
            bytes: offer.size_bytes(),
            initial_bytes: offer.initial_bytes,
            plugged_bytes: offer.plugged_bytes(),
            ballooned_bytes: offer.ballooned_bytes(),
            hard_bytes: offer.hard_bytes.unwrap_or(0),
            max_bytes: offer.max_bytes(),
            wanted_bytes: wish.map(|wish| wish.bytes),
            wanted_node: wish.and_then(|wish| wish.node),
            mechanism: progress.as_ref().map(|progress| api(progress.mechanism)),
            reason: progress.as_ref().map(|progress| progress.reason.clone()),
            state,
            stopped_by: wish
                .filter(|_| state == SizeState::Waiting)
                .and_then(|wish| self.what_stops_it(cx, (&offer, &wish), state, shared)),
            devices: found.map(Capabilities::device_status).unwrap_or_default(),
        }
    }

    /// Returns the status of the VM's balloon.
    pub fn balloon_status(&self, cx: &VmContext) -> Option<BalloonStatus> {
        cx.capabilities.as_ref()?.balloon_status(now_s(), self.releases)
    }
}

/// Returns the target of a request; `None`: the size is to stay.
pub fn wish_of(request: &ResizeRequest) -> Option<Wish> {
    let bytes = request.bytes?;
    Some(Wish { bytes, node: request.node, by: request.by.map(mechanism) })
}

/// Returns the target on record.
fn wish(cx: &VmContext) -> Option<Wish> {
    let size = cx.record.size?;
    Some(Wish { bytes: size.bytes, node: size.node, by: size.by.map(mechanism) })
}

/// Returns by what the size can change, as it was seen last.
fn offer(cx: &VmContext, shared: &SharedPart) -> Offer {
    let all = cx.pager.ram().bytes();
    let hard_bytes = cx.guest.shares_allocator().then_some(shared.hard_bytes);
    match &cx.capabilities {
        None => Offer { initial_bytes: all, node_bytes: vec![all], hard_bytes, ..Offer::default() },
        Some(found) => Offer {
            initial_bytes: found.initial_bytes,
            node_bytes: found.node_bytes.clone(),
            devices: found.devices(),
            balloon: found.balloon_offer(),
            hard_bytes,
        },
    }
}

fn plan(offer: &Offer, wish: &Wish) -> Result<Plan, Refusal> {
    resize::plan(offer, wish, floor_bytes(offer.initial_bytes + offer.plugged_bytes()))
}

/// Returns what the guest is to have by the allocator that it shares, as the record has it.
fn shared_bytes(cx: &VmContext, offer: &Offer, plan: &Plan) -> Option<u64> {
    let bytes = offer.initial_bytes.saturating_sub(plan.hard_bytes);
    (bytes < cx.initial_bytes()).then_some(bytes)
}

/// What a guest says of its memory.
enum Told {
    /// These figures.
    Figures(Figures),
    /// Nothing yet about the memory that it has now.
    NotYet,
    /// There is nobody who could say anything.
    Nobody,
}

/// Returns the message once no size is sought. `size`: the size that was sought before.
fn no_more(size: Option<SizeRecord>) -> String {
    let Some(SizeRecord { bytes, node, .. }) = size else { return "no size was sought".into() };
    let node = node.map(|node| format!(" on node {node}")).unwrap_or_default();
    format!("the {}{node} that it was to have are sought no more", Bytes(bytes))
}

/// Returns the distance between two sizes that a VM can have, in bytes.
fn piece_bytes(offer: &Offer) -> u64 {
    offer.block_bytes().max(FRAME_BYTES)
}

/// Whether a guest that is better known might be able to do it.
fn is_about_the_guest(refusal: &Refusal) -> bool {
    use Refusal::{DriverAbsent, Lacks, NothingTakes};
    matches!(
        refusal,
        DriverAbsent(Mechanism::Balloon) | Lacks(Mechanism::HyperAlloc) | NothingTakes(_)
    )
}

fn mechanism(by: SizeMechanism) -> Mechanism {
    match by {
        SizeMechanism::HyperAlloc => Mechanism::HyperAlloc,
        SizeMechanism::Balloon => Mechanism::Balloon,
        SizeMechanism::VirtioMem => Mechanism::VirtioMem,
    }
}

fn api(by: Mechanism) -> SizeMechanism {
    match by {
        Mechanism::HyperAlloc => SizeMechanism::HyperAlloc,
        Mechanism::Balloon => SizeMechanism::Balloon,
        Mechanism::VirtioMem => SizeMechanism::VirtioMem,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use ebb_policy::resize::Balloon;

    use super::*;
    use crate::vm::context::machine;

    /// QEMU ends at its first command. The shared allocator's part is on record by then.
    #[test]
    fn a_goal_outlives_a_request_that_failed() {
        let Some((mut cx, _run)) = machine::context() else { return };
        let listener = UnixListener::bind(&cx.record.qmp).expect("a socket");
        let qemu = std::thread::spawn(move || {
            let mut client = BufReader::new(listener.accept().expect("Ebb").0);
            client.get_mut().write_all(b"{\"QMP\":{}}\n").expect("a greeting");
            client.read_line(&mut String::new()).expect("qmp_capabilities");
            client.get_mut().write_all(b"{\"return\":{},\"id\":1}\n").expect("an answer");
            client.read_line(&mut String::new()).expect("balloon");
        });
        cx.qmp.reconnect();
        assert!(cx.qmp.is_connected());
        let initial_bytes = cx.initial_bytes();
        let (node_bytes, pluggers) = (vec![initial_bytes], Vec::new());
        cx.capabilities = Some(Capabilities { initial_bytes, node_bytes, pluggers, balloon: None });
        let offer = Offer {
            initial_bytes,
            balloon: Some(Balloon { ballooned_bytes: 0, driver: Driver::Ready }),
            hard_bytes: Some(0),
            ..Offer::default()
        };
        let plan = Plan {
            mechanism: Mechanism::Balloon,
            reason: String::new(),
            requested_bytes: Vec::new(),
            ballooned_bytes: HUGE_BYTES,
            hard_bytes: HUGE_BYTES,
        };
        let mut resize = Resize::default();
        assert!(resize.apply(&mut cx, &offer, &plan).is_err());
        assert_eq!(cx.record.size_bytes, Some(initial_bytes - HUGE_BYTES));
        assert_eq!(resize.take_goal(), SharedGoal::New);
        assert_eq!(resize.take_goal(), SharedGoal::Same);
        qemu.join().expect("QEMU");
    }
}
