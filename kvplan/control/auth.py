"""The keys that authenticate channels. If a channel has a key, only holders of the key may link.

All engines of a cluster share one CURVE key pair, the cluster key. Its file holds the secret half,
from which the public half follows. Without a cluster key, the engines of one user share the user's
key inside a host: every user of the host can connect there, so a loopback address proves nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import zmq
from zmq.utils import z85

from kvplan.control.endpoint import Endpoint
from kvplan.status import LLMException, invalid, message_of
from kvplan.system.logs import Log
from kvplan.system.users import private_directory, state_file
from kvplan.validation import open_regular

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop

_FORMAT: Final = "kvplan-cluster-key 1 {}\n"
_PATTERN: Final = re.compile(r"kvplan-cluster-key 1 ([0-9a-f]{64})\n?")
_MAX_NBYTES: Final = 256
_MIN_DISTINCT_BYTES: Final = 8  # of 32; one random key in 10**36 has fewer
_MODE: Final = 0o600

_USER_KEY: Final = "user.key"
_REMEDY: Final = "or give kvplan.cluster_key_file ('kvplan keygen' makes one)"

COOKIE_NBYTES: Final = 31
"""The number of bytes that ZMTP's greeting leaves unused."""

ADVICE: Final = "give both ends the same kvplan.cluster_key_file"

_log = Log("kvplan.control")


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A CURVE key pair; `secret` and `public` are 32 bytes each.

    Attributes:
        advice: The remedy if a peer does not have this key.
    """

    secret: bytes = field(repr=False)
    public: bytes
    advice: str = field(default=ADVICE, compare=False)

    @classmethod
    def generate(cls) -> ClusterKey:
        """Make a new key."""
        _, secret = zmq.curve_keypair()
        return cls._of(z85.decode(secret))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClusterKey:
        """Read the key from a file that `save` has written."""
        try:
            path = Path(path).expanduser()
            descriptor = open_regular(path)
        except OSError as error:
            raise invalid(f"cluster key {os.fspath(path)}: {error.strerror}") from None
        except LLMException:
            raise invalid(f"cluster key {os.fspath(path)}: it is not a regular file") from None
        except RuntimeError as error:  # this user has no home
            raise invalid(f"cluster key {os.fspath(path)}: {error}") from None
        try:
            status = os.fstat(descriptor)
            if status.st_uid not in (os.geteuid(), 0):
                raise invalid(
                    f"cluster key {os.fspath(path)}: it belongs to user {status.st_uid}, not to "
                    f"user {os.geteuid()}"
                )
            if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
                raise invalid(
                    f"cluster key {os.fspath(path)}: its mode is {mode:04o}, so others may use it; "
                    f"chmod {_MODE:o} is needed, and a new key if others are not trusted"
                )
            text = os.read(descriptor, _MAX_NBYTES).decode("ascii", errors="replace")
        finally:
            os.close(descriptor)
        if (match := _PATTERN.fullmatch(text)) is None:
            raise invalid(f"cluster key {os.fspath(path)}: it was not made by kvplan keygen")
        secret = bytes.fromhex(match[1])
        if (found := len(set(secret))) < _MIN_DISTINCT_BYTES:
            raise invalid(
                f"cluster key {os.fspath(path)}: it is not random: its {len(secret)} bytes have "
                f"{found} different values; make another with kvplan keygen"
            )
        return cls._of(secret)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner may read."""
        # Write it under another name first, so that no process reads half a key.
        part = f"{os.fspath(path)}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(part, flags, _MODE)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(_FORMAT.format(self.secret.hex()))
                file.flush()
                os.fsync(descriptor)
            os.link(part, path)
        finally:
            Path(part).unlink()

    def cookie(self, nonce: bytes) -> bytes:
        """Return the answer to `nonce` that proves possession of the key."""
        kind = b"kvplan-cookie"
        return blake2b(nonce, key=self.secret, digest_size=COOKIE_NBYTES, person=kind).digest()

    def apply(self, socket: zmq.Socket[bytes], *, listening: bool) -> None:
        """Make `socket` use this key. If it listens, it admits only clients with this key."""
        if listening:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.ZAP_DOMAIN, self.public.hex().encode())  # for `ZapAuthenticator`
            # Without this, libzmq admits every client while no authenticator answers.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    @classmethod
    def _of(cls, secret: bytes) -> ClusterKey:
        public = zmq.curve_public(z85.encode(secret))
        return cls(secret, z85.decode(public))


def link_secret(challenge: bytes) -> bytes:
    """Return the secret that both ends of a link derive from the challenge of its handshake."""
    return hmac.digest(challenge, b"kvplan link secret", "sha256")


def proof_of(secret: bytes, nonce: bytes, hello: bytes) -> bytes:
    """Return the proof that the sender of `hello` has the secret of an earlier link."""
    return hmac.digest(secret, b"kvplan same engine" + nonce + hello, "sha256")


class Keys:
    """The keys of this engine. A channel uses one or none."""

    def __init__(
        self, cluster: ClusterKey | None = None, user: Callable[[], ClusterKey] | None = None
    ) -> None:
        self.cluster = cluster
        self._read_user = user
        self._user: ClusterKey | None = None

    async def at(self, loop: ControlLoop, endpoint: Endpoint) -> ClusterKey | None:
        """Return the key of channels with the listener at `endpoint`; None: they have none."""
        if self.cluster is not None or self._read_user is None or not endpoint.is_loopback:
            return self.cluster
        if self._user is None:
            self._user = await loop.in_worker(self._read_user)  # a home may be on a slow disk
        return self._user


class UserKeyState(NamedTuple):
    """The user's key, for `kvplan info`."""

    path: str
    is_made: bool  # True if the file exists
    why_not_home: str  # why the file is in the runtime directory; empty if it is not
    why_not: str  # why the key is not usable; empty if it is


def user_key() -> ClusterKey:
    """Return the key of this user, and make it if it does not exist."""
    path, why_not_home = state_file(_USER_KEY)
    if why_not_home:
        _log.warning("event=user_key path=%s reason=%r", path, why_not_home)
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        private_directory(path.parent, "directory of the user's key")
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):  # another process was faster: use its key
                ClusterKey.generate().save(path)
        key = ClusterKey.load(path)
    except OSError as error:
        raise invalid(f"user's key {path}: {error.strerror}; correct this, {_REMEDY}") from None
    except LLMException as error:
        raise invalid(f"user's key: {error.args[0]}; mend or remove it, {_REMEDY}") from None
    advice = (
        f"this side uses the key of user {os.geteuid()} ({path}), because kvplan.cluster_key_file "
        "is not given: engines of different users, homes or containers need the same file"
    )
    return replace(key, advice=advice)


def describe_user_key() -> UserKeyState:
    """Return the state of the user's key without making one."""
    path, why_not_home = state_file(_USER_KEY)
    why_not = ""
    if is_made := os.path.lexists(path):
        try:
            private_directory(path.parent, "its directory")
            ClusterKey.load(path)
        except LLMException as error:
            why_not = message_of(error)
    return UserKeyState(str(path), is_made, why_not_home, why_not)
