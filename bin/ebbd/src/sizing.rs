//! What a VM's worker does about its size, by whatever the VM offers. What is taken in a shared
//! allocator is `sharing`'s part.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ebb_api::{OnViolation, ResizeReport, ResizeRequest, SizeMechanism, SizeState, SizeStatus};
use ebb_policy::need::Figures;
use ebb_policy::resize::{self, Driver, Mechanism, Offer, Plan, Refusal, Wish};
use ebb_units::{Bytes, FRAME_BYTES, HUGE_BYTES};
use ebb_vm::balloon;

use crate::limit::floor_bytes;
use crate::offers::Seen;
use crate::problem::{Answer, Refused, failed, not_allowed};
use crate::record::SizeRecord;
use crate::sharing::Shrunk;
use crate::way::Way;
use crate::worker::State;

/// A size that does not move is looked at so often, and the guest's need with it.
const STEP_EVERY: Duration = Duration::from_secs(1);
/// The guest is asked for its figures so often: while its size is to change, and else.
const POLL_BUSY_S: u64 = 1;
const POLL_IDLE_S: u64 = 5;
/// Older figures do not tell whether the guest is under pressure now.
const PRESSURE_AGE_S: u64 = 5;
/// Who tells no figures for so long does not tell any.
const SILENCE: Duration = Duration::from_secs(5);
/// As much as Linux takes out of its balloon at once before it kills a process.
const OOM_PIECE_BYTES: u64 = 1 << 20;

/// What is known of a VM's size.
#[derive(Default)]
pub struct Sizing {
    seen: Option<Seen>,
    /// When the last step was taken.
    stepped: Option<Instant>,
    way: Option<Way>,
    /// What the balloon was last told to hold, and the most that it has held since.
    asked_bytes: Option<u64>,
    most_bytes: u64,
    /// How often it was emptied because the guest needed that.
    releases: u64,
    /// How often the guest is asked for its figures.
    polled_s: Option<u64>,
    /// What came of the shared allocator at the last request.
    shrunk: Shrunk,
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl State {
    /// What the VM began with; all of its RAM as long as nobody has told of what can be
    /// plugged.
    pub(crate) fn initial_bytes(&self) -> u64 {
        let all = self.held.pager.ram().bytes();
        self.sizing.seen.as_ref().map_or(all, |seen| {
            let devices = seen.devices();
            all.saturating_sub(devices.iter().map(|device| device.max_bytes).sum())
        })
    }

    /// The guest's RAM as QEMU gives it: what it began with, and what is plugged.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let unplugged = self.sizing.seen.as_ref().map_or(0, Seen::unplugged_bytes);
        self.held.pager.ram().bytes().saturating_sub(unplugged)
    }

    /// Whether memory comes and goes in this VM.
    pub(crate) fn has_pluggers(&self) -> bool {
        self.sizing.seen.as_ref().is_some_and(|seen| !seen.pluggers.is_empty())
    }

    /// Asks the VMM what there is to change the size by.
    pub(crate) fn look_at_offers(&mut self) -> Answer<()> {
        self.reconnect();
        let qmp = self.held.qmp.as_mut();
        let qmp = qmp.ok_or_else(|| not_allowed("QEMU's QMP socket does not answer"))?;
        let seen = Seen::ask(qmp, &self.held.growth).map_err(not_allowed)?;
        let wanted_s = if self.held.record.size.is_some() { POLL_BUSY_S } else { POLL_IDLE_S };
        let ready = seen.balloon_offer().is_some_and(|balloon| balloon.driver != Driver::Absent);
        if let Some(balloon) = seen.balloon.as_ref().filter(|_| ready)
            && self.sizing.polled_s != Some(wanted_s)
        {
            balloon::poll_stats(qmp, balloon, wanted_s).map_err(not_allowed)?;
            self.sizing.polled_s = Some(wanted_s);
        }
        self.sizing.seen = Some(seen);
        Ok(())
    }

    /// The same where nothing depends on it.
    pub(crate) fn glance_at_offers(&mut self) {
        if let Err(error) = self.look_at_offers() {
            tracing::debug!("{}: its size: {error}", self.held.record.name);
        }
    }

