//! The OpenAPI document. `docs/openapi.json` is this, committed.

mod refusals;

use utoipa::OpenApi;

use self::refusals::Refusals;

/// The OpenAPI 3.1 description of the daemon's interface.
pub fn document() -> utoipa::openapi::OpenApi {
    Description::openapi()
}

/// [`document`] as it stands in `docs/openapi.json`, with a newline at the end.
pub fn document_text() -> Result<String, serde_json::Error> {
    document().to_pretty_json().map(|text| text + "\n")
}

#[derive(OpenApi)]
#[openapi(
    info(title = "Ebb", description = "Elastic memory for running virtual machines."),
    modifiers(&Refusals),
    paths(
        v1::version,
        v1::whoami,
        v1::list,
        v1::run,
        v1::attach,
        v1::status,
        v1::detach,
        v1::reclaim,
        v1::auto,
        v1::limit,
        v1::resize,
        v1::size,
        v1::evict,
        v1::monitor,
        v1::heat,
        v1::share,
        v1::set_pool,
        v1::pool,
        v1::set_pilot,
        v1::pilot,
        v1::pilot_sight,
        v1::top,
        v1::observe,
        v1::history,
        v1::rule,
        v1::calibrate,
        v1::calibration,
        v1::jobs,
        v1::job,
        v1::cancel_job,
        v1::events,
        v1::openapi,
    )
)]
struct Description;

/// One empty function per path, for utoipa's macro: the handlers live in the daemon, which the
/// CLI must not pull in.
#[expect(dead_code, reason = "only their descriptions are used")]
mod v1 {
    use crate::{
        ApiErrorBody, AttachRequest, AutoRequest, AutoStatus, Calibration, DetachReport, Event,
        EventsQuery, EvictReport, EvictRequest, HeatReport, HeatRequest, History, HistoryQuery,
        HostVms, Job, JobQuery, LimitRequest, LimitStatus, PilotRequest, PilotSight, PilotStatus,
        PoolRequest, PoolStatus, ReclaimReport, ReclaimRequest, ResizeReport, ResizeRequest,
        RuleRequest, RunRequest, ShareRequest, StatusQuery, Top, Version, VmStatus, VmSummary,
        WhoAmI, route,
    };

    const NO_ROOM: &str = "There is no room for the record; nothing was changed.";
    const NOT_NOW: &str =
        "The VM cannot answer now: it is being recovered, is busy, hangs, or waits for room.";
    const NO_STATUS: &str = "The VM is managed, but its status is not known yet: ask for it again.";

    const AS_JOB: &str = "With `job=true`: the job, which goes on.";
    const TOO_MANY_JOBS: &str = "With `job=true`: too many jobs are under way.";

    /// The daemon's release, process and run directory.
    #[utoipa::path(get, path = route::VERSION, responses((status = 200, body = Version)))]
    fn version() {}

    /// What the client may do: by its token, or because it asks on the host itself.
    #[utoipa::path(get, path = route::WHOAMI, responses((status = 200, body = WhoAmI)))]
    fn whoami() {}

    /// All managed VMs.
    #[utoipa::path(get, path = route::VMS, responses((status = 200, body = [VmSummary])))]
    fn list() {}

