"""`kvplan.plan`: the fields of a `Transfer`, the local side, and several caches in one transfer."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheIndex,
    DataType,
    KvCacheExtParam,
    Plan,
    RemoteCache,
    Rows,
    Shard,
    Transfer,
    reference,
)
from tests.planning.transfers import LOCALS, Example, transfers
from tests.support.refusals import refused

ROWS, TOKENS, TENSORS = 4, 4, 3
DESC = CacheDesc(TENSORS, (ROWS, TOKENS, 2), DataType.DT_INT8, kv_tensor_format="block token dim")
SLOTS = CacheDesc(TENSORS, (ROWS, 8), DataType.DT_INT8)
OWN = Cache(DESC, 3)
THERE = RemoteCache(CacheIndex(1, 7), DESC)
ELSEWHERE = RemoteCache(BlocksCacheKey(2, 5), DESC)


@pytest.mark.parametrize("value", [Rows, Transfer])
def test_a_signature_names_every_field(value: type) -> None:
    """`help` looks up the names of all annotations."""
    assert [*inspect.signature(value).parameters] == [*value.__struct_fields__]  # type: ignore[attr-defined]


@given(transfers())
def test_a_transfer_is_a_value(example: Example) -> None:
    again = msgspec.structs.replace(example.transfer)
    assert again == example.transfer
    with pytest.raises(AttributeError):
        again.nbytes = 1  # type: ignore[misc]


@given(st.lists(transfers(), min_size=1, max_size=4))
def test_a_mapping_is_planned_part_by_part(examples: list[Example]) -> None:
    local = examples[0].local
    parts = {
        str(number): example for number, example in enumerate(examples) if example.local == local
    }
    given = {
        name: msgspec.structs.replace(part.transfer, reinterpret=part.reinterpret)
        for name, part in parts.items()
    }
    plan = kvplan.plan(given, local=local)
    assert isinstance(plan, Plan)
    assert plan.local == local
    assert dict(plan.by_part()) == {name: part.plan() for name, part in parts.items()}
    assert plan.nbytes == sum(part.nbytes for part in parts.values())


def half(heads: range, layers: range = range(2)) -> CacheDesc:
    return CacheDesc(
        2 * len(layers),
        (ROWS, TOKENS, len(heads), 8),
        DataType.DT_FLOAT16,
        kv_tensor_format="NHD",
        shard=Shard(layers, heads, 2, 4),
    )


@given(st.permutations([range(1), range(1, 2), range(2, 4)]), st.booleans())
def test_a_gather_among_groups_is_named_by_both(heads: list[range], alone: bool) -> None:
    """The parts write each byte of the destination once, in any order of the sources."""
    gather = Transfer(
        [Rows(half(of), [number]) for number, of in enumerate(heads)], Rows(half(range(4)), [3])
    )
    if alone:
        plan = kvplan.plan(gather)
        names = [f"source {number}" for number in range(3)]
    else:
        other = Transfer(Rows(DESC, [1]), Rows(DESC, [2]))
        plan = kvplan.plan({"index": other, "kv": gather}, local="dst")
        names = ["index", *(f"kv: source {number}" for number in range(3))]
    assert isinstance(plan, Plan)
    assert [*plan.by_part()] == names
    assert plan.local == "dst"
    target = [np.zeros((ROWS, TOKENS, 4, 8), np.float16) for _ in range(4)]
    for number, of in enumerate(heads):
        part = plan.by_part()[names[number - 3]]
        held = [np.full((ROWS, TOKENS, len(of), 8), 1 + number, np.float16) for _ in range(4)]
        reference.execute(part, held, target)
    for tensor in target:
        for number, of in enumerate(heads):
            assert (tensor[3][:, of.start : of.stop] == 1 + number).all()
        assert not tensor[:3].any()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rank_chooses_among_replicas(rank: int) -> None:
    replicas = [Rows(half(range(4)), [number]) for number in range(3)]
    plan = kvplan.plan(Transfer(replicas, Rows(half(range(4)), [3]), rank=rank))
    assert isinstance(plan, Plan)
    assert [*plan.by_part()] == [f"source {rank}"]


LOCAL: dict[str, tuple[Any, Any, str, str]] = {
    "of a peer's": (THERE, OWN, "dst", "pull_blocks"),
    "to a peer's": (OWN, THERE, "src", "push_blocks"),
    "of none": (OWN, DESC, "both", "copy_blocks"),
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("local", [None, *LOCALS])
def test_the_local_side_is_the_one_that_is_not_remote(name: str, local: Any) -> None:
    src, dst, found, operation = LOCAL[name]
    transfer = Transfer(Rows(src, [0]), Rows(dst, [1]))
    if local in (None, found):
        plan = kvplan.plan(transfer, local=local)
        assert (plan.operation, plan.local) == (operation, found)
    elif found == "both":  # from two descriptions alone, the local side cannot be known
        assert kvplan.plan(transfer, local=local).local == local
    else:
        remote = "src" if src is THERE else "dst"
        with refused(
            "LLM_PARAM_INVALID",
            f"local='{local}' must be '{found}' or None: {remote} is a RemoteCache",
        ):
            kvplan.plan(transfer, local=local)


@pytest.mark.parametrize("local", ["remote", "", 1, ["dst"], True])
def test_a_side_that_does_not_exist_is_refused(local: Any) -> None:
    transfer = Transfer(Rows(DESC, [0]), Rows(DESC, [1]))
    for each in (transfer, {"a": transfer}, Transfer([Rows(DESC, [0])], Rows(DESC, [1]))):
        with refused("LLM_PARAM_INVALID", "local=.* must be 'src', 'dst', 'both' or None"):
            kvplan.plan(each, local=local)


@pytest.mark.parametrize("local", [None, *LOCALS])
def test_two_peers_are_refused(local: Any) -> None:
    for dst in (THERE, ELSEWHERE):
        with refused("LLM_PARAM_INVALID", "src and dst are both remote"):
            kvplan.plan(Transfer(Rows(THERE, [0]), Rows(dst, [1])), local=local)


def test_a_gather_pulls() -> None:
    sources = [Rows(half(range(4)), [0])]
    for local in ("src", "both"):
        with refused("LLM_PARAM_INVALID", f"local='{local}' of a gather must be 'dst' or None"):
            kvplan.plan(Transfer(sources, Rows(half(range(4)), [1])), local=local)
    there = RemoteCache(CacheIndex(1, 7), half(range(4)))
    with refused("LLM_PARAM_INVALID", "dst=.*cache_id=7.* is remote; a gather writes a cache of"):
        kvplan.plan(Transfer(sources, Rows(there, [1])))
    pulled = kvplan.plan(Transfer([Rows(there, [0])], Rows(half(range(4)), [1])), local="dst")
    assert [record.operation for record in pulled.by_part().values()] == ["pull_blocks"]


TO_BLOCKS = Transfer(Rows(DESC, [0]), Rows(DESC, [1]))
GATHER = Transfer([Rows(DESC, [0])], Rows(DESC, [1]))
TO_A_SLOT = Transfer(Rows(SLOTS), Rows(SLOTS, slot=1))


@pytest.mark.parametrize(
    ("transfer", "changes", "error"),
    [
        (TO_BLOCKS, {"rank": 0}, "rank=0 must be None: only a gather has several sources"),
        (TO_A_SLOT, {"rank": 1}, "rank=1 must be None: only a gather has several sources"),
        (TO_BLOCKS, {"nbytes": 8}, "nbytes=8 must be None: blocks are cut by num_tokens"),
        (TO_BLOCKS, {"nbytes": 0}, "nbytes=0 must be None: blocks are cut by num_tokens"),
        (
            TO_BLOCKS,
            {"src": Rows(DESC, [0], offset=4)},
            "src.offset=4 must be 0: blocks are cut by num_tokens",
        ),
        (
            TO_BLOCKS,
            {"dst": Rows(DESC, [1], offset=1)},
            "dst.offset=1 must be 0: blocks are cut by num_tokens",
        ),
        (
            TO_BLOCKS,
            {"src": Rows(SLOTS, offset=4)},
            "src.offset=4 must be 0: blocks are cut by num_tokens",
        ),
        (TO_A_SLOT, {"src": Rows(SLOTS, [1])}, r"src.blocks=\[1\] go to blocks; dst.blocks must"),
        (
            TO_A_SLOT,
            {"src": Rows(SLOTS, first_token=1)},
            "src.first_token=1 and dst.first_token=0 skip tokens of block tables",
        ),
        (
            TO_A_SLOT,
            {"dst": Rows(SLOTS, slot=1, first_token=2)},
            "src.first_token=0 and dst.first_token=2 skip tokens of block tables",
        ),
    ],
)
def test_fields_of_another_kind_of_transfer_are_refused(
    transfer: Transfer, changes: dict[str, Any], error: str
) -> None:
    wrong = msgspec.structs.replace(transfer, **changes)
    for local in LOCALS:
        with refused("LLM_PARAM_INVALID", error):
            kvplan.plan(wrong, local=local)
    with refused("LLM_PARAM_INVALID", f"part a: {error}"):
        kvplan.plan({"b": transfer, "a": wrong})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "transfer is empty; it must name at least one Transfer"),
        ({"": TO_BLOCKS}, "name '' must have 1 to"),
        ({"a" * 65: TO_BLOCKS}, "must have 1 to 64 printable characters"),
        ({"a": Transfer(Rows(THERE, [0]), Rows(DESC, [1])), "b": TO_BLOCKS}, "one direction"),
    ],
)
def test_a_wrong_mapping_is_refused(given: Any, error: str) -> None:
    with refused("LLM_PARAM_INVALID", error):
        kvplan.plan(given)


@pytest.mark.parametrize(
    "given",
    [None, DESC, [TO_BLOCKS], {"a": Rows(DESC, [0])}, {"a": {"b": TO_BLOCKS}}, {1: TO_BLOCKS}],
)
def test_a_value_that_is_not_a_transfer_is_refused(given: Any) -> None:
    with pytest.raises(TypeError):
        kvplan.plan(given)


@pytest.mark.parametrize(
    ("transfer", "error"),
    [
        (Transfer(DESC, Rows(DESC, [0])), "src="),  # type: ignore[arg-type]
        (Transfer(Rows(DESC, [0]), DESC), "dst="),  # type: ignore[arg-type]
        (Transfer([DESC], Rows(DESC, [0])), r"src\[0\]="),  # type: ignore[list-item]
        (Transfer(Rows(CacheIndex(1, 7), [0]), Rows(DESC, [0])), "LlmDataDist.plan takes keys"),
        (Transfer([Rows("x", [0])], Rows(DESC, [0])), r"src\[0\]='x' must be"),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_is_not_rows_is_named(transfer: Transfer, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        kvplan.plan(transfer)


@pytest.mark.parametrize("transfer", [TO_BLOCKS, GATHER], ids=["pair", "gather"])
@pytest.mark.parametrize("flag", ["x", 1, None, np.True_], ids=repr)
def test_a_flag_that_is_not_a_bool_is_refused(transfer: Transfer, flag: Any) -> None:
    with pytest.raises(TypeError, match=f"reinterpret={flag!r} must be (builtins.)?bool, not"):
        kvplan.plan(msgspec.structs.replace(transfer, reinterpret=flag))
    with pytest.raises(TypeError, match=f"by_layer={flag!r} must be (builtins.)?bool, not"):
        kvplan.plan(transfer, by_layer=flag)


def is_order_free(src: Rows, dst: Rows, tensors: list[tuple[int, int]], moved: int) -> bool:
    """Return True if a copy inside one cache has the same result in any order of elements."""
    copies = []
    for src_tensor, dst_tensor in tensors:
        for number in range(moved):
            src_block, src_token = divmod(src.first_token + number, TOKENS)
            dst_block, dst_token = divmod(dst.first_token + number, TOKENS)
            copies.append(
                (
                    (src_tensor, src.blocks[src_block], src_token),  # type: ignore[index]
                    (dst_tensor, dst.blocks[dst_block], dst_token),  # type: ignore[index]
                )
            )
    written = {to for item, to in copies if item != to}
    return not any(item in written for item, _ in copies)


caches = st.sampled_from([(OWN, OWN), (OWN, Cache(DESC, 3))])
blocks = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True)


@given(
    caches, blocks, blocks, st.integers(0, 3), st.integers(0, 3),
    st.integers(1 - TENSORS, TENSORS - 1), st.data(),
)  # fmt: skip
def test_a_copy_inside_one_cache_is_refused_if_its_order_matters_and_only_then(
    cache: tuple[Any, Any],
    read: list[int],
    written: list[int],
    src_token: int,
    dst_token: int,
    shift: int,
    data: st.DataObject,
) -> None:
    room = min(TOKENS * len(read) - src_token, TOKENS * len(written) - dst_token)
    moved = data.draw(st.integers(1, room))
    read = read[: -(-(src_token + moved) // TOKENS)]
    written = written[: -(-(dst_token + moved) // TOKENS)]
    src = Rows(cache[0], read, first_token=src_token)
    dst = Rows(cache[1], written, first_token=dst_token)
    count = data.draw(st.integers(1, TENSORS - abs(shift)))  # also ranges that only touch
    first, to = max(-shift, 0), max(shift, 0)  # to later layers, or to earlier ones
    layers = KvCacheExtParam(range(first, first + count), range(to, to + count), 1)
    pairs = [(first + index, to + index) for index in range(count)]
    transfer = Transfer(src, dst, num_tokens=moved, layers=layers)
    if is_order_free(src, dst, pairs, moved):
        plan = kvplan.plan(transfer)
        assert isinstance(plan, Plan)
        assert plan.nbytes == len(pairs) * moved * 2
    else:
        with refused("LLM_PARAM_INVALID", "is both read and written by this copy inside one cache"):
            kvplan.plan(transfer)
    # A pull, or a copy to a cache with another id, is accepted.
    assert kvplan.plan(transfer, local="dst").nbytes
    other = msgspec.structs.replace(
        transfer, dst=msgspec.structs.replace(dst, cache=Cache(DESC, 4))
    )
    assert kvplan.plan(other).nbytes


@given(st.integers(0, 7), st.integers(0, 7), st.integers(1, 8), st.integers(0, ROWS - 1))
def test_a_slot_is_not_copied_over_bytes_that_are_read(
    at: int, to: int, nbytes: int, slot: int
) -> None:
    nbytes = min(nbytes, 8 - at, 8 - to)
    transfer = Transfer(
        Rows(Cache(SLOTS, 1), slot=slot, offset=at),
        Rows(Cache(SLOTS, 1), slot=slot, offset=to),
        nbytes=nbytes,
    )
    if at == to or abs(at - to) >= nbytes:
        assert kvplan.plan(transfer).nbytes == TENSORS * nbytes
    else:
        with refused("LLM_PARAM_INVALID", f"slot {slot} is both read and written"):
            kvplan.plan(transfer)
