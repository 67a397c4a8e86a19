"""Parsers of kvplan are fed with changed documents: messages of peers, plans, recordings.

    python -m tests.soak.parsers messages|plans|recordings SEED SECONDS

Each document is either refused, with the error that its parser documents, or read. Messages and
plans that were read are written and read back as the same value. Native code executes plans that
were read like the reference does. For recordings, every question is answered. The last line is the
counts of all outcomes as JSON. After an unexpected error, the input is printed and the exit status
is 1.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Protocol

import msgspec
import numpy as np

import kvplan
from kvplan import (
    CacheDesc,
    DataType,
    KvCacheExtParam,
    LLMException,
    LLMStatusCode,
    Plan,
    Rows,
    Transfer,
)
from kvplan.control.messages import Undecodable, decode, encode
from kvplan.debug import locate
from kvplan.recording.format import COMPRESSED, LENGTH, MAGIC
from kvplan.recording.perfetto import trace_of
from kvplan.recording.reader import read
from kvplan.recording.records import who_wrote
from tests.control.test_messages import BODIES
from tests.planning.test_schema_unlike import LAYERS, RESHARD
from tests.recording.operations import record, recorder

MAX_NBYTES = 1 << 22  # both sides together, of plans that are executed
MAX_TENSORS = 1 << 12
STRANGE: list[Any] = [
    *(0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**30),
    *(0.5, float("inf"), float("nan"), True, False, None, "", "x" * 300, "\x1b[2J", b"", b"\xff"),
    *([], {}, [[]], {"": None}, [0] * 100),
]


class Parser(Protocol):
    """A parser of kvplan, and the source of its inputs."""

    def make(self, random: Random) -> Any:
        """Return an input."""

    def check(self, given: Any) -> str:
        """Return the outcome in a word or two; raise an error that is not documented."""


def changed_value(value: Any, random: Random) -> Any:
    """Return a document with one or a few places changed in ways that parsers often miss."""
    value = copy.deepcopy(value)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        place = value
        path: list[tuple[Any, Any]] = []
        while isinstance(place, dict | list) and place and (not path or random.random() < 0.9):
            key = random.choice([*place] if isinstance(place, dict) else range(len(place)))
            path.append((place, key))
            place = place[key]
        if not path:
            return random.choice(STRANGE)
        holder, key = path[-1]
        chance = random.random()
        if chance < 0.1:
            del holder[key]
        elif chance < 0.2 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(random.choice(holder)))
        elif chance < 0.5 and type(place) is int:
            holder[key] = place + random.choice([-1, 1, 2, -place, place, 2**32, -(2**40)])
        elif chance < 0.6:
            another, there = random.choice(path)
            holder[key] = copy.deepcopy(another[there])
        elif chance < 0.7 and isinstance(place, bytes) and place:
            holder[key] = changed_bytes(place, [place], random)
        else:
            holder[key] = copy.deepcopy(random.choice(STRANGE))
    return value


def changed_bytes(data: bytes, others: list[bytes], random: Random) -> bytes:
    """Return bytes with changed bits, cuts, repeats, or the end of other bytes."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 4, 16])):
        at = random.randrange(len(changed) + 1)
        chance = random.random()
        if chance < 0.5 and at < len(changed):
            changed[at] = random.choice(
                [changed[at] ^ 1 << random.randrange(8), 0, 0x7F, 0x80, 0xC1, 0xFF]
            )
        elif chance < 0.6:
            del changed[at : at + random.randint(1, 8)]
        elif chance < 0.7:
            changed[at:at] = random.randbytes(random.randint(1, 8))
        elif chance < 0.8:
            changed[at:at] = changed[at : at + random.randint(1, 64)]
        elif chance < 0.9:
            other = random.choice(others)
            changed[at:] = other[random.randrange(len(other) + 1) :]
        else:
            del changed[at:]
    return bytes(changed)


def packed(value: Any, otherwise: bytes) -> bytes:
    """Return a value as MessagePack, or `otherwise` if an integer has more than 64 bits."""
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        return otherwise


class Messages:
    """Frames as peers send them."""

    def __init__(self, _: Path) -> None:
        self._frames = [encode(body, seq=number) for number, body in enumerate(BODIES)]

    def make(self, random: Random) -> bytes:
        frame = random.choice(self._frames)
        if random.random() < 0.5:
            return changed_bytes(frame, self._frames, random)
        return frame[:1] + packed(
            changed_value(msgspec.msgpack.decode(frame[1:]), random), frame[1:]
        )

    def check(self, given: bytes) -> str:
        try:
            envelope = decode(given)
        except Undecodable as error:
            return type(error).__name__
        again = encode(envelope.body, seq=envelope.seq, reply_to=envelope.reply_to)
        assert decode(again) == envelope
        return "read"


def must_be_invalid(error: LLMException) -> None:
    """Raise an error again unless its status is that of invalid input."""
    if error.status_code is not LLMStatusCode.LLM_PARAM_INVALID:
        raise error


