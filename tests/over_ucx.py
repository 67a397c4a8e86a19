"""Engines that link over UCX, whatever else would do: the machine "ucx" of the suites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvplan import LlmDataDist, Options
from tests.places import CLUSTER_KEY, UCX_LANES

FIELDS: dict[str, Any] = {"transport": "ucx", "ucx_lanes": UCX_LANES}
if CLUSTER_KEY:
    FIELDS["cluster_key_file"] = CLUSTER_KEY
KEYS = {f"kvplan.{name}": str(value) for name, value in FIELDS.items()}


def engine_of(machine: str) -> type[LlmDataDist]:
    """The class to make engines of, on the machine of that name."""
    return OverUcx if machine == "ucx" else LlmDataDist


class OverUcx(LlmDataDist):
    """Its options are the test's, and the transport, with as many lanes at least."""

    def initialize(self, options: Mapping[str, str] | Options | None = None) -> None:
        if isinstance(options, Options):
            lanes = max(options.ucx_lanes, UCX_LANES)
            super().initialize(replace(options, **{**FIELDS, "ucx_lanes": lanes}))
        else:
            super().initialize({**KEYS, **(options or {})})
