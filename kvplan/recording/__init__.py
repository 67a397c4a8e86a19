"""Recordings of engines: the transfers, with time, plan and outcome, and other events.

See docs/how-to/recording.md. Links, transports and the engine's own objects do not belong here.
"""

from kvplan.recording.format import Header
from kvplan.recording.reader import read
from kvplan.recording.records import (
    AnyRecord,
    Dropped,
    Event,
    Recording,
    TransferRecord,
    Write,
    select,
    who_wrote,
)

__all__ = [
    "AnyRecord",
    "Dropped",
    "Event",
    "Header",
    "Recording",
    "TransferRecord",
    "Write",
    "read",
    "select",
    "who_wrote",
]
