"""The identity of a process, the check that it is reachable, and advice if it is not.

A pid is not an identity: it is reused, and means another process in another namespace or on another
host. `Identity` never confuses two processes.
"""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kvnative._process import Peer
from kvplan.status import link_failed
from kvplan.system.limits import reason_of
from kvplan.transport.metadata import Record, Uint64, boot_id


class Identity(Record, frozen=True):
    """A process, from its start to its end.

    Attributes:
        boot_id: The id of the running kernel; it differs on every host and after every boot.
        pid: The number in its PID namespace.
        start_time: Clock ticks from boot to the start of the process.
        pid_namespace, user_namespace: Inodes of the namespaces.
        time_namespace: Inode of the time namespace; 0: the kernel has none.
    """

    boot_id: Annotated[str, Meta(min_length=36, max_length=36)]
    pid: Annotated[int, Meta(ge=1, le=2**22)]
    start_time: Uint64
    pid_namespace: Uint64
    time_namespace: Uint64
    user_namespace: Uint64

    @staticmethod
    @functools.cache  # reading /proc takes time, and each link needs the identity
    def of_self() -> Identity:
        """Return the identity of this process."""
        return Identity(
            boot_id=boot_id(),
            pid=os.getpid(),
            start_time=start_time("self"),
            pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
            time_namespace=_time_namespace(),
            user_namespace=Path("/proc/self/ns/user").stat().st_ino,
        )


# Not cached by pid: a child in another PID namespace may have the pid of its parent.
os.register_at_fork(after_in_child=Identity.of_self.cache_clear)


def _time_namespace() -> int:
    try:
        return Path("/proc/self/ns/time").stat().st_ino
    except FileNotFoundError:  # before Linux 5.6
        return 0


def start_time(pid: int | str) -> int:
    """Return the start of process `pid`, in clock ticks since boot."""
    # The name in parentheses may itself contain spaces and parentheses.
    after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
    return int(after_name.split()[19])


def hold(peer: Identity) -> Peer:
    """Open a pidfd of the process that `peer` names."""
    here = Identity.of_self()
    if peer.boot_id != here.boot_id:
        raise link_failed(
            f"peer {peer.pid} runs on another host, or ran before the last boot: its boot id is "
            f"{peer.boot_id}, here {here.boot_id}; transport local works on one host only"
        )
    if peer.pid_namespace != here.pid_namespace:
        raise link_failed(
            f"peer {peer.pid} is in another PID namespace ({peer.pid_namespace}, here "
            f"{here.pid_namespace}); run both in one, as with `docker run --pid=container:<name>` "
            "or `shareProcessNamespace: true` in a pod"
        )
    if peer.time_namespace != here.time_namespace:
        raise link_failed(
            f"peer {peer.pid} is in another time namespace ({peer.time_namespace}, here "
            f"{here.time_namespace}), where deadlines of leases mean another time; run both in "
            "one, or let them link over tcp"
        )
    if Path("/proc/self").readlink().name != str(here.pid):
        raise link_failed(
            "the /proc mounted here belongs to another PID namespace, so peers cannot be found; "
            "mount it again, as with `unshare --mount-proc`"
        )
    try:
        process = Peer(peer.pid)
    except OSError as error:
        reason = reason_of(error)
        if error.errno in (errno.EPERM, errno.ENOSYS):
            reason += f"; {advice(peer)}"
        raise link_failed(f"peer {peer.pid} cannot be reached: {reason}") from error
    try:
        # Read while the pidfd is open: a later process with this pid is then noticed.
        started = start_time(peer.pid)
    except OSError as error:
        process.close()
        hidden = isinstance(error, FileNotFoundError | ProcessLookupError | PermissionError)
        raise link_failed(
            f"/proc/{peer.pid}/stat of the peer cannot be read: {error.strerror}"
            + ("; it has just exited, or /proc hides it (mount option hidepid)" if hidden else "")
        ) from error
    if started != peer.start_time:
        process.close()
        raise link_failed(
            f"peer {peer.pid} has exited, and another process has its pid now: started at "
            f"{started} ticks after boot, the peer at {peer.start_time}"
        )
    return process


def advice(peer: Identity) -> str:
    """Return the settings to change so that the system lets this process reach `peer`."""
    try:
        theirs, ours = _status(peer.pid), _status("self")
        owner = Path(f"/proc/{peer.pid}/maps").stat().st_uid  # root's if it is not dumpable
    except OSError as error:
        return f"the reason cannot be read ({error.strerror})"
    causes = []
    their_uids, our_uid = theirs["Uid"].split()[:3], str(os.geteuid())
    if set(their_uids) != {our_uid}:
        causes.append(
            f"the peer runs as uid {their_uids[0]}, this process as {our_uid}: run both as one "
            "user, or give this process CAP_SYS_PTRACE"
        )
    elif str(owner) != our_uid:
        causes.append(
            "the peer is not dumpable: it must not clear PR_SET_DUMPABLE, nor be started from a "
            "file with privileges or without read permission"
        )
    if peer.user_namespace != Path("/proc/self/ns/user").stat().st_ino:
        causes.append("the peer is in another user namespace: run both in one")
    if int(theirs["CapPrm"], 16) & ~int(ours["CapPrm"], 16):
        causes.append("the peer holds capabilities that this process lacks: give both the same")
    scope = _ptrace_scope()
    if scope:
        causes.append(
            f"kernel.yama.ptrace_scope is {scope}: "
            + (
                "give the peer permit_any_peer=True (an option of its engine, or of its "
                "LocalTransport), set it to 0, or give this process CAP_SYS_PTRACE"
                if scope == 1
                else "set it to 0 or 1 (3 lasts until the next boot), or use arenas"
            )
        )
    if theirs["Seccomp"] != "0" or ours["Seccomp"] != "0":
        causes.append(
            "a seccomp filter is active: let it pass pidfd_open, pidfd_getfd, process_vm_readv "
            "and process_vm_writev, as with `docker run --cap-add=SYS_PTRACE`"
        )
    return "; ".join(causes) or "a security module refuses it: see its log"


def _status(pid: int | str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _ptrace_scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except OSError:  # no Yama in this kernel
        return 0
