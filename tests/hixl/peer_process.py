"""The names that snippets in a `Peer` can use: hixl, and memory of its place."""

import mmap
from typing import Any

import numpy as np

from kvplan import hixl
from tests.hixl import places


def names(place: str) -> dict[str, Any]:
    return {
        "hixl": hixl,
        "np": np,
        "mmap": mmap,
        "pattern": places.pattern,
        "place": places.Place(place, 1),
        "registered": places.registered,
    }
