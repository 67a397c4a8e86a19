"""Observing: additional time on the program's thread, and of requests of NIXL."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import libraries
from benchmarks.movers.paged import forwarding
from benchmarks.one_host import REQUESTS
from benchmarks.pairs import LOOPBACK, Pair
from benchmarks.table import Row, Run, Topic, Unmeasured
from kvplan.observe import Observer
from kvplan.observe.surfaces import wrap_nixl

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOPIC = Topic()
TENSORS, BLOCKS, BLOCK = 32, 256, 32 << 10
REPEATS = 100
ROUNDS = 101


class Stub:
    """NIXL's methods that each transfer calls, without any work."""

    def __init__(self, agent_name: str) -> None:
        self.name, self._handles = agent_name, count()

    def register_memory(self, reg_list: Any, mem_type: str | None = None) -> Any:
        """Do nothing."""
        return reg_list

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None
    ) -> object:
        """Return a handle."""
        return object()

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: object, local_indices: Any,
        remote_xfer_side: object, remote_indices: Any, notif_msg: bytes = b"",
    ) -> object:  # fmt: skip
        """Return a handle."""
        return object()

    def transfer(self, handle: object, notif_msg: bytes = b"") -> str:
        """Be in flight."""
        return "PROC"

    def check_xfer_state(self, handle: object) -> str:
        """Be done."""
        return "DONE"

    def release_xfer_handle(self, handle: object) -> None:
        """Do nothing."""


EACH_TRANSFER = ("make_prepped_xfer", "transfer", "check_xfer_state", "release_xfer_handle")


Method = Callable[..., Any]


def noting(method: Method) -> Method:
    """Return the minimal wrapper in Python that notes calls: it forwards, and appends a tuple."""
    note = deque[tuple[object, ...]](maxlen=1000).append

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        note((args, perf_counter(), result))
        return result

    return noted


def stub(
    observer: Observer | None, wrapped: Callable[[Method], Method] | None = None
) -> Callable[[NDArray[np.int32]], None]:
    """Return a function that makes, posts, polls and releases a transfer of rows of a list."""
    made = type("nixl_agent", (), dict(vars(Stub)))
    if wrapped is not None:
        for name in EACH_TRANSFER:
            setattr(made, name, wrapped(getattr(made, name)))
    if observer is not None:
        module = ModuleType("nixl._api")
        vars(module)["nixl_agent"] = made
        wrap_nixl(module, observer)
    agent: Any = made("decode")
    rows = np.zeros((2, TENSORS * BLOCKS, 3), np.uint64)
    rows[..., 0] = np.arange(rows[..., 0].size).reshape(2, -1) * BLOCK + (1 << 40)
    rows[..., 1] = BLOCK
    sizes = BLOCKS * BLOCK
    agent.register_memory([(int(rows[0, its * BLOCKS, 0]), sizes, 0, "") for its in range(TENSORS)])
    lists = [
        agent.prep_xfer_dlist(name, of) for name, of in zip(("", "prefill"), rows, strict=True)
    ]

    def transfer(indices: NDArray[np.int32]) -> None:
        handle = agent.make_prepped_xfer("READ", lists[0], indices, lists[1], indices, b"cmpl-7:1")
        agent.transfer(handle)
        agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)

    return transfer


@TOPIC.row("observe_us")
def calls(run: Run, name: str) -> Row:
    """Additional time of the four calls of a transfer of NIXL while they are observed.

    The calls do nothing; the time is that of the calling thread, while the observer's thread works.
    The note compares wrappers in Python that only forward, and wrappers that also read the clock
    and append a tuple. An observer in Python takes more, because it copies indices.
    """
    cases: dict[str, float] = {}
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        observer = Observer(folder)
        ways = stub(None), stub(None, forwarding), stub(None, noting), stub(observer)
        for blocks in (1, 8, 64):
            indices = (np.arange(TENSORS)[:, None] * BLOCKS + np.arange(blocks)).ravel()

            def seconds(
                way: Callable[[NDArray[np.int32]], None], given: NDArray[np.int32]
            ) -> float:
                started = time.thread_time()
                for _ in range(REPEATS):
                    way(given)
                taken = time.thread_time() - started
                observer.flush()
                return taken / REPEATS

            given = indices.astype(np.int32)
            plain, *longer = run.medians(*(partial(seconds, w, given) for w in ways), rounds=ROUNDS)
            forwarded, noted, seen = (1e6 * (way - plain) for way in longer)
            case = f"{blocks} blocks"
            cases |= {case: seen, f"{case}, wrappers": forwarded, f"{case}, notes": noted}
            least = f"{forwarded:.2f} by wrappers that only forward, {noted:.2f} that also note"
            texts.append(f"{case} {seen:.2f} us ({least})")
        observer.close()
    note = f"make, post, poll and release; of {TENSORS} tensors, {', '.join(texts)}"
    return Row(name, cases["8 blocks"], "us", 2, note=f"{note}; limit: the budget", cases=cases)


@TOPIC.row("observe_overhead")
def requests(run: Run, name: str) -> Row:
    """Additional time of a request of NIXL while its program is observed."""
    cases: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        bare = libraries.nixl_on_one_host()[0]  # with ordinary memory

        def move(line: str) -> list[str]:
            site = next(its for its in sys.path if its.endswith("site-packages"))
            return [*bare.move(line), "--observe", site, folder]

        with Pair(replace(bare, move=move), LOOPBACK) as pair:
            for word, number in REQUESTS:
                ways = (
                    partial(pair.seconds, f"{kind}{word}", number)
                    for kind in ("", "forwarded-", "observed-")
                )
                plain, forwarded, seen = run.medians(*ways, rounds=ROUNDS // 3)
                size = f"{number * (1 if word == 'single' else 64)} descriptors"
                cases[f"{size}, us"], cases[size] = 1e6 * plain, 100 * (seen / plain - 1)
                cases[f"{size}, wrappers"] = 100 * (forwarded / plain - 1)
        if not list(Path(folder).glob("*.kvrec")):
            raise Unmeasured("nothing was observed")
    shown = {case: percent for case, percent in cases.items() if f"{case}, us" in cases}
    texts = [
        f"{case} {shown[case]:+.1f} % of {cases[f'{case}, us']:.0f} us "
        f"({cases[f'{case}, wrappers']:+.1f} % by wrappers that only forward)"
        for case in shown
    ]
    note = f"NIXL ({bare.settings}) with itself, observed in every third turn: {', '.join(texts)}"
    return Row(
        name, shown["64 descriptors"], "%", 3, note=f"{note}; limit: the budget", cases=cases
    )
