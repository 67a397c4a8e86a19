"""Engines that link only over TCP, or only over UCX, for those machines of the suites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvplan import LlmDataDist, Options
from tests.support.places import CLUSTER_KEY, TCP_CONNECTIONS

FIELDS: dict[str, Any] = {"transport": "tcp", "tcp_connections": TCP_CONNECTIONS}
if CLUSTER_KEY:
    FIELDS["cluster_key_file"] = CLUSTER_KEY
KEYS = {f"kvplan.{name}": str(value) for name, value in FIELDS.items()}


def engine_of(machine: str) -> type[LlmDataDist]:
    """Return the class of engines on the machine of that name."""
    if machine == "ascend":
        from tests.ascend.device import OnDevice  # imports this module

        return OnDevice
    if machine == "cuda":
        from tests.cuda.device import OnCuda

        return OnCuda
    return {"tcp": OverTcp, "ucx": OverUcx}.get(machine, LlmDataDist)


class OverTcp(LlmDataDist):
    """An engine with the test's options, over TCP, with at least TCP_CONNECTIONS."""

    def initialize(self, options: Mapping[str, str] | Options | None = None) -> None:
        if isinstance(options, Options):
            count = max(options.tcp_connections or 1, TCP_CONNECTIONS)
            super().initialize(replace(options, **{**FIELDS, "tcp_connections": count}))
        else:
            super().initialize({**KEYS, **(options or {})})


class OverUcx(LlmDataDist):
    """An engine with the test's options, over UCX between processes of one host."""

    def initialize(self, options: Mapping[str, str] | Options | None = None) -> None:
        assert isinstance(options, Options)
        super().initialize(replace(options, transport="ucx", ucx_settings='{"UCX_TLS": "shm"}'))
