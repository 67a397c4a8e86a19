"""What a peer of these tests can use: an engine of any options, and values to describe caches."""

from __future__ import annotations

from typing import Any

import kvplan


def names() -> dict[str, Any]:
    return {name: getattr(kvplan, name) for name in kvplan.__all__}
