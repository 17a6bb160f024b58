"""The shapes of requests and answers."""

# Made by generate.py from docs/openapi.json: change that, not this.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Literal, Optional

__all__ = [
    "Accelerator",
    "ApiErrorBody",
    "AttachRequest",
    "AutoRequest",
    "AutoStatus",
    "Backing",
    "BalloonStatus",
    "Calibration",
    "Confinement",
    "DecisionFigures",
    "DegreeBytes",
    "DetachReport",
    "DeviceServer",
    "DiskCounts",
    "DiskFormat",
    "DiskRequest",
    "DmaMode",
    "DriverState",
    "ErrorCode",
    "Event",
    "EventType",
    "EvictReport",
    "EvictRequest",
    "FaultCounts",
    "FaultSpread",
    "FaultTimes",
    "Fragmentation",
    "GuestFigures",
    "GuestStatus",
    "GuestUsage",
    "HeatBlock",
    "HeatFigures",
    "HeatRegion",
    "HeatReport",
    "HeatRequest",
    "HeatTracker",
    "History",
    "HostVm",
    "HostVms",
    "Job",
    "JobFigures",
    "JobKind",
    "JobProgress",
    "JobState",
    "JobUnit",
    "KindBytes",
    "LimitRequest",
    "LimitStatus",
    "LostFigures",
    "MayTake",
    "Mechanism",
    "MemoryDeviceStatus",
    "MemoryParts",
    "Mode",
    "OnViolation",
    "PilotAction",
    "PilotDecision",
    "PilotMode",
    "PilotRequest",
    "PilotSight",
    "PilotStage",
    "PilotStatus",
    "PilotVm",
    "PoolMember",
    "PoolRequest",
    "PoolStatus",
    "PressureStatus",
    "ReachStatus",
    "ReachingDevice",
    "ReclaimReport",
    "ReclaimRequest",
    "ReclaimWhen",
    "RefusalFigures",
    "ResizeReport",
    "ResizeRequest",
    "Role",
    "RuleRequest",
    "RunRequest",
    "SeenBound",
    "SeenPlugged",
    "SeenVm",
    "ShareRequest",
    "SharingStatus",
    "SizeMechanism",
    "SizeState",
    "SizeStatus",
    "Skipped",
    "StageFigures",
    "State",
    "StateFigures",
    "TierSpeed",
    "TierStatus",
    "TierUse",
    "Top",
    "TopHost",
    "TopVm",
    "Version",
    "VmChange",
    "VmClass",
    "VmStatus",
    "VmSummary",
    "WarningFigures",
    "WhoAmI",
]

Accelerator = Literal["tcg", "kvm"]
"""What runs the guest's instructions."""

Backing = Literal["auto", "hugetlb", "thp", "small"]
"""What the guest's RAM is made of on the host."""

DeviceServer = Literal["qemu", "ebb"]
"""Who serves a device."""

DiskFormat = Literal["raw"]
"""The format of a disk's image, as the request states it."""

DmaMode = Literal["pinned", "strict"]
"""How a disk that Ebb serves accesses the guest's memory."""

DriverState = Literal["ready", "absent", "unknown"]
"""Whether the guest drives a device."""

ErrorCode = Literal["bad_request", "unauthorized", "forbidden", "unknown_route", "unknown_vm",
    "unknown_job", "vm_over", "wrong_method", "too_slow", "taken", "too_large", "not_allowed",
    "not_trusted", "not_set", "too_many", "failed", "unavailable", "outcome_unknown", "no_room"]
"""Why a request was refused or failed. Later releases may add codes: treat one that you do not know
by the HTTP status."""

EventType = Literal["state", "refusal", "decision", "warning", "stage", "job", "lost"]
"""What an event is about. Later releases may add types."""

HeatTracker = Literal["guest_tables", "vmm_table", "idle_pages"]
"""How Ebb sees which memory a VM uses."""

JobKind = Literal["reclaim", "evict", "resize", "detach", "heat", "calibrate"]
"""What a job does. Later releases may add kinds."""

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]
"""How far a job is."""

JobUnit = Literal["bytes", "windows"]
"""What a job's progress is counted in."""

MayTake = Literal["everything", "free_only", "nothing"]
"""Which of a VM's memory Ebb may reclaim or evict."""

Mechanism = Literal["hyper_alloc", "v_probe", "none"]
"""How a VM's free memory is found and reclaimed."""

Mode = Literal["strict", "release"]
"""How reclaimed memory is watched."""

OnViolation = Literal["allow", "stop"]
"""What happens if a guest touches hard-reclaimed memory."""

PilotAction = Literal["reclaim", "limit", "compress", "plug"]
"""What the pilot decided to do with a VM."""

PilotMode = Literal["off", "dry_run", "on"]
"""What the pilot does."""

PilotStage = Literal["ample", "tight", "short", "critical"]
"""How short of memory the host is."""

ReclaimWhen = Literal["interval", "pressure"]
"""What begins a round of automatic reclaim."""

Role = Literal["read", "control", "host"]
"""What a client may ask for."""

SizeMechanism = Literal["hyper_alloc", "balloon", "virtio_mem"]
"""What changes a VM's size."""

SizeState = Literal["reached", "moving", "waiting", "off"]
"""Progress of a VM to its target."""

State = Literal["held", "taking_up", "not_taken_up"]
"""What Ebb does with the VM."""

VmChange = Literal["started", "attached", "recovering", "managed", "not_recovered", "detached",
    "ended"]
"""What Ebb does with a VM from now on."""

VmClass = Literal["batch", "normal", "latency"]
"""How much a VM's speed matters to the pilot."""


@dataclass(kw_only=True)
class ApiErrorBody:
    """The body of an API error: why a request was refused or failed."""

    code: ErrorCode
    """Why, for programs. Null only in an answer of an earlier release, or of a later one with a
    code that this one does not know."""

    error: str
    """One line: what is wrong, and what to do."""

    hint: Optional[str] = None
    """What to do; null: the line says it, or nothing can be done."""


@dataclass(kw_only=True)
class AttachRequest:
    """Manage a QEMU that runs already."""

    min_order: Optional[int] = None
    """Smallest buddy block to reclaim, as its order: 6 to 10; null: 9, which is 2 MiB."""

    mode: Optional[Mode] = None
    """How reclaimed memory is watched; null: Ebb chooses."""

    name: str
    """The VM's name, unique on the host."""

    pid: int
    """QEMU's process."""

    qmp: Optional[str] = None
    """QEMU's QMP socket, as an absolute path; null: Ebb looks for it on QEMU's command line."""


@dataclass(kw_only=True)
class AutoRequest:
    """Switch automatic reclaim on or off."""

    below_bytes: Optional[int] = None
    """The host is short of memory if less than this is available; null keeps what is set. In place
    of `below_percent`. In bytes."""

    below_percent: Optional[int] = None
    """The host is short of memory if less than this part of its memory is available, 0 to 100
    percent; null keeps what is set (at first 10). In place of `below_bytes`."""

    interval_ms: Optional[int] = None
    """Time between two reclaims, 100 ms to a day; null keeps what is set (at first 5 s). In
    milliseconds."""

    keep_bytes: Optional[int] = None
    """Free memory to leave in the guest; null keeps what is set (at first 0: the reserve alone). In
    bytes."""

    on: bool
    """Whether Ebb reclaims by itself."""

    when: Optional[ReclaimWhen] = None
    """What begins a round; null keeps what is set (at first: interval)."""


