"""The calls."""

# Made by generate.py from docs/openapi.json: change that, not this.

from __future__ import annotations

from typing import Any, Iterator, List, Optional

from .connection import Connection, quoted
from .shapes import *


class Client(Connection):
    """Asks `ebbd`, with one method for each route."""

    def calibration(self) -> Calibration:
        """The last calibration.

        GET /v1/calibration

        Raises EbbError. 422: There was no calibration yet."""
        return self._call("GET", "/v1/calibration", Calibration)

    def calibrate(self) -> Calibration:
        """Measure how fast this host's tiers are; this takes some seconds.

        POST /v1/calibration

        Raises EbbError. 400: The request makes no sense. 422: A tier cannot be measured. 500: The
        operation failed. 507: There is no room for the record; nothing was changed."""
        return self._call("POST", "/v1/calibration", Calibration)

    def calibrate_job(self) -> Job:
        """Measure how fast this host's tiers are; this takes some seconds. It is done as a job: the
        answer comes at once, and `job` tells how far it is.

        POST /v1/calibration

        Raises EbbError. 400: The request makes no sense. 422: A tier cannot be measured. 429: With
        `job=true`: too many jobs are under way. 500: The operation failed. 507: There is no room
        for the record; nothing was changed."""
        return self._call("POST", "/v1/calibration", Job, query={"job": True})

    def events(
        self,
        *,
        vm: Optional[str] = None,
        type: Optional[str] = None,
        since: Optional[int] = None,
        follow: Optional[bool] = None,
        last_event_id: Optional[int] = None,
    ) -> Iterator[Event]:
        """What happens to VMs, as server-sent events: what the daemon still has of it, and then
        what happens from now on. The id of each is the event's number, and its data is the event. A
        line that begins with a colon comes every 15 s. A reader that is too slow loses events, and
        is told so by an event of type `lost`.

        GET /v1/events

        Raises EbbError. 400: The request makes no sense. 429: Too many streams are open.

        vm: Only those of this VM; it need not exist. Without it: all.

        type: Only those of these types, with commas between them. Without it: all.

        since: Only those after this number. Without it: all that the daemon still has. The header
            `Last-Event-ID` counts before this.

        follow: Whether the stream goes on with what happens from now on. Without it: yes.

        last_event_id: Only events after this number; it counts before `since`."""
        return self._events(
            "/v1/events",
            Event,
            query={"vm": vm, "type": type, "since": since, "follow": follow},
            headers={"Last-Event-ID": last_event_id},
        )

    def history(
        self,
        *,
        vm: Optional[str] = None,
        from_: Optional[int] = None,
        to: Optional[int] = None,
        step: Optional[int] = None,
    ) -> History:
        """What the host and its VMs were like: every 15 s for a day, every 5 min for 90 days.

        GET /v1/history

        Raises EbbError. 400: The request makes no sense, or asks for too many moments. 422: There
        is no history, or the answer would be longer than 32 MiB. 500: The operation failed. 503:
        History is being read for another request, or other machines have not taken their answers
        yet.

        vm: Tell of this VM only; null: of all.

        from_: The first second, counted since 1970 (UTC).

        to: The last second, counted since 1970 (UTC).

        step: Time from one moment to the next, in seconds; null: 15 s."""
        return self._call(
            "GET",
            "/v1/history",
            History,
            query={"vm": vm, "from": from_, "to": to, "step": step},
        )

    def jobs(self) -> List[Job]:
        """Jobs: those under way, and the last ones that have ended. No VM is asked.

        GET /v1/jobs"""
        return self._call("GET", "/v1/jobs", List[Job])

    def job(self, id: int) -> Job:
        """One job. No VM is asked: progress is at most a second old, unless the VM is busy.

        GET /v1/jobs/{id}

        Raises EbbError. 400: The request makes no sense. 404: No such job."""
        return self._call("GET", f"/v1/jobs/{id}", Job)

    def cancel_job(self, id: int) -> Job:
        """Cancel a job. The answer comes at once; the job ends after its present step, and what was
        done until then stays done. A resize drops its target, and the VM keeps its size.

        DELETE /v1/jobs/{id}

        Raises EbbError. 400: The request makes no sense. 404: No such job. 422: It has ended, or
        cannot be cancelled."""
        return self._call("DELETE", f"/v1/jobs/{id}", Job)

    def observe(self) -> HostVms:
        """All VMs of the host, managed or not, as `ebb observe` and `ebb discover` see them: those
        that Ebb manages, and those of root and of libvirt's users. No VM is asked. Ebb looks once
        in 5 s at most, however many clients ask.

        GET /v1/observe

        Raises EbbError. 500: The operation failed. 503: Ebb looks at the VMs for another request,
        and nothing is known of them yet."""
        return self._call("GET", "/v1/observe", HostVms)

    def openapi(self) -> Any:
        """This document.

        GET /v1/openapi.json"""
        return self._call("GET", "/v1/openapi.json", Any)

    def pilot(self) -> PilotStatus:
        """The pilot, what it sees and what it decided last.

        GET /v1/pilot"""
        return self._call("GET", "/v1/pilot", PilotStatus)

    def set_pilot(self, request: PilotRequest) -> PilotStatus:
        """Turn the pilot on or off, or change its reserve.

        PUT /v1/pilot

        Raises EbbError. 400: The request makes no sense. 422: The host has less than the reserve.
        500: The operation failed. 507: There is no room for the record; nothing was changed."""
        return self._call("PUT", "/v1/pilot", PilotStatus, request=request)

    def pilot_sight(self) -> PilotSight:
        """What the pilot saw in its last look.

        GET /v1/pilot/sight

        Raises EbbError. 422: The pilot is off."""
        return self._call("GET", "/v1/pilot/sight", PilotSight)

    def pool(self) -> PoolStatus:
        """The pool, and the VMs in it.

        GET /v1/pool"""
        return self._call("GET", "/v1/pool", PoolStatus)

    def set_pool(self, request: PoolRequest) -> PoolStatus:
        """Set the size of the pool, or end the pool.

        PUT /v1/pool

        Raises EbbError. 400: The request makes no sense. 422: The pool would be smaller than its
        shares, or larger than the host's memory. 500: The operation failed. 507: There is no room
        for the record; nothing was changed."""
        return self._call("PUT", "/v1/pool", PoolStatus, request=request)

    def top(self) -> Top:
        """The host and all VMs at this moment. No VM is asked: the figures are those that the VMs'
        processes published last, at most a second ago unless a VM is busy.

        GET /v1/top

        Raises EbbError. 500: The operation failed."""
        return self._call("GET", "/v1/top", Top)

    def version(self) -> Version:
        """The daemon's release, process and run directory.

        GET /v1/version"""
        return self._call("GET", "/v1/version", Version)

    def list(self) -> List[VmSummary]:
        """All managed VMs.

        GET /v1/vms"""
        return self._call("GET", "/v1/vms", List[VmSummary])

    def attach(self, request: AttachRequest) -> VmStatus:
        """Manage a QEMU that runs already.

        POST /v1/vms/attach

        Raises EbbError. 400: The request makes no sense. 409: The name is in use, or the VM is
        managed already. 422: This process cannot be managed. 500: The operation failed. 503: The VM
        is managed, but its status is not known yet: ask for it again. 507: There is no room for the
        record; nothing was changed."""
        return self._call("POST", "/v1/vms/attach", VmStatus, request=request)

    def run(self, request: RunRequest) -> VmStatus:
        """Start QEMU and manage the VM.

        POST /v1/vms/run

        Raises EbbError. 400: The request makes no sense. 409: The name is in use. 422: The host or
        QEMU does not allow it. 500: The operation failed. 503: The VM is managed, but its status is
        not known yet: ask for it again. 507: There is no room for the record; nothing was
        changed."""
        return self._call("POST", "/v1/vms/run", VmStatus, request=request)

    def status(self, name: str, *, counts: Optional[bool] = None) -> VmStatus:
        """One VM's status.

        GET /v1/vms/{name}

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 503: The VM cannot answer
        now: it is being recovered, is busy, hangs, or waits for room.

        counts: Look at every frame of the guest, which takes milliseconds per GiB. Without this,
            figures that need it are null. What another client had counted less than a second ago is
            told again."""
        return self._call("GET", f"/v1/vms/{quoted(name)}", VmStatus, query={"counts": counts})

    def detach(self, name: str) -> DetachReport:
        """Bring a VM's memory back and stop managing it; the guest runs on.

        DELETE /v1/vms/{name}

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: It cannot be
        detached now. 500: The operation failed. 503: The VM cannot answer now: it is being
        recovered, is busy, hangs, or waits for room. 507: There is no room for the record; nothing
        was changed."""
        return self._call("DELETE", f"/v1/vms/{quoted(name)}", DetachReport)

    def detach_job(self, name: str) -> Job:
        """Bring a VM's memory back and stop managing it; the guest runs on. It is done as a job:
        the answer comes at once, and `job` tells how far it is.

        DELETE /v1/vms/{name}

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: It cannot be
        detached now. 429: With `job=true`: too many jobs are under way. 500: The operation failed.
        503: The VM cannot answer now: it is being recovered, is busy, hangs, or waits for room.
        507: There is no room for the record; nothing was changed."""
        return self._call("DELETE", f"/v1/vms/{quoted(name)}", Job, query={"job": True})

    def auto(self, name: str, request: AutoRequest) -> AutoStatus:
        """Switch automatic reclaim on or off.

        PUT /v1/vms/{name}/auto

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM's memory
        cannot be reclaimed. 500: The operation failed. 503: The VM cannot answer now: it is being
        recovered, is busy, hangs, or waits for room. 507: There is no room for the record; nothing
        was changed."""
        return self._call("PUT", f"/v1/vms/{quoted(name)}/auto", AutoStatus, request=request)

    def evict(self, name: str, request: EvictRequest) -> EvictReport:
        """Evict memory now, whether it is used or not: for tests and emergencies.

        POST /v1/vms/{name}/evict

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM's memory
        cannot be evicted. 500: The operation failed. 503: The VM cannot answer now: it is being
        recovered, is busy, hangs, or waits for room. 507: There is no room for the record; nothing
        was changed."""
        return self._call("POST", f"/v1/vms/{quoted(name)}/evict", EvictReport, request=request)

    def evict_job(self, name: str, request: EvictRequest) -> Job:
        """Evict memory now, whether it is used or not: for tests and emergencies. It is done as a
        job: the answer comes at once, and `job` tells how far it is.

        POST /v1/vms/{name}/evict

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM's memory
        cannot be evicted. 429: With `job=true`: too many jobs are under way. 500: The operation
        failed. 503: The VM cannot answer now: it is being recovered, is busy, hangs, or waits for
        room. 507: There is no room for the record; nothing was changed."""
        return self._call(
            "POST",
            f"/v1/vms/{quoted(name)}/evict",
            Job,
            request=request,
            query={"job": True},
        )

    def heat(self, name: str) -> HeatReport:
        """Progress of a monitoring, and the figures of the last one.

        GET /v1/vms/{name}/heat

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 503: The VM cannot answer
        now: it is being recovered, is busy, hangs, or waits for room."""
        return self._call("GET", f"/v1/vms/{quoted(name)}/heat", HeatReport)

    def monitor(self, name: str, request: HeatRequest) -> HeatReport:
        """Begin to monitor which memory is hot, unless that is known. The answer comes at once; the
        monitoring goes on in the background.

        POST /v1/vms/{name}/heat

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM cannot be
        monitored. 500: The operation failed. 503: The VM cannot answer now: it is being recovered,
        is busy, hangs, or waits for room."""
        return self._call("POST", f"/v1/vms/{quoted(name)}/heat", HeatReport, request=request)

    def monitor_job(self, name: str, request: HeatRequest) -> Job:
        """Begin to monitor which memory is hot, unless that is known. The answer comes at once; the
        monitoring goes on in the background. It is done as a job: the answer comes at once, and
        `job` tells how far it is.

        POST /v1/vms/{name}/heat

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM cannot be
        monitored. 429: With `job=true`: too many jobs are under way. 500: The operation failed.
        503: The VM cannot answer now: it is being recovered, is busy, hangs, or waits for room."""
        return self._call(
            "POST",
            f"/v1/vms/{quoted(name)}/heat",
            Job,
            request=request,
            query={"job": True},
        )

    def limit(self, name: str, request: LimitRequest) -> LimitStatus:
        """Set or lift the limit on a VM's resident memory.

        PUT /v1/vms/{name}/limit

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM cannot have
        this limit. 500: The operation failed. 503: The VM cannot answer now: it is being recovered,
        is busy, hangs, or waits for room. 507: There is no room for the record; nothing was
        changed."""
        return self._call("PUT", f"/v1/vms/{quoted(name)}/limit", LimitStatus, request=request)

    def reclaim(self, name: str, request: ReclaimRequest) -> ReclaimReport:
        """Reclaim the guest's free memory once.

        POST /v1/vms/{name}/reclaim

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM's memory
        cannot be reclaimed. 500: The operation failed. 503: The VM cannot answer now: it is being
        recovered, is busy, hangs, or waits for room. 507: There is no room for the record; nothing
        was changed."""
        return self._call(
            "POST",
            f"/v1/vms/{quoted(name)}/reclaim",
            ReclaimReport,
            request=request,
        )

    def reclaim_job(self, name: str, request: ReclaimRequest) -> Job:
        """Reclaim the guest's free memory once. It is done as a job: the answer comes at once, and
        `job` tells how far it is.

        POST /v1/vms/{name}/reclaim

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM's memory
        cannot be reclaimed. 429: With `job=true`: too many jobs are under way. 500: The operation
        failed. 503: The VM cannot answer now: it is being recovered, is busy, hangs, or waits for
        room. 507: There is no room for the record; nothing was changed."""
        return self._call(
            "POST",
            f"/v1/vms/{quoted(name)}/reclaim",
            Job,
            request=request,
            query={"job": True},
        )

    def rule(self, name: str, request: RuleRequest) -> PilotStatus:
        """Change the pilot's rule for a VM. It holds for later VMs of this name, too.

        PUT /v1/vms/{name}/rule

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: The bounds exclude
        each other. 500: The operation failed. 507: There is no room for the record; nothing was
        changed."""
        return self._call("PUT", f"/v1/vms/{quoted(name)}/rule", PilotStatus, request=request)

    def share(self, name: str, request: ShareRequest) -> PoolStatus:
        """Give a VM a share of the pool, or take the VM out of the pool.

        PUT /v1/vms/{name}/share

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: The shares do not
        fit together, or this VM cannot have one. 500: The operation failed. 503: The VM cannot
        answer now: it is being recovered, is busy, hangs, or waits for room. 507: There is no room
        for the record; nothing was changed."""
        return self._call("PUT", f"/v1/vms/{quoted(name)}/share", PoolStatus, request=request)

    def size(self, name: str) -> ResizeReport:
        """Progress of a resize.

        GET /v1/vms/{name}/size

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: The VM has no
        target. 503: The VM cannot answer now: it is being recovered, is busy, hangs, or waits for
        room."""
        return self._call("GET", f"/v1/vms/{quoted(name)}/size", ResizeReport)

    def resize(self, name: str, request: ResizeRequest) -> ResizeReport:
        """Set a VM's target size, or keep its size. The answer comes at once; the resize goes on in
        the background.

        PUT /v1/vms/{name}/size

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM cannot be
        resized like this. 500: The operation failed. 503: The VM cannot answer now: it is being
        recovered, is busy, hangs, or waits for room. 507: There is no room for the record; nothing
        was changed."""
        return self._call("PUT", f"/v1/vms/{quoted(name)}/size", ResizeReport, request=request)

    def resize_job(self, name: str, request: ResizeRequest) -> Job:
        """Set a VM's target size, or keep its size. The answer comes at once; the resize goes on in
        the background. It is done as a job: the answer comes at once, and `job` tells how far it
        is.

        PUT /v1/vms/{name}/size

        Raises EbbError. 400: The request makes no sense. 404: No such VM. 422: This VM cannot be
        resized like this. 429: With `job=true`: too many jobs are under way. 500: The operation
        failed. 503: The VM cannot answer now: it is being recovered, is busy, hangs, or waits for
        room. 507: There is no room for the record; nothing was changed."""
        return self._call(
            "PUT",
            f"/v1/vms/{quoted(name)}/size",
            Job,
            request=request,
            query={"job": True},
        )

    def whoami(self) -> WhoAmI:
        """What the client may do: by its token, or because it asks on the host itself.

        GET /v1/whoami"""
        return self._call("GET", "/v1/whoami", WhoAmI)