def plans() -> list[Plan]:
    """Return a plan of each kind, with and without layouts and repeats."""
    slots = CacheDesc(4, (4, 64), DataType.DT_INT32)
    blocks = CacheDesc(4, (8, 16), DataType.DT_INT32)
    return [
        kvplan.plan(Transfer(Rows(slots, slot=1), Rows(slots, slot=2)), local="dst"),
        kvplan.plan(
            Transfer(Rows(slots), Rows(slots), layers=KvCacheExtParam((1, 1), (0, 0), 2)),
            local="dst",
        ),
        kvplan.plan(Transfer(Rows(blocks, [1, 2, 5]), Rows(blocks, [0, 3, 4])), local="dst"),
        kvplan.plan(Transfer(Rows(slots), Rows(blocks, [7, 0, 1, 2])), local="dst"),
        kvplan.plan(Transfer(Rows(blocks, [0, 0, 3]), Rows(blocks, [1, 2, 4]))),
        RESHARD,
        LAYERS,
    ]


def check_execution(plan: Plan) -> str:
    """Check that native code and the reference move the same bytes."""
    if len(plan.parts) > 1:
        return "read, and of several parts"
    part = plan.part
    sizes = [side.num_tensors * side.tensor_nbytes for side in (part.src, part.dst)]
    if sum(sizes) > MAX_NBYTES or plan.num_descriptors > 10_000:
        return "read, and too large to execute"
    if part.src.num_tensors + part.dst.num_tensors > MAX_TENSORS:
        return "read, and of too many tensors to execute"
    random = np.random.default_rng(1)
    src = [
        random.integers(1, 256, part.src.tensor_nbytes, np.uint8)
        for _ in range(part.src.num_tensors)
    ]
    expected, found = (
        [np.zeros(part.dst.tensor_nbytes, np.uint8) for _ in range(part.dst.num_tensors)]
        for _ in range(2)
    )
    kvplan.reference.execute(plan, src, expected)
    kvplan.execute(plan, src, found)
    assert all(map(np.array_equal, expected, found)), locate(expected, found, plan)
    return "read and executed"


class Plans:
    """Documents for `Plan.from_dict`."""

    def __init__(self, _: Path) -> None:
        self._documents = [plan.to_dict() for plan in plans()]

    def make(self, random: Random) -> Any:
        return changed_value(random.choice(self._documents), random)

    def check(self, given: Any) -> str:
        try:
            plan = Plan.from_dict(given)
        except LLMException as error:
            must_be_invalid(error)
            return "refused"
        assert Plan.from_dict(plan.to_dict()) == plan
        assert plan.explain()
        return check_execution(plan)


class Recordings:
    """Files for `kvplan trace`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "changed.kvrec"
        self._files: list[bytes] = []
        for name, chosen in (("few", plans()[:3]), ("all", plans())):
            item = recorder(folder / name)
            for number, plan in enumerate(chosen):
                record(item, plan, tag=f"request-{number}", error="failed" * (number % 3 == 2))
            record(item, None, error="refused")
            item.close()
            self._files.append((folder / name).read_bytes())

    def make(self, random: Random) -> bytes:
        data = random.choice(self._files)
        if random.random() < 0.3:
            kept = random.choice([0, len(MAGIC), len(MAGIC), len(MAGIC) + 40])
            return data[:kept] + changed_bytes(data[kept:], self._files, random)
        rows = [*rows_in(data)]
        for _ in range(random.choice([1, 1, 3])):
            at = random.randrange(len(rows))
            rows[at] = packed(changed_value(msgspec.msgpack.decode(rows[at]), random), rows[at])
        return MAGIC + b"".join(LENGTH.pack(len(row)) + row for row in rows)

    def check(self, given: bytes) -> str:
        self._path.write_bytes(given)
        try:
            recording = read(self._path)
        except LLMException as error:
            must_be_invalid(error)
            return "refused"
        outcome = "read"
        for transfer in recording.transfers:
            try:
                plan = transfer.plan
            except LLMException as error:
                must_be_invalid(error)
                outcome = "read, with damaged plans"
                continue
            if plan is not None:
                check_execution(plan)
        for ask in (lambda: who_wrote(recording, 1, 3), lambda: check_trace(recording)):
            try:
                ask()
            except LLMException as error:
                must_be_invalid(error)
        return outcome


def check_trace(recording: Any) -> None:
    """Check that the trace of a recording is JSON."""
    json.dumps(trace_of([(recording, recording.rows)]), allow_nan=False)


def rows_in(data: bytes) -> list[bytes]:
    """Return the rows of a file as MessagePack."""
    rows, at = [], len(MAGIC)
    while at < len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if length & COMPRESSED:
            length &= ~COMPRESSED
            rows.append(zlib.decompress(data[at : at + length]))
        else:
            rows.append(data[at : at + length])
        at += length
    return rows


PARSERS: dict[str, type[Messages] | type[Plans] | type[Recordings]] = {
    "messages": Messages,
    "plans": Plans,
    "recordings": Recordings,
}


def run(name: str, seed: int, seconds: float) -> Counter[str]:
    """Parse inputs until the time is over. The seed and the number of an input determine it."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kvplan-soak-") as folder:
        parser: Parser = PARSERS[name](Path(folder))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            given = parser.make(Random(f"{seed} {counts['inputs']}"))
            try:
                counts[parser.check(given)] += 1
            except Exception:
                print(f"input {counts['inputs']} of seed {seed}: {given!r}", file=sys.stderr)
                raise
            counts["inputs"] += 1
    return counts


def main(name: str, seed: str, seconds: str) -> None:
    print(json.dumps({"counts": run(name, int(seed), float(seconds))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
