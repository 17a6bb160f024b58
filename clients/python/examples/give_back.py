#!/usr/bin/env python3
"""Has VMs give their free memory to the host until enough is there: give_back.py [MIB]

It asks the VM with the most resident memory first. Without MIB, it asks all of them. Like `ebb`, it
asks the host in EBB_HOST, or this one.
"""

from __future__ import annotations

import sys

from ebb_client import Client, EbbError, ReclaimRequest

MIB = 1 << 20


def give_back(ebb: Client, wanted_bytes: int | None) -> int:
    """Returns how many bytes the host has got."""
    got_bytes = 0
    for vm in sorted(ebb.list(), key=lambda vm: vm.resident_bytes or 0, reverse=True):
        if wanted_bytes is not None and got_bytes >= wanted_bytes:
            break
        left_bytes = None if wanted_bytes is None else wanted_bytes - got_bytes
        try:
            report = ebb.reclaim(vm.name, ReclaimRequest(bytes=left_bytes))
        except EbbError as error:
            # Another VM may have some.
            print(f"{vm.name}: {error}", file=sys.stderr)
            continue
        got_bytes += report.bytes
        print(f"{vm.name}: {report.bytes // MIB} MiB; {report.stopped_by}")
    return got_bytes


def main() -> None:
    wanted_bytes = int(sys.argv[1]) * MIB if len(sys.argv) > 1 else None
    try:
        got_bytes = give_back(Client.from_environment(), wanted_bytes)
    except EbbError as error:
        sys.exit(f"give_back: {error}")
    print(f"{got_bytes // MIB} MiB in all")
    if wanted_bytes is not None and got_bytes < wanted_bytes:
        sys.exit(1)


if __name__ == "__main__":
    main()