@dataclass(kw_only=True)
class AutoStatus:
    """Automatic reclaim of one VM."""

    below_bytes: Optional[int] = None
    """Available memory of the host below which there is pressure; null: `below_percent` counts. In
    bytes."""

    below_percent: Optional[int] = None
    """Available memory of the host below which there is pressure, in percent; null: `below_bytes`
    counts."""

    interval_ms: int
    """Time between two rounds, in milliseconds. With `when` as `pressure`, it counts only while
    `ebbd` does not watch the host."""

    keep_bytes: int
    """Free memory to leave in the guest. V-Probe leaves 64 MiB if this is less. In bytes."""

    last: Optional[ReclaimReport] = None
    """What the last round did; null before the first."""

    on: bool
    """Whether automatic reclaim is on."""

    pressure: Optional[PressureStatus] = None
    """Host pressure, as the VM's process knows it; null unless `when` is `pressure`."""

    stuck: Optional[str] = None
    """Why Ebb reclaims nothing now; null: nothing is in the way, or automatic reclaim is off."""

    when: Optional[ReclaimWhen] = None
    """What begins a round."""


@dataclass(kw_only=True)
class BalloonStatus:
    """A VM's balloon."""

    ballooned_bytes: int
    """What the balloon holds. In bytes."""

    deflates_on_oom: bool
    """The guest takes memory out of the balloon before it kills a process."""

    driver: DriverState
    """Whether the guest drives the balloon."""

    figures: Optional[GuestFigures] = None
    """What the guest reports of its memory through the balloon; null: nothing yet."""

    releases: int
    """How often Ebb emptied the balloon at once because the guest was about to run out of memory;
    counted by the VM's current process."""

    reporting: Optional[bool] = None
    """Whether the guest reports free pages; null: QEMU does not tell."""

    reporting_offered: bool
    """QEMU offers free page reporting: it frees pages that the guest reports as free."""


@dataclass(kw_only=True)
class Calibration:
    """Speed of the host's tiers, and the weights of reads and writes that follow from it."""

    read_weight: int
    """Weight of a window in which a page was read."""

    tiers: List[TierSpeed]
    """Memory, then NUMA nodes in order of number, then tiers that are reached by a fault."""

    write_weight: int
    """Weight of a window in which a page was written."""


@dataclass(kw_only=True)
class Confinement:
    """How Ebb confines a QEMU that it has started."""

    cgroups: List[str]
    """Directories of QEMU's control groups, one in each hierarchy that limits it."""

    gid: int
    """Number of QEMU's group."""

    lacks: List[str]
    """What is missing of the confinement, and why."""

    privileged: bool
    """QEMU runs as root, with the daemon's capabilities (`--privileged`)."""

    sandbox: bool
    """QEMU filters its own system calls (seccomp)."""

    uid: int
    """Number of QEMU's user."""


@dataclass(kw_only=True)
class DecisionFigures:
    """A decision of the pilot."""

    action: PilotAction
    """What was to be done."""

    bytes: Optional[int] = None
    """How much free memory was to be reclaimed; null: it is about something else. In bytes."""

    from_bytes: Optional[int] = None
    """The limit, the most compressed memory, or what was to be plugged, before; null: none, or it
    is about free memory. In bytes."""

    number: int
    """Its number, as the pilot's status has it."""

    outcome: str
    """What came of it."""

    to_bytes: Optional[int] = None
    """The same from now on; null: none, the daemon's option, or it is about free memory. In
    bytes."""

    why: str
    """Why, with the figures."""


@dataclass(kw_only=True)
class DegreeBytes:
    """Memory of one degree."""

    bytes: int
    """Memory of this degree. In bytes."""

    degree: int
    """The degree: windows with reads and with writes, each weighted."""


@dataclass(kw_only=True)
class DetachReport:
    """What a detach brought back."""

    duration_ns: int
    """Duration in nanoseconds."""

    restored_bytes: int
    """Memory that was brought back. In bytes."""


@dataclass(kw_only=True)
class DiskCounts:
    """What all disks of a VM that Ebb serves have done, since the VM's current process serves
    them."""

    dma_faults: int
    """Refused accesses to guest memory: outside of RAM, or to a frame that no device may use."""

    failed_requests: int
    """Requests that were answered with an error."""

    read_bytes: int
    """Read from the images. In bytes."""

    requests: int
    """Answered requests."""

    written_bytes: int
    """Written to the images. In bytes."""


@dataclass(kw_only=True)
class DiskRequest:
    """A disk that Ebb serves."""

    dma: Optional[DmaMode] = None
    """How the disk accesses the guest's memory."""

    format: Optional[DiskFormat] = None
    """The image's format; null: raw, but an image that begins like another format is refused."""

    path: str
    """A raw image: a file or a block device; absolute path."""

    readonly: Optional[bool] = None
    """The guest cannot write it."""


@dataclass(kw_only=True)
class Event:
    """Something that happened. The member that is named as the type has the figures; the others are
    absent."""

    decision: Optional[DecisionFigures] = None
    """Figures of a decision."""

    job: Optional[JobFigures] = None
    """Figures of a job."""

    lost: Optional[LostFigures] = None
    """Figures of lost events."""

    number: int
    """Its number, greater than that of each earlier event, also of an earlier daemon. Of type
    `lost`: events after this number may be missing."""

    refusal: Optional[RefusalFigures] = None
    """Figures of a refusal."""

    stage: Optional[StageFigures] = None
    """Figures of a change of stage."""

    state: Optional[StateFigures] = None
    """Figures of a change of state."""

    text: str
    """One line that says what happened."""

    time: str
    """When it happened, by RFC 3339, in UTC: `2026-11-28T14:05:12.345Z`."""

    type: EventType
    """What it is about."""

    vm: Optional[str] = None
    """Name of the VM; null: it is about no VM, or about none that is known."""

    warning: Optional[WarningFigures] = None
    """Figures of a warning."""


@dataclass(kw_only=True)
class EvictReport:
    """What an eviction did."""

    abandoned: int
    """Frames that stayed because the guest wrote to them meanwhile."""

    duration_ns: int
    """Duration in nanoseconds."""

    saved_bytes: int
    """Evicted memory. In bytes."""

    saved_frames: int
    """The same in frames of 4 KiB."""

    stopped_by: str
    """Why it evicted no more, in words."""


@dataclass(kw_only=True)
class EvictRequest:
    """Evict memory now, whether it is used or not: for tests and emergencies."""

    bytes: int
    """How much to evict. In bytes."""


@dataclass(kw_only=True)
class FaultCounts:
    """Faults served, by kind."""

    early: int
    """Touches of empty frames before any write to their page metadata; a part of `missing`."""

    metadata: int
    """Writes to protected frames: page metadata, and with a limit also frames that are being
    evicted."""

    missing: int
    """Touches of frames without memory."""

    spurious: int
    """Reclaimed blocks that came back by a metadata write, and that the guest then did not use."""


@dataclass(kw_only=True)
class FaultSpread:
    """How long the faults of a while took, from a fault's arrival to its answer."""

    counts: List[int]
    """How many took less than 1024 ns, how many of the others less than 4 times that, then less
    than 16 times that, and so on. The 14th number has no upper bound. Zeros at the end are left
    out."""

    p50: Optional[int] = None
    """The median, in nanoseconds, right to a factor of 4; null: there was no fault."""

    p99: Optional[int] = None
    """99 of 100 faults are within this many nanoseconds, right to a factor of 4."""


@dataclass(kw_only=True)
class FaultTimes:
    """Quantiles of the time from a fault's arrival to its answer; null before the first fault."""

    p50: Optional[int] = None
    """The median, in nanoseconds."""

    p99: Optional[int] = None
    """99 of 100 faults are within this many nanoseconds."""


