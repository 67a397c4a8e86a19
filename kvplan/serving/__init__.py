"""Requests that finish in one serving engine and continue in another (docs/how-to/serving.md).

This package is independent of serving engines and transports: `LlmDataDist` moves the bytes.
"""

from kvplan.serving.book import LeaseBook
from kvplan.serving.exchange import Exchange
from kvplan.serving.messages import Compatibility, Handle, Reference, Source, token_digest
from kvplan.serving.puller import PullResult, Target
from kvplan.serving.pusher import Chunk
from kvplan.serving.tables import CacheGroup, Place, Table
from kvplan.serving.tasks import ExchangeOptions

__all__ = [
    "CacheGroup",
    "Chunk",
    "Compatibility",
    "Exchange",
    "ExchangeOptions",
    "Handle",
    "LeaseBook",
    "Place",
    "PullResult",
    "Reference",
    "Source",
    "Table",
    "Target",
    "token_digest",
]
