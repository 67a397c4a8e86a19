"""Requests of every shape: an engine executes and refuses exactly what the planner does.

Each request runs three times: the first resolves names, later ones find a known pair of caches.
`make explore TESTS=tests/datadist/test_lowered_requests.py` tries 20,000 examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvnative._lower import Descriptors
from kvplan import CacheIndex, LlmDataDist, LLMException, LlmRole, Plan, Rows, Transfer, Transfers
from kvplan.execution import TensorMemory
from kvplan.execution.binding import bind
from tests.datadist.conftest import link
from tests.execution.test_lowered import columns, forms, now_and_then, pairs, tables
from tests.planning.test_gather import requests as gathers
from tests.planning.unlike import Cache, of_one_request

Executed = tuple[Plan, TensorMemory, TensorMemory, Descriptors | None]


class Recorded(Transfers):
    """Transfers that record all executed descriptors, also of small requests."""

    executed: ClassVar[list[Executed]] = []

    def execute(self, *arguments: Any, **more: Any) -> None:
        plan, src, dst, _, descriptors = arguments
        self.executed.append((plan, src, dst, descriptors))
        super().execute(*arguments, **more)

    def submit(self, *arguments: Any, **more: Any) -> kvplan.TransferTask:
        plan, src, dst, _, descriptors, *_ = arguments
        self.executed.append((plan, src, dst, descriptors))
        return super().submit(*arguments, **more)

    def layered(self, *arguments: Any, **more: Any) -> kvplan.LayerTask:
        plan, src, dst, _, _, descriptors, _ = arguments
        self.executed.append((plan, src, dst, descriptors))
        return super().layered(*arguments, **more)


class Engines(NamedTuple):
    """Two engines with caches, and one that is linked with both."""

    owners: list[LlmDataDist]
    user: LlmDataDist


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with ExitStack() as held:
        owners = [held.enter_context(LlmDataDist(each, LlmRole.MIX)) for each in (1, 3)]
        transfers = held.enter_context(Recorded(1, wrap=lambda backend: backend))
        user = held.enter_context(LlmDataDist(2, LlmRole.MIX, transfers=transfers))
        user.initialize()
        for owner in owners:
            owner.initialize({"llm.ListenIpInfo": "127.0.0.1:0"})
            link(user, owner)
        yield Engines(owners, user)


class Side(NamedTuple):
    """Rows of a cache, as a test draws them."""

    cache: Cache
    rows: list[int]
    form: Callable[[list[int]], Any] = list
    first_token: int = 0
    owner: int = 0
    is_leased: bool = False

    def rows_of(self, cache: Any) -> Rows:
        if self.cache.row == "slot":
            return Rows(cache, slot=self.rows[0])
        return Rows(cache, self.form(self.rows), None, self.first_token)


class Request(NamedTuple):
    """Sources and a destination for each name, and the other fields of the transfer."""

    verb: str
    pairs: dict[str, tuple[list[Side], Side, dict[str, Any]]]
    by_layer: bool


@st.composite
def singles(draw: st.DrawFn, kinds: list[Any]) -> tuple[list[Side], Side, dict[str, Any]]:
    src, dst = draw(pairs(draw(st.sampled_from(kinds))))
    src_rows, dst_rows = draw(tables(src, distinct=False)), draw(tables(dst, distinct=True))
    skipped = [
        draw(st.integers(0, side.tokens)) if draw(st.booleans()) else 0 for side in (src, dst)
    ]
    if dst.row == "slot" or src.row == "slot":
        skipped = [0, 0]
    more: dict[str, Any] = {}
    if not now_and_then(draw):  # a valid one
        src_cut, dst_cut, most = of_one_request(src, dst, src_rows, dst_rows, *skipped)
        src_rows, dst_rows = src_cut or src_rows, dst_cut or dst_rows
        if most > 0:
            more["num_tokens"] = draw(st.integers(1, most))
        if src.tokens == dst.tokens and draw(st.booleans()):
            count = min(len(src_rows), len(dst_rows))
            src_rows, dst_rows, skipped, more = src_rows[:count], dst_rows[:count], [0, 0], {}
    if now_and_then(draw):
        rows = draw(st.sampled_from([src_rows, dst_rows]))
        rows.append(draw(st.integers(-1, 8)))
    sides = [
        Side(cache, rows, draw(forms) if cache.row == "block" else list, first)
        for cache, rows, first in ((src, src_rows, skipped[0]), (dst, dst_rows, skipped[1]))
    ]
    leased = len({*src_rows}) == len(src_rows) and draw(st.integers(0, 3)) == 0
    return [sides[0]._replace(is_leased=leased)], sides[1], more


@st.composite
def gathered(draw: st.DrawFn) -> tuple[list[Side], Side, dict[str, Any]]:
    sources, blocks, dst, dst_blocks, num_tokens, rank = draw(gathers())
    if now_and_then(draw):
        dst_blocks = [*dst_blocks, draw(st.integers(-1, 8))]
    if now_and_then(draw):
        sources, blocks = sources[1:] or sources, blocks[1:] or blocks
    sides = [
        Side(
            replace(cache, gap=draw(st.sampled_from([0, 1]))), [*rows],
            owner=draw(st.integers(0, 1)), is_leased=draw(st.booleans()),
        )
        for cache, rows in zip(sources, blocks, strict=True)
    ]  # fmt: skip
    return sides, Side(dst, [*dst_blocks]), {"num_tokens": num_tokens, "rank": rank}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    kind = draw(st.sampled_from(["single", "groups", "gather", "gathers"]))
    if kind == "single":
        verb = draw(st.sampled_from(["pull", "push", "copy"]))
        found = {"": draw(singles(["B2B", "B2B", "C2B", "C2C"]))}
    elif kind == "groups":
        verb = draw(st.sampled_from(["pull", "push", "copy"]))
        names = ["latent", "indexer", "window"][: draw(st.integers(1, 3))]
        found = {name: draw(singles(["B2B"])) for name in names}
    else:
        verb = "pull"
        found = {"": draw(gathered())}
        if kind == "gathers":
            found = {"latent": found[""], "indexer": draw(gathered() | singles(["B2B"]))}
    return Request(verb, found, draw(st.booleans()))


def made(engines: Engines, request: Request, held: ExitStack) -> Any:
    """Yield the transfer of a request between caches that are freed at the end."""

    def cache_of(side: Side, engine: LlmDataDist) -> Any:
        allocate = engine.allocate_cache if side.cache.row == "slot" else (
            engine.allocate_blocks_cache
        )  # fmt: skip
        cache = allocate(side.cache.desc)
        held.callback(engine.deallocate_cache, cache)
        return cache

    def rows_of(side: Side, *, is_theirs: bool) -> Rows:
        if not is_theirs:
            return side.rows_of(cache_of(side, engines.user))
        owner = engines.owners[side.owner]
        cache = cache_of(side, owner)
        if side.is_leased and side.cache.row == "block":
            with suppress(LLMException):  # the block may not exist
                lease = owner.lease_blocks(cache, side.rows)
                held.callback(owner.release, lease)
                return Rows(lease, None, None, side.first_token)
        slot = side.rows[0] if side.cache.row == "slot" else 0
        named = CacheIndex(2 * side.owner + 1, cache.cache_id, max(slot, 0))
        return side.rows_of(named)

    def transfer_of(sources: list[Side], dst: Side, more: dict[str, Any]) -> Transfer:
        read = [rows_of(side, is_theirs=request.verb == "pull") for side in sources]
        written = rows_of(dst, is_theirs=request.verb == "push")
        return Transfer(read if "rank" in more else read[0], written, **more)

    found = {name: transfer_of(*its) for name, its in request.pairs.items()}
    return found.get("", found)


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its refusal."""
    try:
        return call()
    except (LLMException, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def run(user: LlmDataDist, transfer: Any, by_layer: bool) -> None:
    if not by_layer:
        user.run(transfer)
        return
    task = user.layered(transfer)
    for layer in task.layers:
        task.ready(layer)
    task.wait()


@given(request=requests())
def test_an_engine_executes_and_refuses_what_the_planner_does(
    engines: Engines, request: Request
) -> None:
    user = engines.user
    with ExitStack() as held:
        try:
            transfer = made(engines, request, held)
        except (LLMException, ValueError):  # a tensor cannot have a part of a byte
            return
        reference_plan = attempt(lambda: user.plan(transfer, by_layer=request.by_layer))
        for _ in range(3):
            Recorded.executed.clear()
            outcome = attempt(lambda: run(user, transfer, request.by_layer))
            if isinstance(reference_plan, str):
                assert outcome == reference_plan
                assert not Recorded.executed
                continue
            assert outcome is None
            assert_executed(reference_plan)


def assert_executed(reference_plan: Plan) -> None:
    wanted = {part.label: part for part in reference_plan.parts}
    for plan, src, dst, descriptors in Recorded.executed:
        planned = Plan([wanted.pop(part.label) for part in plan.parts])
        if descriptors is None:  # no bytes, or tokens of shards, which are planned
            sides = [side for part in plan.parts for side in (part.src, part.dst)]
            assert any(part.nbytes == 0 for part in plan.parts) or not all(
                side.has_all_tokens for side in sides
            )
        else:
            one_space = src.in_process and dst.in_process
            assert columns(descriptors) == columns(bind(planned, src, dst, one_space=one_space))
            assert "segments" not in vars(plan.parts[0])
        assert plan == planned
    assert not wanted
