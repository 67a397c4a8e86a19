"""The names that snippets in a `Peer` can use: NIXL's agent."""

import mmap
from typing import Any

import numpy as np

from kvplan.nixl import nixl_agent


def names() -> dict[str, Any]:
    return {"mmap": mmap, "nixl_agent": nixl_agent, "np": np}
