"""The connector that vLLM loads (docs/how-to/vllm.md), in two halves: scheduler and worker.

Only `connector` and `stats` import vLLM, so that the rest can be tested without it. `proxy` is a
program of its own. The room must not know how bytes move: `kvplan.serving` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvplan.vllm.connector import KvplanConnector

__all__ = ["KvplanConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvplan.vllm.connector import KvplanConnector

        return KvplanConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