    /// Start QEMU and manage the VM.
    #[utoipa::path(post, path = route::RUN, request_body = RunRequest, responses(
        (status = 200, body = VmStatus),
        (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
        (status = 409, body = ApiErrorBody, description = "The name is in use."),
        (status = 422, body = ApiErrorBody, description = "The host or QEMU does not allow it."),
        (status = 500, body = ApiErrorBody, description = "The operation failed."),
        (status = 503, body = ApiErrorBody, description = NO_STATUS),
        (status = 507, body = ApiErrorBody, description = NO_ROOM),
    ))]
    fn run() {}

    /// Manage a QEMU that runs already.
    #[utoipa::path(post, path = route::ATTACH, request_body = AttachRequest, responses(
        (status = 200, body = VmStatus),
        (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
        (status = 409, body = ApiErrorBody, description = "The name is in use, or the VM is \
            managed already."),
        (status = 422, body = ApiErrorBody, description = "This process cannot be managed."),
        (status = 500, body = ApiErrorBody, description = "The operation failed."),
        (status = 503, body = ApiErrorBody, description = NO_STATUS),
        (status = 507, body = ApiErrorBody, description = NO_ROOM),
    ))]
    fn attach() {}

    /// One VM's status.
    #[utoipa::path(get, path = route::VM,
        params(("name" = String, Path, description = "The VM's name."), StatusQuery),
        responses(
            (status = 200, body = VmStatus),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
        ))]
    fn status() {}

    /// Bring a VM's memory back and stop managing it; the guest runs on.
    #[utoipa::path(delete, path = route::VM,
        params(("name" = String, Path, description = "The VM's name."), JobQuery),
        responses(
            (status = 200, body = DetachReport),
            (status = 202, body = Job, description = AS_JOB),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody, description = "It cannot be detached now."),
            (status = 429, body = ApiErrorBody, description = TOO_MANY_JOBS),
            (status = 500, body = ApiErrorBody, description = "The operation failed."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
            (status = 507, body = ApiErrorBody, description = NO_ROOM),
        ))]
    fn detach() {}

    /// Reclaim the guest's free memory once.
    #[utoipa::path(post, path = route::RECLAIM, request_body = ReclaimRequest,
        params(("name" = String, Path, description = "The VM's name."), JobQuery),
        responses(
            (status = 200, body = ReclaimReport),
            (status = 202, body = Job, description = AS_JOB),
            (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody,
                description = "This VM's memory cannot be reclaimed."),
            (status = 429, body = ApiErrorBody, description = TOO_MANY_JOBS),
            (status = 500, body = ApiErrorBody, description = "The operation failed."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
            (status = 507, body = ApiErrorBody, description = NO_ROOM),
        ))]
    fn reclaim() {}

    /// Switch automatic reclaim on or off.
    #[utoipa::path(put, path = route::AUTO, request_body = AutoRequest,
        params(("name" = String, Path, description = "The VM's name.")),
        responses(
            (status = 200, body = AutoStatus),
            (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody,
                description = "This VM's memory cannot be reclaimed."),
            (status = 500, body = ApiErrorBody, description = "The operation failed."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
            (status = 507, body = ApiErrorBody, description = NO_ROOM),
        ))]
    fn auto() {}

    /// Set or lift the limit on a VM's resident memory.
    #[utoipa::path(put, path = route::LIMIT, request_body = LimitRequest,
        params(("name" = String, Path, description = "The VM's name.")),
        responses(
            (status = 200, body = LimitStatus),
            (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody, description = "This VM cannot have this limit."),
            (status = 500, body = ApiErrorBody, description = "The operation failed."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
            (status = 507, body = ApiErrorBody, description = NO_ROOM),
        ))]
    fn limit() {}

    /// Set a VM's target size, or keep its size. The answer comes at once; the resize goes on in
    /// the background.
    #[utoipa::path(put, path = route::SIZE, request_body = ResizeRequest,
        params(("name" = String, Path, description = "The VM's name."), JobQuery),
        responses(
            (status = 200, body = ResizeReport),
            (status = 202, body = Job, description = AS_JOB),
            (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody,
                description = "This VM cannot be resized like this."),
            (status = 429, body = ApiErrorBody, description = TOO_MANY_JOBS),
            (status = 500, body = ApiErrorBody, description = "The operation failed."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
            (status = 507, body = ApiErrorBody, description = NO_ROOM),
        ))]
    fn resize() {}

    /// Progress of a resize.
    #[utoipa::path(get, path = route::SIZE,
        params(("name" = String, Path, description = "The VM's name.")),
        responses(
            (status = 200, body = ResizeReport),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody, description = "The VM has no target."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
        ))]
    fn size() {}

    /// Evict memory now, whether it is used or not: for tests and emergencies.
    #[utoipa::path(post, path = route::EVICT, request_body = EvictRequest,
        params(("name" = String, Path, description = "The VM's name."), JobQuery),
        responses(
            (status = 200, body = EvictReport),
            (status = 202, body = Job, description = AS_JOB),
            (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody,
                description = "This VM's memory cannot be evicted."),
            (status = 429, body = ApiErrorBody, description = TOO_MANY_JOBS),
            (status = 500, body = ApiErrorBody, description = "The operation failed."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
            (status = 507, body = ApiErrorBody, description = NO_ROOM),
        ))]
    fn evict() {}

    /// Begin to monitor which memory is hot, unless that is known. The answer comes at once; the
    /// monitoring goes on in the background.
    #[utoipa::path(post, path = route::HEAT, request_body = HeatRequest,
        params(("name" = String, Path, description = "The VM's name."), JobQuery),
        responses(
            (status = 200, body = HeatReport),
            (status = 202, body = Job, description = AS_JOB),
            (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody, description = "This VM cannot be monitored."),
            (status = 429, body = ApiErrorBody, description = TOO_MANY_JOBS),
            (status = 500, body = ApiErrorBody, description = "The operation failed."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
        ))]
    fn monitor() {}

    /// Progress of a monitoring, and the figures of the last one.
    #[utoipa::path(get, path = route::HEAT,
        params(("name" = String, Path, description = "The VM's name.")),
        responses(
            (status = 200, body = HeatReport),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
        ))]
    fn heat() {}

    /// Give a VM a share of the pool, or take the VM out of the pool.
    #[utoipa::path(put, path = route::SHARE, request_body = ShareRequest,
        params(("name" = String, Path, description = "The VM's name.")),
        responses(
            (status = 200, body = PoolStatus),
            (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody,
                description = "The shares do not fit together, or this VM \
                cannot have one."),
            (status = 500, body = ApiErrorBody, description = "The operation failed."),
            (status = 503, body = ApiErrorBody, description = NOT_NOW),
            (status = 507, body = ApiErrorBody, description = NO_ROOM),
        ))]
    fn share() {}

    /// Set the size of the pool, or end the pool.
    #[utoipa::path(put, path = route::POOL, request_body = PoolRequest, responses(
        (status = 200, body = PoolStatus),
        (status = 422, body = ApiErrorBody,
            description = "The pool would be smaller than its shares, \
            or larger than the host's memory."),
        (status = 500, body = ApiErrorBody, description = "The operation failed."),
        (status = 507, body = ApiErrorBody, description = NO_ROOM),
    ))]
    fn set_pool() {}

    /// The pool, and the VMs in it.
    #[utoipa::path(get, path = route::POOL, responses((status = 200, body = PoolStatus)))]
    fn pool() {}

    /// Turn the pilot on or off, or change its reserve.
    #[utoipa::path(put, path = route::PILOT, request_body = PilotRequest, responses(
        (status = 200, body = PilotStatus),
        (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
        (status = 422, body = ApiErrorBody, description = "The host has less than the reserve."),
        (status = 500, body = ApiErrorBody, description = "The operation failed."),
        (status = 507, body = ApiErrorBody, description = NO_ROOM),
    ))]
    fn set_pilot() {}

    /// The pilot, what it sees and what it decided last.
    #[utoipa::path(get, path = route::PILOT, responses((status = 200, body = PilotStatus)))]
    fn pilot() {}

    /// What the pilot saw in its last look.
    #[utoipa::path(get, path = route::PILOT_SIGHT, responses(
        (status = 200, body = PilotSight),
        (status = 422, body = ApiErrorBody, description = "The pilot is off."),
    ))]
    fn pilot_sight() {}

    /// The host and all VMs at this moment. No VM is asked: the figures are those that the VMs'
    /// processes published last, at most a second ago unless a VM is busy.
    #[utoipa::path(get, path = route::TOP, responses(
        (status = 200, body = Top),
        (status = 500, body = ApiErrorBody, description = "The operation failed."),
    ))]
    fn top() {}

    /// All VMs of the host, managed or not, as `ebb observe` and `ebb discover` see them: those that
    /// Ebb manages, and those of root and of libvirt's users. No VM is asked. Ebb looks once in 5 s
    /// at most, however many clients ask.
    #[utoipa::path(get, path = route::OBSERVE, responses(
        (status = 200, body = HostVms),
        (status = 500, body = ApiErrorBody, description = "The operation failed."),
        (status = 503, body = ApiErrorBody, description = "Ebb looks at the VMs for another \
            request, and nothing is known of them yet."),
    ))]
    fn observe() {}

    /// What the host and its VMs were like: every 15 s for a day, every 5 min for 90 days.
    #[utoipa::path(get, path = route::HISTORY, params(HistoryQuery), responses(
        (status = 200, body = History),
        (status = 400, body = ApiErrorBody, description = "The request makes no sense, or asks for \
            too many moments."),
        (status = 422, body = ApiErrorBody, description = "There is no history, or the answer \
            would be longer than 32 MiB."),
        (status = 500, body = ApiErrorBody, description = "The operation failed."),
        (status = 503, body = ApiErrorBody, description = "History is being read for another \
            request, or other machines have not taken their answers yet."),
    ))]
    fn history() {}

    /// Change the pilot's rule for a VM. It holds for later VMs of this name, too.
    #[utoipa::path(put, path = route::RULE, request_body = RuleRequest,
        params(("name" = String, Path, description = "The VM's name.")),
        responses(
            (status = 200, body = PilotStatus),
            (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
            (status = 404, body = ApiErrorBody, description = "No such VM."),
            (status = 422, body = ApiErrorBody, description = "The bounds exclude each other."),
            (status = 500, body = ApiErrorBody, description = "The operation failed."),
            (status = 507, body = ApiErrorBody, description = NO_ROOM),
        ))]
    fn rule() {}

    /// Measure how fast this host's tiers are; this takes some seconds.
    #[utoipa::path(post, path = route::CALIBRATION, params(JobQuery), responses(
        (status = 200, body = Calibration),
        (status = 202, body = Job, description = AS_JOB),
        (status = 422, body = ApiErrorBody, description = "A tier cannot be measured."),
        (status = 429, body = ApiErrorBody, description = TOO_MANY_JOBS),
        (status = 500, body = ApiErrorBody, description = "The operation failed."),
        (status = 507, body = ApiErrorBody, description = NO_ROOM),
    ))]
    fn calibrate() {}

    /// The last calibration.
    #[utoipa::path(get, path = route::CALIBRATION, responses(
        (status = 200, body = Calibration),
        (status = 422, body = ApiErrorBody, description = "There was no calibration yet."),
    ))]
    fn calibration() {}

    /// Jobs: those under way, and the last ones that have ended. No VM is asked.
    #[utoipa::path(get, path = route::JOBS, responses((status = 200, body = [Job])))]
    fn jobs() {}

    /// One job. No VM is asked: progress is at most a second old, unless the VM is busy.
    #[utoipa::path(get, path = route::JOB,
        params(("id" = u64, Path, description = "The job's number.")),
        responses(
            (status = 200, body = Job),
            (status = 404, body = ApiErrorBody, description = "No such job."),
        ))]
    fn job() {}

    /// Cancel a job. The answer comes at once; the job ends after its present step, and what was
    /// done until then stays done. A resize drops its target, and the VM keeps its size.
    #[utoipa::path(delete, path = route::JOB,
        params(("id" = u64, Path, description = "The job's number.")),
        responses(
            (status = 200, body = Job),
            (status = 404, body = ApiErrorBody, description = "No such job."),
            (status = 422, body = ApiErrorBody, description = "It has ended, or cannot be \
                cancelled."),
        ))]
    fn cancel_job() {}

    /// What happens to VMs, as server-sent events: what the daemon still has of it, and then what
    /// happens from now on. The id of each is the event's number, and its data is the event. A line
    /// that begins with a colon comes every 15 s. A reader that is too slow loses events, and is
    /// told so by an event of type `lost`.
    #[utoipa::path(get, path = route::EVENTS,
        params(
            EventsQuery,
            ("Last-Event-ID" = Option<u64>, Header,
                description = "Only events after this number; it counts before `since`."),
        ),
        responses(
            (status = 200, body = Event, content_type = "text/event-stream",
                description = "The body is that of the data of each event."),
            (status = 400, body = ApiErrorBody, description = "The request makes no sense."),
            (status = 429, body = ApiErrorBody, description = "Too many streams are open."),
        ))]
    fn events() {}

    /// This document.
    #[utoipa::path(get, path = route::OPENAPI, responses((status = 200, description = "OpenAPI 3.1.")))]
    fn openapi() {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route;

    #[test]
    fn every_route_is_described() {
        let document = document();
        for path in [
            route::VERSION,
            route::WHOAMI,
            route::VMS,
            route::RUN,
            route::ATTACH,
            route::VM,
            route::RECLAIM,
            route::AUTO,
            route::SIZE,
            route::EVICT,
            route::HEAT,
            route::SHARE,
            route::POOL,
            route::PILOT,
            route::PILOT_SIGHT,
            route::TOP,
            route::OBSERVE,
            route::HISTORY,
            route::RULE,
            route::CALIBRATION,
            route::JOBS,
            route::JOB,
            route::EVENTS,
            route::OPENAPI,
        ] {
            assert!(document.paths.paths.contains_key(path), "{path}");
        }
    }

    #[test]
    fn the_committed_document_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        let current = document_text().expect("plain data becomes JSON");
        assert!(
            committed == current,
            "docs/openapi.json is stale: cargo run -p ebb-api --example openapi > docs/openapi.json"
        );
    }
}
