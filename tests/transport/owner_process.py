"""What an `Owner` has: a transport over local."""

import gc
from typing import Any

import numpy as np

from kvplan.transport.local import LocalTransport


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that both processes can make."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def names() -> dict[str, Any]:
    """One transport after another."""

    def renew() -> None:
        """Have a new transport, and nothing that a test has made."""
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
