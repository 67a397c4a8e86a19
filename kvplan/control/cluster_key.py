"""The key of a cluster: whoever holds it may link, and nobody else.

All engines of a cluster share one CURVE key pair; its file holds the secret half, from which the
public one follows.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from kvplan.status import invalid

_FORMAT: Final = "kvplan-cluster-key 1 {}\n"
_PATTERN: Final = re.compile(r"kvplan-cluster-key 1 ([0-9a-f]{64})\n?")
_MAX_NBYTES: Final = 256
_MODE: Final = 0o600


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A CURVE key pair; `secret` and `public` are 32 bytes each."""

    secret: bytes = field(repr=False)
    public: bytes

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
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, _MODE), "w") as file:
            try:
                file.write(_FORMAT.format(self.secret.hex()))
            except OSError:
                Path(path).unlink()  # half a key is none
                raise

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