    /// What there is to change the size by, as it was seen last.
    fn offer(&self) -> Offer {
        let all = self.held.pager.ram().bytes();
        let hard_bytes = self.may_share().then(|| self.hard_bytes());
        match &self.sizing.seen {
            None => {
                Offer { initial_bytes: all, node_bytes: vec![all], hard_bytes, ..Offer::default() }
            }
            Some(seen) => Offer {
                initial_bytes: seen.initial_bytes,
                node_bytes: seen.node_bytes.clone(),
                devices: seen.devices(),
                balloon: seen.balloon_offer(),
                hard_bytes,
            },
        }
    }

    fn plan(&self, offer: &Offer, wish: &Wish) -> Result<Plan, Refusal> {
        resize::plan(offer, wish, floor_bytes(offer.initial_bytes + offer.plugged_bytes()))
    }

    /// Begins to bring the VM to another size.
    pub(crate) fn resize(&mut self, request: ResizeRequest) -> Answer<ResizeReport> {
        request.check()?;
        if self.waits() {
            return Err(Refused::Unavailable(format!(
                "{} waits for room, and QEMU may, so its size cannot change now: {}",
                self.held.record.name,
                self.why_it_waits()
            )));
        }
        self.look_at_offers()?;
        let Some(bytes) = request.bytes else { return self.stay_at_size(request.on_violation) };
        self.look_at_devices();
        self.may_take()?;
        let trusted = self.confirm();
        let wish = Wish { bytes, node: request.node, by: request.by.map(mechanism) };
        let offer = self.offer();
        let plan = self.plan(&offer, &wish);
        let plan = plan.and_then(|plan| plan.check_drivers(&offer).map(|()| plan));
        let plan = plan.map_err(|refusal| match trusted || !is_about_the_guest(&refusal) {
            true => not_allowed(refusal),
            false => {
                let why = self.insight.guest().err().unwrap_or_default();
                not_allowed(format!("{refusal}; the guest is not trusted: {why}"))
            }
        })?;
        let by_sharing = plan.mechanism == Mechanism::HyperAlloc;
        if by_sharing {
            self.share()?;
        }
        let resident = self.held.pager.ram().resident_bytes().map_err(failed("the VM's RAM"))?;
        let shared_bytes = self.shared_bytes(&offer, &plan);
        // In one piece: where it cannot be written, nothing of the size is sought.
        self.put_on_record(|record| {
            record.on_violation = request.on_violation.unwrap_or(record.on_violation);
            record.size = Some(SizeRecord { bytes, node: request.node, by: request.by });
            if by_sharing {
                record.size_bytes = shared_bytes;
            }
        })?;
        self.sizing.shrunk = Shrunk::default();
        self.sizing.way = Some(Way::new(&plan, offer.size_of(&wish), resident, now_s()));
        if by_sharing {
            self.take_shared_part()?;
        }
        self.pursue();
        self.size_report()
    }

