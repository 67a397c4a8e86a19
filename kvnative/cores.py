"""The number of cores that this process may use, by its affinity and its cgroups."""

import os
from contextlib import suppress
from math import ceil
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores(*, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores of the affinity mask, or fewer if a cgroup limits the CPU time.

    Args:
        proc, groups: mount points of procfs and of the cgroups.
    """
    return min([len(os.sched_getaffinity(0)), *_limits(proc, groups)])


def _limits(proc: Path, groups: Path) -> list[int]:
    """Return each limit on the way to the root in whole cores, rounded up."""
    try:
        rows = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    limits = []
    for row in rows:  # hierarchy:controllers:path; of version 2, "0::/path"
        _, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        if controllers and not root.exists():  # version 1 has a link for each controller
            root = groups / "cpu"
        # A container may see the path of its host, which is not mounted: the root counts then.
        place = root / path.lstrip("/")
        while True:
            limits += _limit_at(place)
            if place == root or root not in place.parents:
                break
            place = place.parent
    return limits


def _limit_at(place: Path) -> list[int]:
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (place / "cpu.max").read_text().split()
        return [max(1, ceil(int(quota) / int(period)))]  # ValueError for "max": no limit
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((place / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return [max(1, ceil(int(quota) / int(period)))] if int(quota) > 0 else []
    return []