@dataclass(kw_only=True)
class Fragmentation:
    """Memory in use by the guest's allocator, by kind."""

    huge: KindBytes
    """Blocks of 2 MiB and more."""

    movable: KindBytes
    """Memory of processes, and page cache."""

    unmovable: KindBytes
    """Memory of the kernel, which cannot be moved."""


@dataclass(kw_only=True)
class GuestFigures:
    """What a guest reports of its memory through its balloon; null: it does not report this."""

    age_s: int
    """Age of these figures, in seconds."""

    available_bytes: Optional[int] = None
    """What the guest could use without running out of memory. In bytes."""

    cache_bytes: Optional[int] = None
    """Page cache. In bytes."""

    free_bytes: Optional[int] = None
    """Free memory. In bytes."""

    major_faults: Optional[int] = None
    """Its faults that waited for a disk since it booted."""

    minor_faults: Optional[int] = None
    """Its other faults since it booted."""

    swapped_in_bytes: Optional[int] = None
    """Read from its own swap space since it booted. In bytes."""

    swapped_out_bytes: Optional[int] = None
    """Written to its own swap space since it booted. In bytes."""

    total_bytes: Optional[int] = None
    """What the guest's kernel manages, without the balloon. In bytes."""


@dataclass(kw_only=True)
class GuestStatus:
    """What the guest's own memory tells about the guest."""

    anonymous_bytes: Optional[int] = None
    """Anonymous memory of its processes. In bytes."""

    file_bytes: Optional[int] = None
    """Page cache. In bytes."""

    free_blocks: Optional[List[int]] = None
    """Free buddy blocks by order, 0 to 10."""

    kernel: Optional[str] = None
    """The guest kernel's release, as it names itself."""

    offline_bytes: Optional[int] = None
    """Memory that the guest has taken out of its own use. In bytes."""

    page_table_bytes: Optional[int] = None
    """Page tables of its processes. In bytes."""

    registered: Optional[bool] = None
    """Whether only what the guest's kernel has registered is known of it."""

    slab_bytes: Optional[int] = None
    """Kernel objects. In bytes."""

    trusted: bool
    """Whether the guest is trusted, so that Ebb may reclaim memory by its page metadata."""

    why: Optional[str] = None
    """Why the guest is not trusted; null if it is."""


@dataclass(kw_only=True)
class GuestUsage:
    """What a guest uses its memory for, as its kernel counts."""

    anonymous_bytes: int
    """The part of `used_bytes` that is mapped anonymous memory: AnonPages. In bytes."""

    cache_bytes: int
    """Page cache with buffers and shared memory: Cached, Buffers and SwapCached. In bytes."""

    cold_cache_bytes: int
    """The part of `cache_bytes` that was not used for long: Inactive(file). In bytes."""

    free_bytes: int
    """Free memory: MemFree. In bytes."""

    reclaimable_bytes: int
    """The part of `free_bytes` that Ebb would give back now: blocks of 2 MiB and more without the
    reserve of 64 MiB, as far as they take host memory. In bytes."""

    release: str
    """The kernel's release, as `uname -r` prints it."""

    slab_bytes: int
    """The part of `used_bytes` that is kernel objects: Slab. In bytes."""

    total_bytes: int
    """All memory that the kernel manages: meminfo's MemTotal. In bytes."""

    used_bytes: int
    """Memory in use that is no page cache: `total_bytes` less `cache_bytes` and `free_bytes`. In
    bytes."""


@dataclass(kw_only=True)
class HeatBlock:
    """A block of a region."""

    degree: float
    """Mean degree of the block's pages, unused ones included."""

    hot_bytes: int
    """Memory of the block in the hot set. In bytes."""

    used_bytes: int
    """Memory of the block that was used. In bytes."""


@dataclass(kw_only=True)
class HeatFigures:
    """What a monitoring found."""

    age_s: int
    """Seconds since it ended. In seconds."""

    block_bytes: int
    """Size of a block of `regions`. In bytes."""

    degree_max: int
    """The highest possible degree."""

    degrees: List[DegreeBytes]
    """Memory by degree, coldest first; unused memory is left out."""

    duration_ms: int
    """Duration of all windows together, in milliseconds."""

    host_needs: str
    """What this tracker needs of the host, and which uses it misses."""

    hot_bytes: int
    """The hot set: the hottest 80 % of the pages of degree 3 or more. In bytes."""

    is_truncated: bool
    """The guest has more page tables than were read."""

    looking_us: int
    """Time that the worker spent on the monitoring, in microseconds."""

    marks_cleared: int
    """Marks of use that were cleared."""

    memory_bytes: int
    """The monitored memory: all that the VM can have. In bytes."""

    read_weight: int
    """Weight of a window in which a page was read."""

    regions: List[HeatRegion]
    """The heat map: ranges of guest-physical memory, in order."""

    tables_pruned: int
    """Page tables that were not read, because they had not been used."""

    tables_read: int
    """Page tables of the guest that were read."""

    tracker: HeatTracker
    """How Ebb saw the uses."""

    tracker_reason: str
    """Why this tracker."""

    used_bytes: int
    """Pages that were used in any window. In bytes."""

    windows: int
    """Windows in which page uses were counted."""

    write_weight: int
    """Weight of a window in which a page was written."""


@dataclass(kw_only=True)
class HeatRegion:
    """A range of guest-physical memory."""

    blocks: List[HeatBlock]
    """Its blocks, in order."""

    start: int
    """First guest-physical address."""


@dataclass(kw_only=True)
class HeatReport:
    """Progress of a monitoring, and the figures of the last one."""

    failed: Optional[str] = None
    """Why the last monitoring failed; null: it succeeded, or there was none."""

    figures: Optional[HeatFigures] = None
    """Figures of the last monitoring that succeeded; null: there was none."""

    monitoring: bool
    """A monitoring is under way; its figures come when it ends."""

    windows: int
    """Windows of a monitoring."""

    windows_done: int
    """Windows of the monitoring under way that have ended."""


@dataclass(kw_only=True)
class HeatRequest:
    """Report which memory is hot. Ebb monitors the VM for it, unless figures are known."""

    fresh: Optional[bool] = None
    """Monitor the VM again, even if figures are known."""


@dataclass(kw_only=True)
class History:
    """What the host and its VMs were like, in moments from the first to the last. Where several
    moments are on record within a step, they are one moment here: rates are means, times of faults
    are those of all faults, whoever waited or missed memory at any time did so, and all else is as
    it was last."""

    points: List[Top]
    """The moments."""

    step_s: int
    """Time from one moment to the next, in seconds, where all moments are on record."""


@dataclass(kw_only=True)
class HostVm:
    """A VM of the host: what its guest uses, and whether Ebb manages it or could."""

    attach_as: Optional[str] = None
    """The name that `ebb attach --all` would give it; null: Ebb manages it, cannot, or has no name
    left for it."""

    managed_as: Optional[str] = None
    """The name under which Ebb manages it; null: Ebb does not."""

    manager: Optional[str] = None
    """Who started it: `libvirt`, `KubeVirt`, `Proxmox VE`, `Incus` or `Kata Containers`; null: not
    known."""

    memory_bytes: int
    """The VM's RAM without what is plugged. In bytes."""

    name: Optional[str] = None
    """The VM's name by its command line; null: it has none."""

    obstacle: Optional[str] = None
    """Why it cannot be managed as it is, and what to do; null: it can, as far as can be seen."""

    pid: int
    """QEMU's process number."""

    reason: Optional[str] = None
    """Why something is not known; null: all is."""

    resident_bytes: Optional[int] = None
    """The part of it that takes host memory; null: the RAM was not found. In bytes."""

    usage: Optional[GuestUsage] = None
    """What the guest uses; null: not known."""

    uuid: Optional[str] = None
    """The VM's UUID by its command line; null: it has none."""


