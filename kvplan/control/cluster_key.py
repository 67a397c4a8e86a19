"""The key of a cluster: whoever holds it may link, and nobody else.

All engines of a cluster share one CURVE key pair; its file holds the secret half, from which the
public one follows.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

from kvplan.control.endpoint import Endpoint
from kvplan.status import invalid

if TYPE_CHECKING:
    from kvplan.control.loop import ControlLoop

_FORMAT: Final = "kvplan-cluster-key 1 {}\n"
_PATTERN: Final = re.compile(r"kvplan-cluster-key 1 ([0-9a-f]{64})\n?")
_MAX_NBYTES: Final = 256
_MODE: Final = 0o600

COOKIE_NBYTES: Final = 31
"""As many as ZMTP's greeting leaves unused."""

ADVICE: Final = "give both ends the same kvplan.cluster_key_file"


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A CURVE key pair; `secret` and `public` are 32 bytes each.

    Attributes:
        advice: for whoever meets a peer that does not have it.
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
        """Read the key from a file that `kvplan keygen` has made.

        Raises:
            LLMException: LLM_PARAM_INVALID: there is none, it is no key file, or others than its
                owner may read or write it.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise invalid(f"cluster key {os.fspath(path)}: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise invalid(f"cluster key {os.fspath(path)}: it is no file")
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
        return cls._of(bytes.fromhex(match[1]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner may read.

        Raises:
            OSError: the file exists, or cannot be made.
        """
        # Under another name until it is whole, so that nobody finds half a key.
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
        """What only holders of the key can say to `nonce`; costs next to nothing to check."""
        kind = b"kvplan-cookie"
        return blake2b(nonce, key=self.secret, digest_size=COOKIE_NBYTES, person=kind).digest()

    def apply(self, socket: zmq.Socket[bytes], *, listening: bool) -> None:
        """Have `socket` use this key, and where it listens, admit this key only."""
        if listening:
            socket.curve_server = True
            socket.zap_domain = self.public.hex().encode()  # the gatekeeper reads it
            # Nobody is admitted while nobody is there to say who may be.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        else:
            socket.curve_serverkey = self.public
            socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret

    @classmethod
    def _of(cls, secret: bytes) -> ClusterKey:
        public = zmq.curve_public(z85.encode(secret))
        return cls(secret, z85.decode(public))


class Keys:
    """Which key guards a conversation; used on the loop's thread.

    Args:
        cluster: of every conversation; None: there is none.
        user: makes or reads the key of conversations inside this host where the cluster has none;
            None leaves them open. It is asked once.
    """

    def __init__(
        self, cluster: ClusterKey | None = None, user: Callable[[], ClusterKey] | None = None
    ) -> None:
        self.cluster = cluster
        self._read_user = user
        self._user: ClusterKey | None = None

    async def at(self, loop: ControlLoop, endpoint: Endpoint) -> ClusterKey | None:
        """The key of conversations with who listens at `endpoint`.

        Raises:
            LLMException: the user's key cannot be had; says why, and what to do.
        """
        if self.cluster is not None or self._read_user is None or not endpoint.is_loopback:
            return self.cluster
        if self._user is None:
            self._user = await loop.in_worker(self._read_user)  # a home may be far away
        return self._user
