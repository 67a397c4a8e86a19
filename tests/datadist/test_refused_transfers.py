"""Refused transfers: the named argument, the reason and the status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheIndex,
    CacheKey,
    KvCacheExtParam,
    LlmDataDist,
    LLMException,
    LlmRole,
    LLMStatusCode,
    Placement,
    Rows,
    Transfer,
)
from tests.datadist.offered import BLOCKS, CACHE, PAGED, SLOTS
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("offered")

FOREIGN: dict[str, Callable[[LlmDataDist, Cache, Cache], object]] = {
    "pull": lambda engine, slots, paged: engine.pull_cache(CacheIndex(1, CACHE), slots),
    "pull of blocks": lambda engine, slots, paged: engine.pull_blocks(
        CacheIndex(1, PAGED), paged, [0], [1]
    ),
    "submitted pull": lambda engine, slots, paged: engine.submit(
        Transfer(Rows(CacheIndex(1, PAGED), [0]), Rows(paged, [1]))
    ),
    "push": lambda engine, slots, paged: engine.push_cache(slots, CacheIndex(1, CACHE)),
    "push of blocks": lambda engine, slots, paged: engine.push_blocks(
        paged, CacheIndex(1, PAGED), [0], [1]
    ),
    "layers": lambda engine, slots, paged: engine.layered(
        Transfer(Rows(slots), Rows(CacheIndex(1, CACHE)))
    ),
    "groups": lambda engine, slots, paged: engine.run(
        {"kv": Transfer(Rows(CacheIndex(1, PAGED), [0]), Rows(paged, [1]))}
    ),
    "gather": lambda engine, slots, paged: engine.run(
        Transfer([Rows(CacheIndex(1, PAGED), [0])], Rows(paged, [1]))
    ),
    "copy": lambda engine, slots, paged: engine.copy_cache(slots, slots, 0, 1),
    "copy of blocks": lambda engine, slots, paged: engine.copy_blocks(paged, {0: [1]}),
    "swap": lambda given, slots, paged: given.swap_blocks(
        paged, Cache(replace(BLOCKS, placement=Placement.HOST), 3), {0: 1}
    ),
    "arrays": lambda end, slots, paged: end.arrays(slots),
    "read": lambda end, slots, paged: end.arrays(slots, copy=True),
    "write": lambda given, slots, paged: given.write_cache(slots, []),
    "fingerprint": lambda given, slots, paged: given.fingerprint(paged),
    "lease": lambda given, slots, paged: given.lease_blocks(paged, [0]),
    "deallocate": lambda given, slots, paged: given.deallocate_cache(slots),
}


def test_a_cache_of_another_engine_is_refused(
    user: LlmDataDist, slots: Cache, blocks: Cache
) -> None:
    """Ids start at 1 in each engine, so this engine may have a cache with the same id."""
    with LlmDataDist(9, LlmRole.MIX) as other:
        other.initialize()
        foreign = other.allocate_cache(SLOTS), other.allocate_blocks_cache(BLOCKS)
        assert [cache.cache_id for cache in foreign] == [slots.cache_id, blocks.cache_id]
        for call in FOREIGN.values():
            with refused("LLM_KV_CACHE_NOT_EXIST", "was made by another engine"):
                call(user, *foreign)
    assert not any(value.any() for value in (*user.arrays(slots), *user.arrays(blocks)))


@pytest.mark.parametrize("key", [CacheKey(1), CacheKey(1, 1, 0, 1)], ids=["neither", "both"])
def test_the_error_names_the_argument_that_must_be_a_request_or_a_prefix(
    user: LlmDataDist, slots: Cache, key: CacheKey
) -> None:
    with refused(LLMStatusCode.LLM_PARAM_INVALID) as error:
        user.pull_cache(key, slots)
    assert f"={key} must name either a request (req_id) or a prefix" in str(error.value)


REFUSALS: dict[str, tuple[LLMStatusCode, Callable[[LlmDataDist, Cache, Cache], object]]] = {
    "own cluster": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(2, 1), slots),
    ),
    "not linked": (
        LLMStatusCode.LLM_NOT_YET_LINK,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(3, 1), slots),
    ),
    "no such local cache": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), Cache(SLOTS, 99)),
    ),
    "no such remote cache": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, 99), slots),
    ),
    "no such remote blocks key": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_blocks(BlocksCacheKey(1, 6), blocks, [0], [0]),
    ),
    "no such remote key": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_cache(CacheKey(1, 999), slots),
    ),
    "remote slot beyond the cache": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE, 4), slots),
    ),
    "remote slot beyond the cache, pushed": (
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        lambda engine, slots, blocks: engine.push_cache(slots, CacheIndex(1, CACHE, 4)),
    ),
    "remote layer beyond the cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(
            CacheIndex(1, CACHE), slots, layers=KvCacheExtParam((2, 2), (0, 0))
        ),
    ),
    "local slot beyond the cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), slots, 4),
    ),
    "size of no bytes": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), slots, size=0),
    ),
    "paged into slots": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, PAGED), slots),
    ),
    "slot into paged by pull_cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), blocks),
    ),
    "blocks into slots": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_blocks(CacheIndex(1, PAGED), slots, [0], [0]),
    ),
    "blocks of a contiguous cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_blocks(CacheIndex(1, CACHE), blocks, [0], [0]),
    ),
    "no blocks of a paged cache": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_blocks(BlocksCacheKey(1, 5), blocks, [], [0]),
    ),
    "blocks of unequal number": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_blocks(CacheIndex(1, PAGED), blocks, [0], [0, 1]),
    ),
    "a key of neither": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheKey(1), slots),
    ),
    "a key of both": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.pull_cache(CacheKey(1, 1, 0, 1), slots),
    ),
    "push of no bytes": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.push_cache(slots, CacheIndex(1, CACHE), size=0),
    ),
    "push of no blocks": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.push_blocks(blocks, CacheIndex(1, PAGED), [], [0]),
    ),
    "push of slots as blocks": (
        LLMStatusCode.LLM_PARAM_INVALID,
        lambda engine, slots, blocks: engine.push_blocks(slots, CacheIndex(1, PAGED), [0], [0]),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_impossible_transfers_are_refused(
    user: LlmDataDist, slots: Cache, blocks: Cache, name: str
) -> None:
    status, call = REFUSALS[name]
    with refused(status):
        call(user, slots, blocks)
    assert user.metrics()["in_flight"] == 0


def test_the_call_for_the_other_kind_of_cache_is_named(
    user: LlmDataDist, slots: Cache, blocks: Cache
) -> None:
    invalid = LLMStatusCode.LLM_PARAM_INVALID
    with refused(invalid) as error:
        user.pull_cache(CacheIndex(1, CACHE), blocks)
    assert "is a paged cache; pull_cache needs a contiguous one; pull_blocks takes" in str(
        error.value
    )
    with refused(invalid) as error:
        user.pull_cache(CacheIndex(1, PAGED), slots)
    assert "is a paged cache; pull_cache needs a contiguous one; pull_blocks takes" in str(
        error.value
    )
    with refused(invalid) as error:
        user.push_blocks(slots, CacheIndex(1, PAGED), [0], [0])
    assert "contiguous cache; push_blocks needs a paged one, or no src_blocks" in str(error.value)
    with refused(invalid) as error:
        user.pull_blocks(CacheIndex(1, CACHE), blocks, [0], [0])
    assert "needs a paged one, or no src_blocks: then a slot is moved" in str(error.value)


def test_arguments_in_the_wrong_order_are_called_by_their_names(
    user: LlmDataDist, slots: Cache
) -> None:
    with pytest.raises(TypeError, match=r"^dst=.* must be Cache, not CacheKeyByIdAndIndex"):
        user.pull_cache(slots, CacheIndex(1, CACHE))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^src=.* must be Cache, not CacheKeyByIdAndIndex"):
        user.push_cache(CacheIndex(1, CACHE), slots)  # type: ignore[arg-type]


def test_an_error_lists_all_values_that_name_a_cache(user: LlmDataDist, blocks: Cache) -> None:
    names = "CacheKeyByIdAndIndex or BlocksCacheKey or BlockLease"
    wrong: Any = b"lease"
    with pytest.raises(TypeError, match=f"^src=b'lease' must be Cache or {names} or CacheKey, not"):
        user.run(Transfer(Rows(wrong, [0]), Rows(blocks, [1])))
    with pytest.raises(TypeError, match=f"^dst=b'lease' must be Cache or {names} or PeerTensors"):
        user.run(Transfer(Rows(blocks, [0]), Rows(wrong, [1])))
    with pytest.raises(
        TypeError, match=r"^transfer\['a'\].dst=b'lease' must be Cache or CacheKeyBy"
    ):
        user.run({"a": Transfer(Rows(blocks, [0]), Rows(wrong, [1]))})


def test_a_peers_cache_without_a_key_is_refused_with_the_remedy(
    user: LlmDataDist, blocks: Cache
) -> None:
    needed = "must be a key of a peer's cache, a BlockLease or PeerTensors, not"
    with pytest.raises(TypeError, match=f"^src=b'lease' {needed} bytes"):
        user.pull_blocks(b"lease", blocks, None, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"^dst=1 {needed} int"):
        user.push_blocks(blocks, 1, [1], [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"^src=Cache.* {needed} Cache"):
        user.pull_blocks(blocks, blocks, [1], [1])  # type: ignore[arg-type]


WRONG_TYPES: dict[str, Callable[[Any, Cache, Cache], object]] = {
    "index": lambda engine, slots, blocks: engine.pull_cache((1, 1), slots),
    "cache": lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), 1),
    "push by request": lambda engine, slots, blocks: engine.push_cache(slots, CacheKey(1, 71)),
    "push blocks by request": lambda engine, slots, blocks: engine.push_blocks(
        blocks, CacheKey(1, 71), [0], [0]
    ),
    "block table": lambda engine, slots, blocks: engine.pull_blocks(
        CacheIndex(1, PAGED), blocks, 3, [0]
    ),
    "slot": lambda engine, slots, blocks: engine.pull_cache(CacheIndex(1, CACHE), slots, "0"),
    "size": lambda engine, slots, blocks: engine.push_cache(slots, CacheIndex(1, CACHE), size=None),
    "layers": lambda engine, slots, blocks: engine.pull_cache(
        CacheIndex(1, CACHE), slots, layers={}
    ),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_arguments_of_another_type_are_refused(
    user: LlmDataDist, slots: Cache, blocks: Cache, name: str
) -> None:
    with pytest.raises(TypeError):
        WRONG_TYPES[name](user, slots, blocks)
    assert user.metrics()["in_flight"] == 0


def test_an_error_names_the_parameter_or_the_field_that_is_wrong(
    user: LlmDataDist, slots: Cache, blocks: Cache
) -> None:
    """Errors of methods name parameters, and errors of a `Transfer` name fields."""
    paged, slot = CacheIndex(1, PAGED), CacheIndex(1, CACHE)
    for text, call in (
        (r"src_blocks\[1\]=8 is", lambda: user.pull_blocks(paged, blocks, [0, 8], [1, 2])),
        (r"dst_blocks\[1\]=8 is", lambda: user.push_blocks(blocks, paged, [0, 1], [2, 8])),
        ("src_token='1' must", lambda: user.pull_blocks(paged, blocks, [0], [1], src_token="1")),
        ("^dst_batch_index=4 is", lambda: user.pull_cache(slot, slots, 4)),
        ("^src_batch_index=4 is", lambda: user.push_cache(slots, slot, 4)),
        ("^size=257: .* from src_offset=0", lambda: user.pull_cache(slot, slots, size=257)),
        ("^size=8: .* from offset=250", lambda: user.copy_cache(slots, slots, 0, 1, 250, 8)),
        (r"^blocks\.sources\[0\]=9 is", lambda: user.copy_blocks(blocks, {9: [1]})),
        (
            r"^blocks\.destinations\[1\]=1 is already blocks\.destinations\[0\]",
            lambda: user.copy_blocks(blocks, [(0, 1), (2, 1)]),
        ),
        (
            r"^src\.blocks\[1\]=8 is",
            lambda: user.run(Transfer(Rows(paged, [0, 8]), Rows(blocks, [1, 2]))),
        ),
        ("^dst.slot=4 is", lambda: user.run(Transfer(Rows(slot), Rows(slots, slot=4)))),
        (
            "^nbytes=257: .* from src.offset=0",
            lambda: user.submit(Transfer(Rows(slot), Rows(slots), nbytes=257)),
        ),
    ):
        with pytest.raises((TypeError, LLMException), match=text):
            call()


@pytest.mark.parametrize("verb", ["plan", "run", "submit", "layered"])
def test_a_destination_must_be_rows(user: LlmDataDist, verb: str) -> None:
    own = Rows(user.allocate_blocks_cache(BLOCKS), [0])
    other: Any
    for src in (own, Rows(CacheIndex(1, PAGED), [1])):
        for other in (own.cache, CacheIndex(1, PAGED), [own], None):
            with pytest.raises(TypeError, match="dst="):
                getattr(user, verb)(Transfer(src, other))
