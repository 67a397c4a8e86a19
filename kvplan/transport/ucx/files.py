"""File descriptors that UCX will want: there must be enough before it does.

UCX closes for good the socket that it listens at when a connection comes and no descriptor is left
for it (uct_tcp_iface_connect_handler of its source, up to today's): no peer reaches that end again.
"""

from __future__ import annotations

import fcntl
import resource
from typing import Final

from kvplan.status import LLMException
from kvplan.transport.identity import link_failed

_OF_END: Final = 16
"""That a lane's end has, at most."""

_OF_LANE: Final = 4
"""That a lane of a link takes, and so many more the link; seen were 3."""

_SPARE: Final = 8
"""For what opens a file for a moment meanwhile, here and elsewhere in the process."""


def for_start(lanes: int) -> int:
    """How many must be left to open UCX, and to make a first link."""
    return _OF_END * lanes + for_links(1, lanes)


def for_links(count: int, lanes: int) -> int:
    """How many must be left to make `count` links at the same time."""
    return count * _OF_LANE * (lanes + 1) + _SPARE


def too_few(count: int, purpose: str) -> LLMException | None:
    """Why there cannot be `count` more descriptors now; None: there can.

    Args:
        count: how many.
        purpose: what wants them, such as "a link".
    """
    left = _left(count)
    if left == count:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return link_failed(
        f"UCX wants {count} file descriptors for {purpose}, of which {left} are left: raise the "
        f"limit (ulimit -n), which is {limit}"
    )


def _left(most: int) -> int:
    """How many can be had, or `most`. To have them for a moment would take them from UCX."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most
    left, file = 0, limit
    while left < most and file > 0:  # from above, where mostly all are free
        file -= 1
        try:
            fcntl.fcntl(file, fcntl.F_GETFD)
        except OSError:
            left += 1
    return left
