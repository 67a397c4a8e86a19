"""The names that snippets in a peer can use: Mooncake's engine."""

import mmap
from typing import Any

import numpy as np

from kvplan.mooncake.engine import TransferEngine


def names() -> dict[str, Any]:
    return {"TransferEngine": TransferEngine, "mmap": mmap, "np": np}