    /// From now on the size is what it is.
    fn stay_at_size(&mut self, on_violation: Option<OnViolation>) -> Answer<ResizeReport> {
        let offer = self.offer();
        let now = Plan {
            mechanism: Mechanism::VirtioMem,
            reason: "it stays as it is".into(),
            requested_bytes: offer.devices.iter().map(|device| device.plugged_bytes).collect(),
            ballooned_bytes: offer.ballooned_bytes(),
            hard_bytes: offer.hard_bytes.unwrap_or(0),
        };
        self.apply(&offer, &now).map_err(not_allowed)?;
        let stopped_by = no_more(self.held.record.size);
        self.put_on_record(|record| {
            record.on_violation = on_violation.unwrap_or(record.on_violation);
            record.size = None;
        })?;
        let size = offer.size_bytes();
        self.sizing.way = None;
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

    /// A step towards the size on record.
    pub(crate) fn pursue(&mut self) {
        self.sizing.stepped = Some(Instant::now());
        if let Err(error) = self.take_step() {
            tracing::debug!("{}: its size: {error}", self.held.record.name);
            if let Some(way) = &mut self.sizing.way {
                way.trouble = Some(error.to_string());
            }
        }
    }

    /// The same now and then.
    pub(crate) fn keep_sizes(&mut self) {
        if self.held.record.size.is_none() || self.waits() {
            return;
        }
        let due = self.sizing.stepped.is_none_or(|stepped| stepped.elapsed() >= STEP_EVERY);
        if due || self.size_state() == SizeState::Moving {
            self.pursue();
        }
    }

    fn take_step(&mut self) -> Answer<()> {
        let Some(wish) = self.wish() else { return Ok(()) };
        self.may_take()?;
        self.look_at_offers()?;
        let offer = self.offer();
        self.begin_way(&offer, &wish)?;
        let pressed = self.is_pressed(&offer);
        let figures = self.figures();
        let Some(way) = &mut self.sizing.way else { return Ok(()) };
        way.saw(offer.size_of(&wish), wish.bytes, now_s());
        if pressed && offer.ballooned_bytes() > 0 && way.rests_for().is_none() {
            way.rest();
            self.sizing.releases += 1;
        }
        let bytes = match figures {
            // Its driver unplugs what it can do without, and nothing else.
            Told::Nobody if way.mechanism == Mechanism::VirtioMem => wish.bytes,
            Told::Nobody | Told::NotYet => way.step(wish.bytes, None, piece_bytes(&offer)),
            Told::Figures(figures) => way.step(wish.bytes, Some(figures), piece_bytes(&offer)),
        };
        let bytes = if way.mechanism == Mechanism::HyperAlloc { wish.bytes } else { bytes };
        let rests = way.rests_for().is_some();
        let mut plan = self.plan(&offer, &Wish { bytes, ..wish }).map_err(not_allowed)?;
        if rests {
            plan.ballooned_bytes = 0;
        }
        if pressed || rests {
            let devices = plan.requested_bytes.iter_mut().zip(&offer.devices);
            devices.for_each(|(bytes, device)| *bytes = (*bytes).max(device.plugged_bytes));
        }
        let told = self.apply(&offer, &plan);
        if let Some(way) = &mut self.sizing.way {
            way.trouble = told.as_ref().err().map(ToString::to_string);
        }
        told.map_err(not_allowed)
    }

    fn wish(&self) -> Option<Wish> {
        let size = self.held.record.size?;
        Some(Wish { bytes: size.bytes, node: size.node, by: size.by.map(mechanism) })
    }

    /// The daemon before this one was on a way, too.
    fn begin_way(&mut self, offer: &Offer, wish: &Wish) -> Answer<()> {
        if self.sizing.way.is_none() {
            let plan = self.plan(offer, wish).map_err(not_allowed)?;
            let resident = self.held.pager.ram().resident_bytes();
            let resident = resident.map_err(failed("the VM's RAM"))?;
            self.sizing.way = Some(Way::new(&plan, offer.size_of(wish), resident, now_s()));
        }
        Ok(())
    }

    /// Whether the guest is about to run out of memory: it says so, or it has taken some out of
    /// its balloon by itself.
    fn is_pressed(&mut self, offer: &Offer) -> bool {
        let held = offer.ballooned_bytes();
        let sizing = &mut self.sizing;
        sizing.most_bytes = sizing.most_bytes.max(held);
        let asked = sizing.asked_bytes.unwrap_or(0);
        let deflated = sizing.most_bytes <= asked && held + OOM_PIECE_BYTES <= sizing.most_bytes;
        let figures = sizing
            .seen
            .as_ref()
            .and_then(|seen| seen.figures(now_s().saturating_sub(PRESSURE_AGE_S)));
        deflated || figures.is_some_and(|figures| figures.is_pressed())
    }

    /// What the guest tells of the memory that it has now.
    fn figures(&self) -> Told {
        let since_s = self.sizing.way.as_ref().map_or(0, Way::figures_since_s);
        let seen = self.sizing.seen.as_ref();
        if let Some(figures) = seen.and_then(|seen| seen.figures(since_s)) {
            return Told::Figures(figures);
        }
        let balloon = seen.and_then(Seen::balloon_offer);
        let may_tell = balloon.is_some_and(|balloon| balloon.driver != Driver::Absent);
        let silent = self.sizing.way.as_ref().is_some_and(|way| way.since_change() > SILENCE);
        if may_tell && !silent {
            return Told::NotYet;
        }
        // Without a balloon that tells: what its metadata says. Shared memory counts as cache.
        let Ok(guest) = self.insight.guest() else {
            return if may_tell { Told::NotYet } else { Told::Nobody };
        };
        let view = self.held.pager.view();
        let counts = guest.counts(&view);
        let free = guest.free_bytes(&view).unwrap_or(0);
        Told::Figures(Figures {
            total_bytes: guest.memmap().frames() * FRAME_BYTES,
            available_bytes: free + counts.file_frames * FRAME_BYTES,
        })
    }

    /// Tells everybody what to have done, where that is news.
    fn apply(&mut self, offer: &Offer, plan: &Plan) -> Result<(), String> {
        let text = |error: ebb_vm::qmp::QmpError| error.to_string();
        let hard_bytes = plan.hard_bytes.next_multiple_of(HUGE_BYTES);
        if offer.hard_bytes.is_some() && self.wanted_hard_bytes() != hard_bytes {
            let shared_bytes = self.shared_bytes(offer, plan);
            let noted = self.put_on_record(|record| record.size_bytes = shared_bytes);
            noted.and_then(|()| self.take_shared_part()).map_err(|error| error.to_string())?;
        }
        let (Some(seen), Some(qmp)) = (&self.sizing.seen, &mut self.held.qmp) else {
            return Ok(());
        };
        let devices = seen.pluggers.iter().zip(&offer.devices).zip(&plan.requested_bytes);
        for ((plugger, device), &bytes) in devices {
            if device.requested_bytes != bytes {
                plugger.request(qmp, bytes)?;
            }
        }
        let wanted = plan.ballooned_bytes;
        let sizing = &mut self.sizing;
        let is_news = sizing.asked_bytes != Some(wanted)
            && (wanted > 0 || sizing.asked_bytes.is_some() || offer.ballooned_bytes() > 0);
        if is_news && offer.balloon.is_some_and(|balloon| balloon.driver != Driver::Absent) {
            balloon::request(qmp, offer.initial_bytes, wanted).map_err(text)?;
            (sizing.asked_bytes, sizing.most_bytes) = (Some(wanted), 0);
        }
        Ok(())
    }

    /// What the guest is to have by the allocator that it shares, as the record has it.
    fn shared_bytes(&self, offer: &Offer, plan: &Plan) -> Option<u64> {
        let bytes = offer.initial_bytes.saturating_sub(plan.hard_bytes);
        (bytes < self.initial_bytes()).then_some(bytes)
    }

    /// The part of HyperAlloc that is on record, which ends by itself.
    fn take_shared_part(&mut self) -> Answer<()> {
        self.sizing.shrunk = self.resize_shared()?;
        self.note_word(self.sizing.shrunk.stopped_by.clone());
        Ok(())
    }

    /// Why the shared allocator has not all of what is wished for.
    pub(crate) fn note_word(&mut self, stopped_by: String) {
        if let Some(way) = &mut self.sizing.way {
            way.last_word = Some(stopped_by);
        }
    }

    /// The guest was reset. The balloon is not to be in the new kernel's way; it is filled again
    /// once that tells what it needs.
    pub(crate) fn size_after_reset(&mut self) {
        if let Some(way) = &mut self.sizing.way {
            way.begin_again(now_s());
        }
        self.reserve.begin_again();
        self.empty_balloon();
    }

    /// Has the guest take all out of its balloon that was put there.
    pub(crate) fn empty_balloon(&mut self) {
        let asked = self.sizing.asked_bytes.take().is_some_and(|bytes| bytes > 0);
        self.sizing.most_bytes = 0;
        if let (true, Some(seen), Some(qmp)) = (asked, &self.sizing.seen, &mut self.held.qmp)
            && let Err(error) = balloon::request(qmp, seen.initial_bytes, 0)
        {
            tracing::error!("{}: its balloon: {error}", self.held.record.name);
        }
    }

    /// Before the VM is let go: nothing is left in its balloon, and nobody asks it for figures.
    pub(crate) fn give_balloon_back(&mut self) {
        self.empty_balloon();
        let balloon = self.sizing.seen.as_ref().and_then(|seen| seen.balloon.as_ref());
        if let (Some(_), Some(balloon), Some(qmp)) =
            (self.sizing.polled_s.take(), balloon, &mut self.held.qmp)
            && let Err(error) = balloon::poll_stats(qmp, balloon, 0)
        {
            tracing::debug!("{}: its balloon: {error}", self.held.record.name);
        }
    }

    fn size_state(&self) -> SizeState {
        let piece = match self.sizing.way.as_ref().map(|way| way.mechanism) {
            Some(Mechanism::HyperAlloc) => HUGE_BYTES,
            _ => 1,
        };
        match self.sizing.way.as_ref().map_or(SizeState::Off, |way| way.state(piece)) {
            // The guest waits for room, and QEMU may: until there is some neither gets on.
            SizeState::Moving if self.waits() => SizeState::Waiting,
            state => state,
        }
    }

    /// How far it is.
    pub(crate) fn size_report(&self) -> Answer<ResizeReport> {
        let (Some(wish), Some(way)) = (self.wish(), &self.sizing.way) else {
            return Err(not_allowed("no size was asked for: ebb resize does"));
        };
        let offer = self.offer();
        let (bytes, state) = (offer.size_of(&wish), self.size_state());
        let resident = self.held.pager.ram().resident_bytes().map_err(failed("the VM's RAM"))?;
        let shrunk = &self.sizing.shrunk;
        let by_sharing = way.mechanism == Mechanism::HyperAlloc;
        let moved = |shared: u64, sized: u64| if by_sharing { shared } else { sized };
        Ok(ResizeReport {
            bytes,
            wanted_bytes: wish.bytes,
            node: wish.node,
            mechanism: api(way.mechanism),
            reason: way.reason.clone(),
            state,
            least_bytes: way.least_bytes,
            taken_bytes: moved(shrunk.taken_bytes, way.start_bytes.saturating_sub(bytes)),
            emptied_bytes: moved(
                shrunk.emptied_bytes,
                way.start_resident_bytes.saturating_sub(resident),
            ),
            returned_bytes: moved(shrunk.returned_bytes, bytes.saturating_sub(way.start_bytes)),
            purges: shrunk.purges,
            duration_ns: u64::try_from(way.took(state).as_nanos()).unwrap_or(u64::MAX),
            stopped_by: self.what_stops_it(&offer, &wish, state).unwrap_or_default(),
        })
    }

    fn what_stops_it(&self, offer: &Offer, wish: &Wish, state: SizeState) -> Option<String> {
        let way = self.sizing.way.as_ref()?;
        match state {
            SizeState::Reached => Some("the size asked for was reached".into()),
            SizeState::Moving | SizeState::Off => None,
            SizeState::Waiting => Some(self.obstacle(offer, wish, way)),
        }
    }

    /// What the VM has and could have.
    pub(crate) fn size_status(&self) -> SizeStatus {
        let offer = self.offer();
        let (state, way, wish) = (self.size_state(), &self.sizing.way, self.wish());
        let seen = self.sizing.seen.as_ref();
        SizeStatus {
            bytes: offer.size_bytes(),
            initial_bytes: offer.initial_bytes,
            plugged_bytes: offer.plugged_bytes(),
            ballooned_bytes: offer.ballooned_bytes(),
            hard_bytes: offer.hard_bytes.unwrap_or(0),
            max_bytes: offer.max_bytes(),
            wanted_bytes: wish.map(|wish| wish.bytes),
            wanted_node: wish.and_then(|wish| wish.node),
            mechanism: way.as_ref().map(|way| api(way.mechanism)),
            reason: way.as_ref().map(|way| way.reason.clone()),
            state,
            stopped_by: wish
                .filter(|_| state == SizeState::Waiting)
                .and_then(|wish| self.what_stops_it(&offer, &wish, state)),
            devices: seen.map(Seen::device_status).unwrap_or_default(),
        }
    }

    /// Its balloon.
    pub(crate) fn balloon_status(&self) -> Option<ebb_api::BalloonStatus> {
        self.sizing.seen.as_ref()?.balloon_status(now_s(), self.sizing.releases)
    }

    /// What can be plugged, for whoever looks into it.
    pub(crate) fn seen(&self) -> Option<&Seen> {
        self.sizing.seen.as_ref()
    }
}

/// What a guest says of its memory.
enum Told {
    /// This.
    Figures(Figures),
    /// Nothing yet about the memory that it has now.
    NotYet,
    /// There is nobody to say anything.
    Nobody,
}

/// What is said once no size is sought, where this one was before.
fn no_more(size: Option<SizeRecord>) -> String {
    let Some(SizeRecord { bytes, node, .. }) = size else { return "no size was sought".into() };
    let node = node.map(|node| format!(" on node {node}")).unwrap_or_default();
    format!("the {}{node} that it was to have are sought no more", Bytes(bytes))
}

/// Sizes that a VM can have lie so far apart.
fn piece_bytes(offer: &Offer) -> u64 {
    offer.block_bytes().max(FRAME_BYTES)
}

/// Whether a guest that is known better might do it.
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
