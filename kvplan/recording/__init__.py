"""Recordings of engines: what was transferred, when, by which plan, and what became of it.

`LlmDataDist.record` writes them, `read` reads them: see docs/how-to/recording.md.
"""

from kvplan.recording.queries import select, who_wrote
from kvplan.recording.reader import follow, read
from kvplan.recording.records import (
    AnyRecord,
    Dropped,
    Event,
    Header,
    Recording,
    TransferRecord,
    Write,
)

__all__ = [
    "AnyRecord",
    "Dropped",
    "Event",
    "Header",
    "Recording",
    "TransferRecord",
    "Write",
    "follow",
    "read",
    "select",
    "who_wrote",
]
