"""Mistakes of callers, and values of other libraries: accepted, or refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import (
    BlocksCacheKey,
    CacheDesc,
    CacheIndex,
    CacheKey,
    DataType,
    KvCacheExtParam,
    LLMException,
    LLMStatusCode,
    Placement,
    Plan,
    Rows,
    Transfer,
)
from kvplan.planning.blocks import pair_tables


class Tensor:
    """The methods of a torch tensor: not a Sequence, and each element is a tensor."""

    def __init__(self, values: Any, device: str = "cpu") -> None:
        self._values = np.asarray(values)
        self._device = device

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self._device != "cpu":
            raise TypeError(f"can't convert {self._device} device type tensor to numpy")
        return self._values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Tensor:
        return Tensor(self._values[index])

    def __index__(self) -> int:
        return int(self._values)


def blocks(placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(4, (8, 16, 2, 4), DataType.DT_FLOAT16, placement, kv_tensor_format="NHD")


NHD, HOST = blocks(), blocks(Placement.HOST)
NUMBERS = [np.int64, np.uint32, Tensor]

Made = Callable[[Any], object]
TAKEN: dict[str, Made] = {
    "description": lambda n: CacheDesc(n(4), (n(8), 16), DataType.DT_INT8, batch_dim_index=n(0)),
    "key": lambda n: CacheKey(n(1), n(2), n(3)),
    "key of blocks": lambda n: BlocksCacheKey(n(1), n(2)),
    "index": lambda n: CacheIndex(n(1), n(2), n(3)),
    "tokens": lambda n: kvplan.plan(
        Transfer(
            Rows(NHD, [1], first_token=n(2)), Rows(NHD, [2], first_token=n(0)), num_tokens=n(5)
        ),
        local="dst",
    ),
    "slot": lambda n: kvplan.plan(
        Transfer(Rows(NHD, slot=n(1)), Rows(NHD, slot=n(2))), local="dst"
    ),
    "bytes": lambda n: kvplan.plan(
        Transfer(Rows(NHD, offset=n(2)), Rows(NHD, offset=n(0)), nbytes=n(8)), local="dst"
    ),
    "layers": lambda n: kvplan.plan(
        Transfer(
            Rows(NHD, [1]), Rows(NHD, [2]), layers=KvCacheExtParam((n(0), n(0)), (n(1), n(1)), n(2))
        ),
        local="dst",
    ),
    "block tables": lambda n: kvplan.plan(
        Transfer(Rows(NHD, [n(1), n(2)]), Rows(NHD, (n(3), n(4)))), local="dst"
    ),
}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", TAKEN)
def test_an_index_of_another_type_is_accepted_as_an_int(name: str, number: Any) -> None:
    """The value keeps no object of NumPy or of a tensor library."""
    made, wanted = TAKEN[name](number), TAKEN[name](int)
    assert made == wanted
    assert repr(made) == repr(wanted)
    if isinstance(made, Plan):
        assert made.to_dict() == wanted.to_dict()  # type: ignore[attr-defined]


SLOT, BLOCK = Rows(NHD, slot=1), Rows(NHD, [2])
# Each transfer has one number, so that only this number can be the reason of an error.
ALONE: dict[str, tuple[Callable[[Any], Transfer], bool]] = {
    "src.first_token": (lambda n: Transfer(Rows(NHD, [1], first_token=n), BLOCK), False),
    "dst.first_token": (lambda n: Transfer(BLOCK, Rows(NHD, [1], first_token=n)), False),
    "src.offset": (lambda n: Transfer(Rows(NHD, offset=n), SLOT, num_tokens=5), False),
    "dst.offset": (lambda n: Transfer(SLOT, Rows(NHD, offset=n), num_tokens=5), False),
    "nbytes": (lambda n: Transfer(SLOT, SLOT, nbytes=n), True),
    "num_tokens": (lambda n: Transfer(BLOCK, BLOCK, num_tokens=n), True),
    "src.slot": (lambda n: Transfer(Rows(NHD, slot=n), BLOCK), True),
    "dst.slot": (lambda n: Transfer(SLOT, Rows(NHD, slot=n)), True),
    "rank": (lambda n: Transfer([BLOCK], BLOCK, rank=n), True),
}


@pytest.mark.parametrize("wrong", [1.0, 0.0, True, False, "1", None, np.float64(1), np.True_])
def test_a_value_that_is_not_an_index_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"cluster_id=.* must be int"):
        CacheKey(wrong)
    for name, (made, may_lack) in ALONE.items():
        if wrong is None and may_lack:
            continue
        with pytest.raises(TypeError, match=rf"{name}=.* must be int"):
            kvplan.plan(made(wrong), local="dst")


@pytest.mark.parametrize("wrong", [-1, 2**63])
@pytest.mark.parametrize("name", ["src.first_token", "dst.first_token", "num_tokens", "rank"])
def test_a_number_out_of_its_type_is_refused_with_its_name(name: str, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}={wrong} is out of range"):
        kvplan.plan(ALONE[name][0](wrong), local="dst")


MAPPINGS = [
    {0: [1, 2], 3: [4]},
    {0: np.array([1, 2]), 3: 4},
    [(0, 1), (0, 2), (3, 4)],
    ([0, 1], [0, 2], [3, 4]),
    np.array([[0, 1], [0, 2], [3, 4]]),
    Tensor([[0, 1], [0, 2], [3, 4]]),
]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_mappings_pairs_and_tensors_are_two_tables(mapping: Any) -> None:
    assert pair_tables("blocks", mapping) == ([0, 0, 3], [1, 2, 4])


def test_a_tensor_is_a_block_table() -> None:
    wanted = kvplan.plan(Transfer(Rows(NHD, [1, 2]), Rows(NHD, [3, 4])), local="dst")
    of_tensors = Transfer(Rows(NHD, Tensor([1, 2])), Rows(NHD, Tensor([3, 4])))
    assert kvplan.plan(of_tensors, local="dst") == wanted


class Unfinished:
    """A tensor of a library that raises an error of its own."""

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("not computed yet")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a block for each source": (
        lambda: kvplan.plan(Transfer([Rows(NHD, 1)], Rows(NHD, [2]))),
        r"src\[0\].blocks=1 must be a block table, .* such as \[1\]",
    ),
    "a block of NumPy for each source": (
        lambda: kvplan.plan(Transfer([Rows(NHD, np.int64(1))], Rows(NHD, [2]))),  # type: ignore[arg-type]
        r"src\[0\].blocks=1 must be a block table, .* such as \[1\]",
    ),
    "a block for pairs": (
        lambda: pair_tables("blocks", 5),
        "blocks=5 must be a mapping, or pairs of a source and a destination block, not int",
    ),
    "a flat list of pairs": (
        lambda: pair_tables("blocks", [0, 1]),
        r"blocks\[0\]=0 must be a pair of a source and a destination block",
    ),
    "three columns": (
        lambda: pair_tables("src_to_dst", np.zeros((2, 3), int)),
        r"src_to_dst of shape \(2, 3\) and int64 must have two columns",
    ),
    "a tensor on a device": (
        lambda: kvplan.plan(
            Transfer(Rows(NHD, Tensor([1], "cuda:0")), Rows(NHD, [2])), local="dst"
        ),  # type: ignore[arg-type]
        "src.blocks is a Tensor that cannot be read as an array .* a list: .* cuda:0 device type",
    ),
    "a tensor that is not computed yet": (
        lambda: kvplan.plan(Transfer(Rows(NHD, Unfinished()), Rows(NHD, [2])), local="dst"),  # type: ignore[arg-type]
        "src.blocks is a Unfinished that cannot be read as an array .*: not computed yet",
    ),
    "a set": (
        lambda: kvplan.plan(Transfer(Rows(NHD, {1}), Rows(NHD, [2])), local="dst"),
        "must be a sequence of int, not set",
    ),  # type: ignore[arg-type]
    "numbers that are not int": (
        lambda: kvplan.plan(Transfer(Rows(NHD, Tensor([1.5])), Rows(NHD, [2])), local="dst"),  # type: ignore[arg-type]
        "src.blocks must hold integers, not float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_with_the_remedy(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(TypeError, match=text):
        call()


def test_an_error_names_its_status_once() -> None:
    first = LLMException("it is late", status_code=LLMStatusCode.LLM_TIMEOUT)
    again = LLMException(f"pull: {first}", status_code=LLMStatusCode.LLM_TIMEOUT)
    assert str(again) == "pull: it is late (LLM_TIMEOUT)"
    other = LLMException(f"pull: {first}", status_code=LLMStatusCode.LLM_FAILED)
    assert str(other) == "pull: it is late (LLM_TIMEOUT) (LLM_FAILED)"