@dataclass(kw_only=True)
class HostVms:
    """The VMs of a host, as they were a few seconds ago at most. While a look takes long, they may
    be a minute old."""

    age_ms: int
    """Age of what is told, in milliseconds."""

    left_out: int
    """VMs that are left out, because an answer has 1000 at most."""

    vms: List[HostVm]
    """The VMs, by QEMU's process number."""


@dataclass(kw_only=True)
class Job:
    """A long operation. The report that belongs to its kind is there once it has ended; the others
    are absent. Other kinds have none: the route that they were begun by tells what they found."""

    begun: str
    """When it was asked for, by RFC 3339, in UTC."""

    can_cancel: bool
    """Whether it can be cancelled now."""

    cancelling: bool
    """It was cancelled, and ends after its present step."""

    detach: Optional[DetachReport] = None
    """What a detach brought back."""

    ended: Optional[str] = None
    """When it ended, by RFC 3339, in UTC; null: it has not."""

    error: Optional[ApiErrorBody] = None
    """Why it has failed; null: it has not."""

    evict: Optional[EvictReport] = None
    """What an eviction did."""

    id: int
    """Its number, greater than that of each earlier job, also of an earlier daemon."""

    kind: JobKind
    """What it does."""

    progress: Optional[JobProgress] = None
    """How much is done; null: that is not known, or not yet."""

    reclaim: Optional[ReclaimReport] = None
    """What a reclaim did."""

    resize: Optional[ResizeReport] = None
    """How far a resize came. Where it is blocked, its state is `waiting`."""

    state: JobState
    """How far it is."""

    text: str
    """What came of it, in one line; empty: it has not ended."""

    vm: Optional[str] = None
    """Name of the VM; null: it is about the host."""


@dataclass(kw_only=True)
class JobFigures:
    """A job that was asked for, or has ended."""

    id: int
    """Its number."""

    kind: JobKind
    """What it does."""

    state: JobState
    """How far it is."""


@dataclass(kw_only=True)
class JobProgress:
    """How much of a job is done."""

    done: int
    """What is done."""

    total: Optional[int] = None
    """What there is to do; null: nobody knows. It may end with less: a reclaim ends where nothing
    more is free."""

    unit: JobUnit
    """What both are counted in."""


@dataclass(kw_only=True)
class KindBytes:
    """Memory in use of one kind."""

    huge_bytes: int
    """Huge frames of which any part is in use. In bytes."""

    used_bytes: int
    """Memory in use in them. In bytes."""


@dataclass(kw_only=True)
class LimitRequest:
    """Set or lift the limit on a VM's resident memory."""

    bytes: Optional[int] = None
    """The limit; null: lift it. In bytes."""

    high_bytes: Optional[int] = None
    """High mark: above this, the guest's faults wait for eviction; null: a little below the limit.
    In bytes."""

    low_bytes: Optional[int] = None
    """Low mark: eviction goes down to this; null: a little below the high mark. In bytes."""


@dataclass(kw_only=True)
class LimitStatus:
    """The limit on a VM's resident memory, and what was evicted because of it. Totals are counted
    by the VM's current process."""

    ahead_hit_total_bytes: int
    """The part of `ahead_total_bytes` that was used. In bytes."""

    ahead_total_bytes: int
    """Read back with those, ahead of a touch. In bytes."""

    all_swap_files_bytes: Optional[int] = None
    """Disk space of the swap files of all VMs, at the last look. In bytes."""

    bytes: Optional[int] = None
    """The limit on resident memory; null: no limit. In bytes."""

    clean_bytes: int
    """Refilled memory that keeps its slots in the swap file: if it is unchanged, it is evicted
    again without a write. In bytes."""

    clean_total_bytes: int
    """Evicted without a write, because the slot still held the same content. In bytes."""

    compressed_bytes: int
    """Memory that the compressed pages take, free parts of chunks included; it counts against the
    limit. In bytes."""

    compressed_limit_bytes: int
    """The most that compressed pages may take. In bytes."""

    compressed_pages: int
    """Pages of `saved_bytes` in compressed memory now."""

    compressed_ratio: Optional[float] = None
    """Size of the compressed pages, divided by the memory that they take; null: there are none."""

    dropped_total_bytes: int
    """Evicted content that was dropped before any touch, because the guest has freed the frame
    since its eviction. In bytes."""

    empty_total_bytes: int
    """Evicted without a write, because the guest had freed the frame, or it had the same byte
    everywhere. It comes back without a read. In bytes."""

    false_reads_avoided_total_bytes: int
    """Touched and not read back, because the guest has freed the frame since its eviction (false
    reads avoided). In bytes."""

    false_reads_total_bytes: int
    """Read back although the guest seems to have freed the frame since: its use at the eviction is
    not known (false reads that remain). In bytes."""

    high_bytes: Optional[int] = None
    """High mark: above it, the guest's faults wait a little for eviction; null: no limit. In
    bytes."""

    low_bytes: Optional[int] = None
    """Low mark: eviction goes down to it; null: no limit. In bytes."""

    on_disk_bytes: int
    """Disk-backed memory now. In bytes."""

    on_disk_total_bytes: int
    """Evicted without a write, because a disk block holds the same content (silent writes avoided).
    In bytes."""

    refaulted_total_bytes: Optional[int] = None
    """What was touched and read back, with what was read ahead of it and used, less than 30 s after
    its eviction. In bytes."""

    refilled_total_bytes: int
    """Read back because of a touch. In bytes."""

    replaced_total_bytes: int
    """Old content that a disk request overwrote before it was read back (stale reads avoided). In
    bytes."""

    saved_bytes: int
    """Evicted content in the store now: in the swap file, or in compressed memory. In bytes."""

    saved_total_bytes: int
    """Evicted and saved. In bytes."""

    share_bytes: Optional[int] = None
    """The VM's share of the pool, which then sets the limit; null: the VM is not in the pool. In
    bytes."""

    stuck: Optional[str] = None
    """Why the limit is exceeded, or why the guest waits for evicted content, and what to do; null:
    nothing is in the way."""

    swap_file_bytes: Optional[int] = None
    """Disk space of the VM's swap file, at the last look. In bytes."""

    tracked_blocks: int
    """Blocks of the guest's disks whose content Ebb knows now."""

    waiting_touches: Optional[int] = None
    """Touches that wait for this reason now."""

    waits: Optional[bool] = None
    """The swap file is full, and the guest waits if it needs more memory: until there is room, or
    the limit is raised."""

    written_back_total_bytes: int
    """Moved from compressed memory to the swap file. In bytes."""


@dataclass(kw_only=True)
class LostFigures:
    """Events that may be missing."""

    last: int
    """The last number that may be missing. The first one is that behind the number of this
    event."""


@dataclass(kw_only=True)
class MemoryDeviceStatus:
    """A virtio-mem device."""

    block_bytes: int
    """The unit of plugging. In bytes."""

    driver: DriverState
    """Whether the guest drives the device."""

    max_bytes: int
    """The most that the guest can plug. In bytes."""

    node: int
    """The guest's NUMA node to which the memory belongs."""

    plugged_bytes: int
    """Plugged memory. In bytes."""

    requested_bytes: int
    """What the guest is asked to plug. In bytes."""

    served_by: DeviceServer
    """Who serves the device."""

    violations: Optional[int] = None
    """Touches of unplugged memory; null: QEMU serves the device, and does not tell."""


