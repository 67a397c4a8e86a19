"""Ways to take rights from a process of a test, as containers and sandboxes do.

Run snippets in a `Peer` before it starts threads. Lists are prefixes of the command that starts
the peer.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

import pytest

NO_CAPABILITIES = """
    import ctypes, struct
    none = ctypes.create_string_buffer(24)
    assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), none) == 0
"""
"""Root without capabilities: the rights of a user, and root's files."""

USER_NAMESPACE = ["unshare", "--user", "--map-current-user"]
OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]
PID_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]
NOT_DUMPABLE = "import ctypes; assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0"
DUMPABLE = "import ctypes; assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0"

_CALLS = {  # numbers on x86_64, aarch64
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ftruncate": (77, 46),
    "move_pages": (279, 239),
}
_DENY = """
    import ctypes, platform, struct
    which = ("x86_64", "aarch64").index(platform.machine())
    numbers = [each[which] for each in {calls}]
    load, deny, allow = (0x20, 0, 0, 0), (6, 0, 0, 0x50000 | {error}), (6, 0, 0, 0x7FFF0000)
    tests = [(0x15, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    program = [load, *tests, allow, deny]
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.create_string_buffer(header), 0, 0) == 0  # seccomp filter
"""


def denying(*calls: str, error: int = errno.EPERM) -> str:
    """Return a snippet that makes the system calls of these names fail with `error`."""
    return _DENY.format(calls=[_CALLS[name] for name in calls], error=error)


def may(*command: str) -> bool:
    """Return True if a command that changes rights works here, with `true` as its program."""
    return (
        shutil.which(command[0]) is not None
        and not subprocess.run([*command, "true"], stderr=subprocess.DEVNULL).returncode
    )


needs_users = pytest.mark.skipif(
    not may(*USER_NAMESPACE), reason="this system does not allow us to make a user namespace"
)
needs_mounts = pytest.mark.skipif(
    not may(*OWN_MOUNTS), reason="this system does not allow us to make a mount namespace"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
