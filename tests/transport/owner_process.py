"""The names that the process of an `Owner` has: a transport over local."""

import gc
from typing import Any

import numpy as np

from kvplan.transport.local import LocalTransport


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """Return bytes that both processes can compute."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def names() -> dict[str, Any]:
    """Yield the names with a transport that is closed at the end."""

    def renew() -> None:
        """Replace the transport, and remove every name that a test has made."""
        if "transport" in known:
            known["transport"].close()
        for key in known.keys() - kept:
            del known[key]
        gc.collect()
        known["transport"] = LocalTransport()

    known: dict[str, Any] = {"np": np, "pattern": pattern, "renew": renew}
    kept = {*known, "result", "__builtins__"}
    renew()
    return known