@dataclass(kw_only=True)
class MemoryParts:
    """Where a VM's memory is, in parts that add up to `memory_bytes`."""

    compressed_bytes: int
    """Evicted, with the content in compressed memory. What that takes is `limit.compressed_bytes`.
    In bytes."""

    disk_backed_bytes: int
    """Evicted, and a block of the guest's disk has the content. In bytes."""

    empty_bytes: int
    """Non-resident and empty: reclaimed, in the balloon, never used, or the same byte everywhere.
    In bytes."""

    free_bytes: Optional[int] = None
    """Resident and free in the guest: what the guest counts as free, without what is empty. Empty
    frames that are in use make it a little too small. Null counts as 0: it is not known, because
    the guest is not trusted. In bytes."""

    in_use_bytes: int
    """Resident, and not free as far as is known. In bytes."""

    swapped_bytes: int
    """Evicted, with the content in the swap file. In bytes."""


@dataclass(kw_only=True)
class PilotDecision:
    """A decision."""

    action: str
    """What was decided, in words."""

    age_ms: int
    """Time since then, in milliseconds."""

    number: int
    """Counts up with each decision of this daemon."""

    outcome: Optional[str] = None
    """What came of it; null: it is not done yet."""

    vm: str
    """The VM's name."""

    why: str
    """Why, with the figures."""


@dataclass(kw_only=True)
class PilotRequest:
    """Turn the pilot on or off, or change its reserve. What is null stays as it is."""

    attach: Optional[bool] = None
    """Whether the pilot, while it is on, attaches VMs that run on the host and can be managed. It
    leaves those alone that were detached."""

    mode: Optional[PilotMode] = None
    """What the pilot does."""

    reserve_bytes: Optional[int] = None
    """The same in bytes; not together with the percentage."""

    reserve_percent: Optional[int] = None
    """Memory that is to stay available on the host, in percent of it."""

    stall_percent: Optional[int] = None
    """Tasks of the host that wait for memory in this part of the time make the host short, in
    percent; 0: they do not count."""

    swap_max_bytes: Optional[int] = None
    """Nothing in use is taken while all swap files take this or more; 0: whatever they take. In
    bytes."""


@dataclass(kw_only=True)
class PilotSight:
    """What the pilot saw in one look. A trace has one of these in each line."""

    at_ms: int
    """Time of the look, in milliseconds since any fixed moment."""

    bounds: List[SeenBound]
    """The host's memory, and then that of control groups that bound the VMs further."""

    stall_permille: Optional[int] = None
    """In how many thousandths of the time some task of the host waited for memory; null: the kernel
    does not tell."""

    swap_bytes: Optional[int] = None
    """What all swap files take. In bytes."""

    vms: List[SeenVm]
    """The VMs."""


@dataclass(kw_only=True)
class PilotStatus:
    """The pilot, what it sees and what it decided last."""

    attach: Optional[bool] = None
    """Whether the pilot, while it is on, attaches VMs that run on the host and can be managed."""

    decisions: List[PilotDecision]
    """The last decisions, the latest first."""

    host: Optional[str] = None
    """The host's figures at the last look."""

    mode: PilotMode
    """What the pilot does."""

    reserve_bytes: Optional[int] = None
    """The same in bytes; null: the percentage counts."""

    reserve_percent: Optional[int] = None
    """Memory that is to stay available on the host, in percent of it; null: the size counts."""

    stage: Optional[PilotStage] = None
    """How short of memory the host is; null: the pilot has not looked yet, or is off."""

    stall_percent: Optional[int] = None
    """The part of the time in which tasks of the host may wait for memory, in percent; 0: waits do
    not count; null: as the daemon's option has it."""

    swap_max_bytes: Optional[int] = None
    """Nothing in use is taken while all swap files take this or more; null: whatever they take. In
    bytes."""

    vms: List[PilotVm]
    """The VMs, by name."""


@dataclass(kw_only=True)
class PilotVm:
    """A VM as the pilot sees it."""

    class_: VmClass = field(metadata={"name": "class"})
    """How much its speed matters."""

    compressed_most_bytes: Optional[int] = None
    """The most memory that its compressed pages may take, beside what the limit says; null: it can
    have none. In bytes."""

    hold: bool
    """Whether the pilot leaves it as it is."""

    left_alone: Optional[str] = None
    """Why the pilot leaves its limit alone; null: nothing is in the way."""

    limit_bytes: Optional[int] = None
    """The limit that the pilot has given it; null: none. In bytes."""

    max_bytes: Optional[int] = None
    """Most resident memory; null: all of its memory. In bytes."""

    memory_bytes: int
    """All of its memory. In bytes."""

    min_bytes: Optional[int] = None
    """Resident memory below which nothing in use is taken; null: what its guest needs to live. In
    bytes."""

    name: str
    """The VM's name."""

    resident_bytes: int
    """Host memory that it takes. In bytes."""

    unplugged_bytes: Optional[int] = None
    """What the pilot has had its guest unplug. In bytes."""

    weight: int
    """Its weight among VMs of its class."""

    working_bytes: Optional[int] = None
    """What it works with; null: not known. In bytes."""


@dataclass(kw_only=True)
class PoolMember:
    """A VM in the pool."""

    goal_bytes: int
    """The limit that the pool moves the VM to. In bytes."""

    held_bytes: int
    """Host memory that the VM takes now. In bytes."""

    hot_bytes: Optional[int] = None
    """The VM's hot set; null: it was not monitored lately, and its share counts instead. In
    bytes."""

    limit_bytes: Optional[int] = None
    """The VM's limit now; null: all of its memory. In bytes."""

    lower_bytes: int
    """The least that the VM gets. In bytes."""

    name: str
    """The VM's name."""

    share_bytes: int
    """The VM's share. In bytes."""

    upper_bytes: int
    """The most that the VM gets. In bytes."""


@dataclass(kw_only=True)
class PoolRequest:
    """Set the size of the pool, or end the pool."""

    bytes: Optional[int] = None
    """The pool's size; null: no pool. In bytes."""


@dataclass(kw_only=True)
class PoolStatus:
    """The pool, and the VMs in it."""

    bytes: Optional[int] = None
    """The pool's size; null: there is no pool. In bytes."""

    free_bytes: int
    """Memory of the pool that no VM has or may take now. In bytes."""

    shares_bytes: int
    """Sum of all shares. In bytes."""

    vms: List[PoolMember]
    """The VMs in the pool, by name."""


@dataclass(kw_only=True)
class PressureStatus:
    """Host pressure, as the process of one VM knows it."""

    age_s: Optional[int] = None
    """Time since it began, in seconds; null before the first."""

    rounds: int
    """Rounds that pressure began, counted by the VM's current process."""

    seen_by: Optional[str] = None
    """By what `ebbd` sees that the host is short of memory; null: `ebbd` does not watch the host,
    and the interval counts from 30 s of its silence on."""

    why: Optional[str] = None
    """Why the last one began, with the host's figures; null before the first."""


@dataclass(kw_only=True)
class ReachStatus:
    """Which memory of a VM Ebb may reclaim or evict, and what restricts that."""

    devices: List[ReachingDevice]
    """Devices, and whatever else accesses the VM's memory, that leave less than everything."""

    may_take: MayTake
    """What Ebb may take."""

    migration: Optional[str] = None
    """State of the last migration, in QEMU's word; null: there was none."""


