"""The names that snippets in a peer can use: an engine of any options, and cache descriptions."""

from __future__ import annotations

from typing import Any

import kvplan


def names() -> dict[str, Any]:
    return {name: getattr(kvplan, name) for name in kvplan.__all__}
