"""The hosts of the demo: this one for all of it, or one each for prefill and decode."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from .requirements import SetupError

TWO_HOSTS = (
    "Two hosts, made of network namespaces: each has an interface and an address of its own, and "
    "the KV cache goes from one to the other by TCP"
)


@dataclass(frozen=True)
class Host:
    """The host that a worker runs on.

    Attributes:
        address: its engine can be reached at.
        keeper: a process in its network namespace; None: the demo's own.
        key_file: with the key that an engine needs to link; every host has a copy.
    """

    address: str = "127.0.0.1"
    keeper: int | None = None
    key_file: str = ""

    def enter(self) -> None:
        """Go there; to be called by a process that has just begun."""
        if self.keeper is not None:
            from tools.namespaces import enter

            enter(self.keeper)

    def options(self) -> dict[str, str]:
        """Return the options of an engine there for reaching others.

        Two namespaces of one machine share its memory; `auto` would find that out, and use it.
        """
        if self.keeper is None:
            return {}
        return {"kvplan.transport": "tcp", "kvplan.cluster_key_file": self.key_file}


HERE = Host()


@contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Yield where prefill and where decode runs.

    Raises:
        SetupError: two hosts cannot be had here.
    """
    if count == 1:
        yield HERE, HERE
        return
    try:
        from tools.namespaces import NamespacesError, namespaces
    except ImportError:
        raise SetupError(
            "two hosts are made by tools/namespaces.py: run from a checkout of kvplan"
        ) from None
    with ExitStack() as opened:
        try:
            made = opened.enter_context(namespaces(count))
        except NamespacesError as error:
            raise SetupError(f"two hosts cannot be made: {error}") from error
        key_file = f"{opened.enter_context(TemporaryDirectory())}/cluster.key"
        keygen = [sys.executable, "-m", "kvplan", "keygen", key_file]
        subprocess.run(keygen, check=True, capture_output=True)
        yield tuple(Host(record.address, record.pid, key_file) for record in made)