@dataclass(kw_only=True)
class ReachingDevice:
    """A device, or anything else, that accesses a VM's memory by itself."""

    may_take: MayTake
    """What Ebb may take despite it."""

    name: str
    """Its name, as QEMU or the kernel calls it."""

    why: str
    """Why no more."""


@dataclass(kw_only=True)
class ReclaimReport:
    """What one reclaim did."""

    blocks: int
    """Number of buddy blocks that it was in."""

    bytes: int
    """Reclaimed memory. In bytes."""

    duration_ns: int
    """Duration in nanoseconds, including the scan."""

    scan_ns: int
    """The part of it that was spent on reading page metadata. In nanoseconds."""

    skipped: Skipped
    """Blocks that were not reclaimed."""

    stopped_by: str
    """Why it reclaimed no more, in words."""


@dataclass(kw_only=True)
class ReclaimRequest:
    """Reclaim the guest's free memory once."""

    bytes: Optional[int] = None
    """Stop once this much is reclaimed; null: reclaim all but a reserve. In bytes."""


@dataclass(kw_only=True)
class RefusalFigures:
    """A command that was refused or has failed. Questions (GET) are not among them."""

    code: ErrorCode
    """Why, for programs."""

    error: str
    """Why, in one line."""

    method: str
    """The request's method."""

    path: str
    """The request's path."""


@dataclass(kw_only=True)
class ResizeReport:
    """Progress of a resize."""

    bytes: int
    """Size of the VM now, or of the node if one is named. In bytes."""

    duration_ns: int
    """Time from the request to the last progress, in nanoseconds."""

    emptied_bytes: int
    """Host memory that became free thereby. In bytes."""

    least_bytes: Optional[int] = None
    """The least that the guest can have now without running out of memory, by its own figures;
    null: it does not report them, or they were not needed. In bytes."""

    mechanism: SizeMechanism
    """The mechanism for the target."""

    node: Optional[int] = None
    """NUMA node of the target; null: the whole VM."""

    purges: int
    """How often the guest was asked to free its caches."""

    reason: str
    """Why this mechanism."""

    returned_bytes: int
    """Memory that this resize has given to the guest. In bytes."""

    state: SizeState
    """Progress to the target."""

    stopped_by: str
    """Why it goes no further, in words: the target was reached, or the blocked reason."""

    taken_bytes: int
    """Memory that this resize has taken from the guest. In bytes."""

    wanted_bytes: int
    """The target. In bytes."""


@dataclass(kw_only=True)
class ResizeRequest:
    """Set a VM's target size, or keep the size that it has."""

    by: Optional[SizeMechanism] = None
    """Use only this mechanism; null: Ebb chooses."""

    bytes: Optional[int] = None
    """The target, of the node if one is named; null: no target, the VM keeps its size. In bytes."""

    node: Optional[int] = None
    """Resize this NUMA node only; null: the whole VM."""

    on_violation: Optional[OnViolation] = None
    """What happens if the guest touches hard-reclaimed memory; null keeps what is set (at first:
    allow)."""


@dataclass(kw_only=True)
class RuleRequest:
    """Change the pilot's rule for a VM. What is null stays as it is."""

    class_: Optional[VmClass] = field(default=None, metadata={"name": "class"})
    """How much the VM's speed matters."""

    hold: Optional[bool] = None
    """Whether the pilot leaves it as it is."""

    max_bytes: Optional[int] = None
    """Most resident memory; 0: all of its memory. In bytes."""

    min_bytes: Optional[int] = None
    """Resident memory below which nothing in use is taken from it; 0: what its guest needs to live.
    In bytes."""

    weight: Optional[int] = None
    """Its weight among VMs of its class, 1 to 10000."""


@dataclass(kw_only=True)
class RunRequest:
    """Start QEMU and manage the VM."""

    append: Optional[str] = None
    """Kernel command line, with `kernel` only."""

    backing: Optional[Backing] = None
    """What the guest's RAM is made of."""

    cpus: Optional[int] = None
    """vCPUs, 1 to 255."""

    cwd: Optional[str] = None
    """QEMU's working directory, absolute: relative paths in `qemu_args` start there. Null means
    `/`."""

    disks: Optional[List[DiskRequest]] = None
    """Raw images that Ebb serves to the guest as virtio disks, in this order."""

    grow_prealloc: Optional[bool] = None
    """Give plugged memory its pages at once, not at the first touch."""

    grow_to_bytes: Optional[int] = None
    """The largest size for a resize: the guest plugs the difference (virtio-mem); null:
    `memory_bytes`. In bytes."""

    initrd: Optional[str] = None
    """Initial RAM disk, with `kernel` only; absolute path."""

    kernel: Optional[str] = None
    """Kernel image to boot directly; absolute path."""

    memory_bytes: Optional[int] = None
    """The guest's RAM: a multiple of 2 MiB, from 64 MiB to 1 TiB. With `tier`: 0, or left out,
    means the sum of the tiers. In bytes."""

    min_order: Optional[int] = None
    """Smallest buddy block to reclaim, as its order: 6 to 10; null: 9, which is 2 MiB."""

    mode: Optional[Mode] = None
    """How reclaimed memory is watched; null: Ebb chooses."""

    name: str
    """The VM's name, unique on the host."""

    nodes: Optional[int] = None
    """NUMA nodes, 1 to 16, each with the same part of memory and vCPUs."""

    privileged: Optional[bool] = None
    """Run QEMU as root, with the capabilities of the daemon and without a seccomp filter."""

    qemu_args: Optional[List[str]] = None
    """More arguments for QEMU, passed unchanged."""

    tier: Optional[str] = None
    """Tiers of memory, fastest first, as in `dram=1G,file=/var/lib/ebb/web:4G`; null: the host's
    memory."""

    user: Optional[str] = None
    """The user that QEMU runs as: a name, a number, `UID:GID`, or `own` for one that no other
    process has; null: the daemon's `--vm-user`, by default `own`."""


@dataclass(kw_only=True)
class SeenBound:
    """A bound of memory, as the pilot saw it."""

    available_bytes: int
    """What is left of it. In bytes."""

    name: str
    """Whose it is."""

    total_bytes: int
    """All of it. In bytes."""


@dataclass(kw_only=True)
class SeenPlugged:
    """Memory that a guest has plugged, as the pilot saw it."""

    asked_bytes: int
    """What is to be plugged. In bytes."""

    block_bytes: int
    """What is plugged or unplugged at a time. In bytes."""

    bytes: int
    """What is plugged. In bytes."""

    full_bytes: int
    """What was to be plugged before the pilot had the guest unplug any. In bytes."""

    may_unplug: bool
    """Whether the guest can be asked to unplug some now."""


@dataclass(kw_only=True)
class SeenVm:
    """A VM, as the pilot saw it."""

    class_: VmClass = field(metadata={"name": "class"})
    """How much its speed matters."""

    compressed_bytes: Optional[int] = None
    """Memory that its compressed pages take. In bytes."""

    compressed_most_bytes: Optional[int] = None
    """The most that they may take; null: it can have none. In bytes."""

    compressed_own_bytes: Optional[int] = None
    """The most that they may take without the pilot; 0: the pilot has not changed it. In bytes."""

    floor_bytes: int
    """Resident memory without which its guest does not live. In bytes."""

    guest_available_bytes: Optional[int] = None
    """What its guest could use without running out of memory, by its own word; null: as above. In
    bytes."""

    guest_total_bytes: Optional[int] = None
    """What its guest's kernel manages, by its own word; null: it said nothing lately. In bytes."""

    hold: bool
    """Whether the pilot leaves it as it is."""

    limit_bytes: Optional[int] = None
    """The limit that the pilot has given it; null: none. In bytes."""

    max_bytes: Optional[int] = None
    """Most resident memory; null: all of its memory. In bytes."""

    may_limit: bool
    """Whether it can have a limit now."""

    may_reclaim: bool
    """Whether free memory can be reclaimed from it now."""

    memory_bytes: int
    """All of its memory. In bytes."""

    min_bytes: Optional[int] = None
    """Resident memory below which nothing in use is taken; null: what its guest needs to live. In
    bytes."""

    name: str
    """The VM's name."""

    plugged: Optional[SeenPlugged] = None
    """Memory that its guest has plugged; null: it can unplug none, or that was not known."""

    refaulted_bytes: int
    """Evicted memory that it missed, in all: it came back within 30 s or at its limit. In bytes."""

    resident_bytes: int
    """Host memory that it takes. In bytes."""

    spare_bytes: int
    """Free memory of its guest that is resident at least. In bytes."""

    waits: bool
    """Whether its guest waits for room below the limit."""

    weight: int
    """Its weight among VMs of its class."""

    working_bytes: Optional[int] = None
    """What it works with; null: not known. In bytes."""


@dataclass(kw_only=True)
class ShareRequest:
    """Give a VM a share of the pool, or take the VM out of the pool."""

    bytes: Optional[int] = None
    """The VM's share; null: the VM leaves the pool, and has no limit. In bytes."""

    lower_percent: Optional[int] = None
    """The least that the VM gets, in percent of its share; null: 75."""

    upper_percent: Optional[int] = None
    """The most that the VM gets, in percent of its share; null: 125."""


@dataclass(kw_only=True)
class SharingStatus:
    """What HyperAlloc does, for a guest that shares its page-frame allocator; for other guests all
    is null or 0."""

    fragmentation: Optional[Fragmentation] = None
    """How scattered the guest's memory is over huge frames; null: this cannot be seen."""

    hard_bytes: int
    """Hard-reclaimed memory: the guest has it again once the host returns it. In bytes."""

    install_ns: FaultTimes
    """Time from the lock of such a huge frame until all of it has memory. In nanoseconds."""

    installs: int
    """Huge frames that came back by a touch, since the VM's current process shares the
    allocator."""

    on_violation: OnViolation
    """What happens at such a touch."""

    size_bytes: Optional[int] = None
    """The target for the initial memory, by HyperAlloc; null: all of it. In bytes."""

    soft_bytes: int
    """Soft-reclaimed memory: the guest has it again once it uses it. In bytes."""

    stopped: Optional[str] = None
    """Why Ebb stopped the VM; null: it did not."""

    violations: int
    """Touches of hard-reclaimed memory."""


@dataclass(kw_only=True)
class SizeStatus:
    """The size of a VM: what its guest may use."""

    ballooned_bytes: int
    """In the balloon. In bytes."""

    bytes: int
    """The size: `initial_bytes + plugged_bytes - ballooned_bytes - hard_bytes`. In bytes."""

    devices: List[MemoryDeviceStatus]
    """The virtio-mem devices."""

    hard_bytes: int
    """Hard-reclaimed by HyperAlloc. In bytes."""

    initial_bytes: int
    """What the VM began with. In bytes."""

    max_bytes: int
    """The largest possible size. In bytes."""

    mechanism: Optional[SizeMechanism] = None
    """The mechanism for the target; null: no target."""

    plugged_bytes: int
    """Plugged beyond that (virtio-mem). In bytes."""

    reason: Optional[str] = None
    """Why this mechanism; null: no target."""

    state: SizeState
    """Progress to the target."""

    stopped_by: Optional[str] = None
    """The blocked reason, in words; null: nothing blocks."""

    wanted_bytes: Optional[int] = None
    """The target, of `wanted_node` if that is not null; null: no target. In bytes."""

    wanted_node: Optional[int] = None
    """NUMA node of the target; null: the whole VM."""


@dataclass(kw_only=True)
class Skipped:
    """Blocks that a reclaim looked at and did not reclaim."""

    already_empty: int
    """Blocks without host memory."""

    cancelled: int
    """Blocks whose page metadata the guest wrote to meanwhile."""

    in_use: int
    """Blocks that were in use at the second look."""


@dataclass(kw_only=True)
class StageFigures:
    """How short of memory the host is, for the pilot."""

    from_: PilotStage = field(metadata={"name": "from"})
    """The stage before."""

    host: str
    """The host's figures."""

    to: PilotStage
    """The stage from now on."""


@dataclass(kw_only=True)
class StateFigures:
    """A VM's new state."""

    change: VmChange
    """What Ebb does with the VM from now on."""

    reason: Optional[str] = None
    """Why; null: nothing is known but that."""


@dataclass(kw_only=True)
class TierSpeed:
    """How fast a tier is."""

    read_ns: int
    """Time to read a page there, in nanoseconds: the median."""

    tier: str
    """The tier, as `--tier` names it."""

    write_ns: int
    """Time to write a page there, in nanoseconds: the median. Compressed memory and files are
    written in batches."""


@dataclass(kw_only=True)
class TierStatus:
    """The tiers of a VM, and whether the fast one is large enough."""

    active_bytes: Optional[int] = None
    """What the VM works with: frames that were used in the current turn of their window, or in the
    turn before, even if they are evicted now. A turn takes 2.5 to 32 s while much has to be
    evicted, and longer otherwise. Null: the clock hand has not visited all memory yet, because too
    little had to be evicted. More than half of `fast_bytes` is too much. In bytes."""

    fast_bytes: int
    """Size of the first tier. In bytes."""

    hot_bytes: Optional[int] = None
    """The hot set by the last monitoring, on whatever tier; null: there was no monitoring lately.
    More than half of `fast_bytes` is too much. In bytes."""

    ladder: str
    """The VM's tiers, fastest first, as in `--tier`."""

    moved_bytes: Optional[int] = None
    """Moved between NUMA nodes by the VM's current process; null: no tier is a NUMA node. In
    bytes."""

    tiers: Optional[List[TierUse]] = None
    """What each tier holds now, fastest first; a NUMA node: at the last placement."""

    warnings: Optional[List[str]] = None
    """Sentences for the operator about its tiers. They are in the VM's `warnings`, too."""


@dataclass(kw_only=True)
class TierUse:
    """What a tier holds."""

    bytes: int
    """How much of the guest's memory it may hold; for compressed memory, what the pages may take.
    In bytes."""

    held_bytes: int
    """How much of the guest's memory it holds. In bytes."""

    tier: str
    """The tier, as in the ladder."""


@dataclass(kw_only=True)
class Top:
    """The host and its VMs at one moment, by what the VMs' processes published last. No VM is
    asked."""

    at_unix_ms: int
    """The moment, in milliseconds since 1970 (UTC)."""

    host: TopHost
    """The host."""

    vms: List[TopVm]
    """The VMs, by name."""


@dataclass(kw_only=True)
class TopHost:
    """The host's memory, and what the pilot does with it."""

    available_bytes: int
    """What is left of it. In bytes."""

    bounds: Optional[List[SeenBound]] = None
    """Control groups that bound the VMs further."""

    pilot: PilotMode
    """What the pilot does."""

    reserve_bytes: int
    """Memory that is to stay available, by the pilot's settings. In bytes."""

    stage: Optional[PilotStage] = None
    """How short of memory the host is; null: the pilot is off, or has not looked yet."""

    stall_permille: Optional[int] = None
    """In how many thousandths of the last 10 s some task of the host waited for memory (PSI); null:
    the kernel does not tell."""

    total_bytes: int
    """All memory of the host. In bytes."""


@dataclass(kw_only=True)
class TopVm:
    """A VM: where its memory is, and whether it misses some."""

    age_ms: Optional[int] = None
    """Age of these figures, in milliseconds; null: there are none yet."""

    class_: VmClass = field(metadata={"name": "class"})
    """How much its speed matters to the pilot."""

    compressed_in_bytes: int
    """Memory that the compressed part takes. It counts against the limit. In bytes."""

    fault_ns: Optional[FaultSpread] = None
    """Time that the faults of the last seconds took; null: not known. A fault may be among those of
    two moments. In nanoseconds."""

    faults_per_s: Optional[int] = None
    """Faults that Ebb served in a second; null: not known. In seconds."""

    hold: bool
    """Whether the pilot leaves it as it is."""

    limit_by_pilot: bool
    """Whether the pilot has set this limit."""

    limit_bytes: Optional[int] = None
    """The limit on what it takes: resident memory and `compressed_in_bytes`; null: none. In
    bytes."""

    memory_bytes: int
    """All of its memory. In bytes."""

    misses_memory: bool
    """Whether so much came back that its limit is too low for a VM of its class."""

    name: str
    """The VM's name."""

    parts: Optional[MemoryParts] = None
    """Where it is, in parts that add up to `memory_bytes`; null: not known, because there are no
    figures yet, or the VM's process is of an earlier release."""

    refaulted_bytes_per_s: Optional[int] = None
    """Evicted memory that came back in a second, and less than 30 s after its eviction; null: not
    known. In seconds."""

    state: State
    """What Ebb does with the VM."""

    state_reason: Optional[str] = None
    """Why the VM is in this state, and what comes next, or why its guest waits for room; null for a
    managed VM that answers and does not wait."""

    waiting_touches: int
    """Touches that wait for this reason now."""

    waits: bool
    """Whether the guest waits for room in the swap file if it needs more memory."""

    warnings: int
    """Number of warnings that `ebb status` shows."""

    working_bytes: Optional[int] = None
    """What it works with; null: not known. In bytes."""


@dataclass(kw_only=True)
class Version:
    """The daemon that answers."""

    pid: int
    """The daemon's process number."""

    run_dir: str
    """The daemon's run directory."""

    version: str
    """The daemon's release."""


@dataclass(kw_only=True)
class VmStatus:
    """Status of one VM. Null means: not known, or there is none."""

    accelerator: Accelerator
    """What runs the guest's instructions."""

    accelerator_reason: str
    """Why this accelerator."""

    age_ms: Optional[int] = None
    """Age of all figures, in milliseconds: 0, unless the VM is slow to answer or not managed."""

    auto: AutoStatus
    """Automatic reclaim."""

    backing: Backing
    """What the guest's RAM is made of; never `auto`."""

    backing_reason: str
    """Why this backing."""

    balloon: Optional[BalloonStatus] = None
    """The VM's balloon; null: it has none."""

    confinement: Optional[Confinement] = None
    """How QEMU is confined; null for a VM that Ebb did not start."""

    console: Optional[str] = None
    """Path of the UNIX socket of the guest's console; null for a VM that Ebb did not start."""

    console_log: Optional[str] = None
    """The log of what the guest printed there; null for a VM that Ebb did not start."""

    disks: DiskCounts
    """What the disks that Ebb serves have done."""

    emptied_bytes: int
    """Strict mode: empty memory that Ebb has on record. Release mode keeps no record: `memory_bytes
    - resident_bytes`, which includes memory that was never touched. In bytes."""

    fault_ns: FaultTimes
    """Time from a fault's arrival to its answer. In nanoseconds."""

    faults: FaultCounts
    """Faults served by the VM's current process."""

    guest: GuestStatus
    """What the guest's own memory tells about the guest."""

    guest_free_bytes: Optional[int] = None
    """Free memory by the guest's own count; null unless the guest is trusted. In bytes."""

    limit: LimitStatus
    """The limit on resident memory."""

    mechanism: Mechanism
    """How free memory is found and reclaimed."""

    mechanism_reason: str
    """Why this mechanism."""

    memory_bytes: int
    """The guest's RAM: what the VM began with, and what is plugged. In bytes."""

    min_order: int
    """Smallest buddy block to reclaim, as its order: 9 is 2 MiB."""

    mode: Mode
    """How reclaimed memory is watched."""

    mode_reason: str
    """Why this mode."""

    name: str
    """The VM's name."""

    parts: Optional[MemoryParts] = None
    """Where all of it is; null: the VM's process is of an earlier release."""

    pid: int
    """QEMU's process number."""

    reach: Optional[ReachStatus] = None
    """Which memory Ebb may reclaim or evict, and which devices restrict that."""

    reclaimed_total_bytes: int
    """Memory reclaimed since Ebb manages the VM. In bytes."""

    resident_bytes: int
    """The part of `memory_bytes` that takes host memory now. In bytes."""

    returned_total_bytes: int
    """Memory given back to the guest since the VM's current process began. Release mode computes it
    from residency: what comes back while other memory goes, as into a balloon, counts late. In
    bytes."""

    sharing: SharingStatus
    """What HyperAlloc does, for a guest that shares its page-frame allocator."""

    size: SizeStatus
    """What the guest may use, and what changes that."""

    state: State
    """What Ebb does with the VM."""

    state_reason: Optional[str] = None
    """Why the VM is in this state, and what comes next; null for a managed VM that answers."""

    tier: Optional[TierStatus] = None
    """The tiers that hold the VM's memory; null: the VM was started without `--tier`."""

    unplugged_bytes: Optional[int] = None
    """Memory of devices that QEMU has removed and freed while Ebb managed the VM. It is not part of
    `memory_bytes`. In bytes."""

    warnings: List[str]
    """What the operator should know, one sentence each."""


@dataclass(kw_only=True)
class VmSummary:
    """One line of the list of VMs."""

    accelerator: Accelerator
    """What runs the guest's instructions."""

    age_ms: Optional[int] = None
    """Age of these figures, in milliseconds; null: there are none yet, and figures that are not on
    record are 0."""

    auto: bool
    """Whether automatic reclaim is on."""

    backing: Backing
    """What the guest's RAM is made of; never `auto`."""

    evicted_bytes: Optional[int] = None
    """Evicted memory: its content is in the store, or in equal blocks of the guest's disks. In
    bytes."""

    limit_bytes: Optional[int] = None
    """The limit on resident memory; null: no limit. In bytes."""

    memory_bytes: int
    """The guest's RAM as QEMU gives it. In bytes."""

    mode: Mode
    """How reclaimed memory is watched."""

    name: str
    """The VM's name."""

    pid: int
    """QEMU's process number."""

    resident_bytes: int
    """The part of `memory_bytes` that takes host memory now. In bytes."""

    state: State
    """What Ebb does with the VM."""

    state_reason: Optional[str] = None
    """Why the VM is in this state, and what comes next, or why its guest waits for room; null for a
    managed VM that answers and does not wait."""

    trusted: bool
    """Whether the guest is trusted, so that Ebb may reclaim memory by its page metadata."""


@dataclass(kw_only=True)
class WarningFigures:
    """A warning that has appeared or vanished."""

    appeared: bool
    """Whether it has appeared; else it has vanished."""

    warning: str
    """The warning, as the VM's status has it."""


@dataclass(kw_only=True)
class WhoAmI:
    """What the client may do that asks."""

    role: Role
    """What it may ask for."""
