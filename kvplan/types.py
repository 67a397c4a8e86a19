"""Frozen values that describe caches and transfers.

Names and fields are those of the C++ and Python interface of LLM-DataDist; kvplan adds some fields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvplan.layout import CacheLayout, Shard, check_shard, layout_of
from kvplan.status import invalid
from kvplan.validation import (
    INT64_MAX,
    UINT32_MAX,
    UINT64_MAX,
    as_int,
    check_index,
    check_type,
    check_width,
    is_unicode,
    shown,
    take_ints,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_ID = UINT64_MAX
"""Id that means "no request" or "no prefix"."""

MAX_DIMS = 32
MAX_FORMAT = 256
"""Maximum characters of a kv_tensor_format."""

DEFAULT_TENSORS_PER_LAYER = 2


class _Named(IntEnum):
    """An enum that prints as in LLM-DataDist: with its class, without its number."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class LlmRole(_Named):
    """The role of a cluster; a label that does not influence transfers."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


class Placement(_Named):
    """The place of a cache."""

    HOST = 0
    DEVICE = 1


class DataType(_Named):
    """Types of elements, with the numbers of LLM-DataDist."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_DUAL_SUB_INT8 = 14
    DT_DUAL_SUB_UINT8 = 15
    DT_COMPLEX64 = 16
    DT_COMPLEX128 = 17
    DT_QINT8 = 18
    DT_QINT16 = 19
    DT_QINT32 = 20
    DT_QUINT8 = 21
    DT_QUINT16 = 22
    DT_RESOURCE = 23
    DT_STRING_REF = 24
    DT_DUAL = 25
    DT_VARIANT = 26
    DT_BF16 = 27
    DT_UNDEFINED = 28
    DT_INT4 = 29
    DT_UINT1 = 30
    DT_INT2 = 31
    DT_UINT2 = 32
    DT_COMPLEX32 = 33
    DT_HIFLOAT8 = 34
    DT_FLOAT8_E5M2 = 35
    DT_FLOAT8_E4M3FN = 36
    DT_FLOAT8_E8M0 = 37
    DT_FLOAT6_E3M2 = 38
    DT_FLOAT6_E2M3 = 39
    DT_FLOAT4_E2M1 = 40
    DT_FLOAT4_E1M2 = 41

    @property
    def bits(self) -> int:
        """Bits of one element; sub-byte types are packed.

        Raises:
            LLMException: LLM_PARAM_INVALID: a type whose elements have no fixed width (strings,
                resources, DT_UNDEFINED).
        """
        if (bits := _BITS.get(self)) is None:
            raise invalid(f"data_type={self.name} has no fixed width; a KV cache needs one")
        return bits


_BITS: dict[int, int] = {
    data_type: bits
    for bits, names in {
        1: "UINT1",
        2: "INT2 UINT2",
        4: "INT4 FLOAT4_E2M1 FLOAT4_E1M2",
        6: "FLOAT6_E3M2 FLOAT6_E2M3",
        8: "INT8 UINT8 BOOL DUAL_SUB_INT8 DUAL_SUB_UINT8 QINT8 QUINT8 HIFLOAT8 FLOAT8_E5M2 "
        "FLOAT8_E4M3FN FLOAT8_E8M0",
        16: "FLOAT16 BF16 INT16 UINT16 QINT16 QUINT16",
        32: "FLOAT INT32 UINT32 QINT32 COMPLEX32",
        64: "DOUBLE INT64 UINT64 COMPLEX64",
        128: "COMPLEX128",
    }.items()
    for data_type in (DataType[f"DT_{name}"] for name in names.split())
}


@dataclass(frozen=True, slots=True)
class CacheDesc:
    """The shape of a cache: `num_tensors` tensors of equal `shape` and `data_type`.

    `shape[batch_dim_index]` counts slots (contiguous cache) or blocks (paged cache); the dimensions
    after it are one row. Without a layout, dimensions before it must be 1, so that a row is
    contiguous.

    Args:
        num_tensors: number of tensors; two for each layer if keys and values are apart.
        shape: shape of each tensor.
        data_type: type of its elements.
        placement: the place of the tensors: DEVICE or HOST.
        batch_dim_index: the dimension that counts slots or blocks.
        seq_len_dim_index: the dimension that counts tokens; -1: unknown.
        kv_tensor_format: meaning of the dimensions, outermost first, as for `CacheLayout` ("block
            head token dim", or "HND"); it determines both indices above. "opaque NAME" names a
            layout that kvplan does not know, and that is only compared with the other side. None:
            unknown.
        shard: the part of the model that the cache holds; None: all of it, or unknown.
        row_stride: bytes from the start of one slot or block to the next, if other bytes lie
            between, such as the same block of other layers. Transfers neither read nor write those
            bytes. None: rows touch; a stride that is the size of a row becomes None.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: num_tensors outside uint32, or a dimension or row_stride outside int64.
        LLMException: LLM_PARAM_INVALID: no tensors; an empty or too long shape; a dimension
            below 1; a data type without a fixed width; a format that is not a layout of these
            dimensions, or is too long; an index outside the shape; a row that is not contiguous or
            not whole bytes; a row_stride below the size of a row; tensors too large to address; a
            shard that does not fit the shape, or has heads or tokens that the layout lacks.
    """

    num_tensors: int
    shape: tuple[int, ...]
    data_type: DataType
    placement: Placement = Placement.DEVICE
    batch_dim_index: int = 0
    seq_len_dim_index: int = -1
    kv_tensor_format: str | None = None
    shard: Shard | None = None
    row_stride: int | None = None

    def __post_init__(self) -> None:
        take_ints(self, "num_tensors", "batch_dim_index", "seq_len_dim_index")
        if check_width("num_tensors", self.num_tensors, 0, UINT32_MAX) == 0:
            raise invalid("num_tensors=0 is out of range [1, 2**32)")
        if not isinstance(self.shape, tuple | list):
            raise TypeError(f"shape={shown(self.shape)} must be a tuple or list of int")
        # Many callers pass a list; a frozen value holds a tuple.
        shape = [
            length if type(length) is int else as_int(f"shape[{dim}]", length)
            for dim, length in enumerate(self.shape)
        ]
        object.__setattr__(self, "shape", tuple(shape))
        for dim, length in enumerate(self.shape):
            if check_width(f"shape[{dim}]", length, -(2**63), INT64_MAX) < 1:
                raise invalid(f"shape[{dim}]={length} is out of range [1, 2**63)")
        check_type("data_type", self.data_type, DataType)
        check_type("placement", self.placement, Placement)
        if self.kv_tensor_format is not None:
            _check_format(check_type("kv_tensor_format", self.kv_tensor_format, str))
        dims = len(self.shape)
        if not 1 <= dims <= MAX_DIMS:
            raise invalid(
                f"shape={shown(self.shape)} has {dims} dimensions; allowed are [1, {MAX_DIMS}]"
            )
        check_index("batch_dim_index", self.batch_dim_index, dims)
        if (layout := self.layout) is not None:
            self._take_layout(layout)
        if not -1 <= check_type("seq_len_dim_index", self.seq_len_dim_index, int) < dims:
            raise invalid(
                f"seq_len_dim_index={self.seq_len_dim_index} must be -1 or in range [0, {dims})"
            )
        if layout is None and any(length != 1 for length in self.shape[: self.batch_dim_index]):
            raise invalid(
                f"batch_dim_index={self.batch_dim_index} of shape={self.shape}: a row would not be "
                "contiguous; every dimension before it must be 1"
            )
        if self.row_bits % 8:
            raise invalid(
                f"shape={self.shape} of {self.data_type.name}: a row of {self.row_bits} bits is "
                "not whole bytes"
            )
        if self.row_stride is not None:
            self._take_row_stride(self.row_stride)
        if self.tensor_nbytes > INT64_MAX:
            raise invalid(
                f"shape={self.shape} of {self.data_type.name}: {self.tensor_nbytes} bytes a tensor "
                f"is out of range [1, {INT64_MAX}]"
            )
        if self.shard is not None:
            check_type("shard", self.shard, Shard)
            check_shard(self.shard, self.num_tensors, self.shape, layout, self.kv_tensor_format)

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Any],
        layout: CacheLayout | str | None,
        *,
        data_type: DataType | None = None,
        placement: Placement | None = None,
        shard: Shard | None = None,
    ) -> CacheDesc:
        """Describe tensors as they lie in memory; nothing is copied.

        A permuted view is described in the order of its strides: if the heads of (block, token,
        head, dim) lie outside the tokens, the description says `block head token dim`.

        Args:
            tensors: tensors of one shape and type, of the host or of a device: NumPy, torch,
                DLPack, the CUDA array interface, or the buffer protocol.
            layout: the dimensions of each tensor, in its own order, as for `CacheLayout`; None:
                unknown, and rows are opaque.
            data_type: type of the elements if it is not that of the tensors, such as DT_BF16 of an
                array of uint16.
            placement: None: HOST for host memory, DEVICE for any other.
            shard: the part of the model that the tensors hold.

        Raises:
            TypeError: an argument of the wrong type, or an element that is not a tensor.
            LLMException: LLM_PARAM_INVALID: no tensors, other dimensions than the layout has,
                tensors that are not alike or not of a DataType, a row with a gap, an overlap; see
                also the constructor.
        """
        # Loaded here, because planning does not need it.
        module = import_module("kvplan.tensors.description")
        described: CacheDesc = module.describe(tensors, layout, data_type, placement, shard)
        return described

    def _take_row_stride(self, given: int) -> None:
        """Refuse a stride at which rows would overlap; keep None if rows touch."""
        stride = check_width("row_stride", as_int("row_stride", given), -(2**63), INT64_MAX)
        if stride < self.row_nbytes:
            raise invalid(
                f"row_stride={stride} is out of range [{self.row_nbytes}, {INT64_MAX}]: a row of "
                f"shape={self.shape} and {self.data_type.name} has {self.row_nbytes} bytes"
            )
        object.__setattr__(self, "row_stride", None if stride == self.row_nbytes else stride)

    def _take_layout(self, layout: CacheLayout) -> None:
        """Take the dimensions of rows and tokens from the layout; refuse others."""
        tokens = layout.axes.index("token") if "token" in layout.axes else -1
        for name, given, unset, known in (
            ("batch_dim_index", self.batch_dim_index, 0, layout.row_axis),
            ("seq_len_dim_index", self.seq_len_dim_index, -1, tokens),
        ):
            if given not in (unset, known):
                raise invalid(
                    f"{name}={given} must be {known} with "
                    f"kv_tensor_format={shown(self.kv_tensor_format)}, which is {layout}"
                )
            object.__setattr__(self, name, known)
        if "kv" in layout.axes and self.shape[layout.axes.index("kv")] not in (1, 2):
            raise invalid(
                f"shape={self.shape} of {layout}: kv must be 2 (keys and values) or 1, not "
                f"{self.shape[layout.axes.index('kv')]}"
            )

    @property
    def layout(self) -> CacheLayout | None:
        """Meaning of the dimensions; None: unknown, rows are opaque."""
        return layout_of(self.kv_tensor_format, len(self.shape))

    @property
    def batch_size(self) -> int:
        """Number of slots (contiguous) or blocks (paged)."""
        return self.shape[self.batch_dim_index]

    @property
    def row_bits(self) -> int:
        """Bits of one slot or block."""
        return math.prod(self.shape[self.batch_dim_index + 1 :]) * self.data_type.bits

    @property
    def row_nbytes(self) -> int:
        """Contiguous bytes of one slot or block; all of its bytes if no dimension precedes it."""
        return self.row_bits // 8

    @property
    def stride(self) -> int:
        """Bytes from one slot or block to the next."""
        return self.row_nbytes if self.row_stride is None else self.row_stride

    @property
    def rows_nbytes(self) -> int:
        """Bytes of all rows of one tensor, without gaps between them."""
        return math.prod(self.shape) * self.data_type.bits // 8

    @property
    def tensor_nbytes(self) -> int:
        """Bytes from the first byte of a tensor to its last, including gaps between its rows."""
        rows = math.prod(self.shape[: self.batch_dim_index + 1])
        return (rows - 1) * self.stride + self.row_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.num_tensors * self.tensor_nbytes


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Key of a slot by the request (or the prefix) whose KV it holds.

    Attributes:
        cluster_id: cluster of the engine that has the slot; not used to make a cache.
        req_id: the request; NO_ID (2**64 - 1): none.
        model_id: the model, if one engine serves several.
        prefix_id: the prefix; NO_ID: none. When a cache is made, a key with neither skips a slot.
    """

    cluster_id: int
    req_id: int = NO_ID
    model_id: int = 0
    prefix_id: int = NO_ID

    def __post_init__(self) -> None:
        take_ints(self, "cluster_id", "req_id", "model_id", "prefix_id")
        for name in ("cluster_id", "req_id", "model_id", "prefix_id"):
            check_width(name, getattr(self, name), 0, UINT64_MAX)

    def __repr__(self) -> str:
        request = "" if self.req_id == NO_ID else f"req_id={self.req_id}, "
        prefix = "" if self.prefix_id == NO_ID else f", prefix_id={self.prefix_id}"
        return f"CacheKey(cluster_id={self.cluster_id}, {request}model_id={self.model_id}{prefix})"


@dataclass(frozen=True, slots=True)
class BlocksCacheKey:
    """Key of the paged cache of a model in a cluster.

    Attributes:
        cluster_id: cluster of the engine that has the cache; not used to make a cache.
        model_id: the model; an engine has one paged cache with a key for each model.
    """

    cluster_id: int
    model_id: int = 0

    def __post_init__(self) -> None:
        take_ints(self, "cluster_id", "model_id")
        for name in ("cluster_id", "model_id"):
            check_width(name, getattr(self, name), 0, UINT64_MAX)


@dataclass(frozen=True, slots=True)
class CacheKeyByIdAndIndex:
    """Key of a slot by cache id and batch index.

    Attributes:
        cluster_id: cluster of the engine that has the cache.
        cache_id: id of the cache in that engine.
        batch_index: the slot; not used for a paged cache.
    """

    cluster_id: int
    cache_id: int
    batch_index: int = 0

    def __post_init__(self) -> None:
        take_ints(self, "cluster_id", "cache_id", "batch_index")
        check_width("cluster_id", self.cluster_id, 0, UINT64_MAX)
        check_width("cache_id", self.cache_id, -(2**63), INT64_MAX)
        check_width("batch_index", self.batch_index, 0, UINT32_MAX)


CacheIndex = CacheKeyByIdAndIndex
"""The name of the same key in the C++ interface."""


AnyCacheKey = CacheKey | BlocksCacheKey | CacheKeyByIdAndIndex


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache of this process.

    Attributes:
        cache_desc: its description.
        cache_id: its id in the engine of this process; -1: none, the addresses identify the cache.
        tensor_addrs: the address of each tensor; empty: not given.
        owner: token of the engine that made the cache; empty: made by hand.
    """

    cache_desc: CacheDesc
    cache_id: int = -1
    tensor_addrs: tuple[int, ...] = ()
    owner: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        check_type("cache_desc", self.cache_desc, CacheDesc)
        check_width("cache_id", self.cache_id, -1, INT64_MAX)
        check_type("owner", self.owner, bytes)
        if not isinstance(self.tensor_addrs, tuple | list):
            raise TypeError(
                f"tensor_addrs={shown(self.tensor_addrs)} must be a tuple or list of int"
            )
        object.__setattr__(self, "tensor_addrs", tuple(self.tensor_addrs))
        for position, address in enumerate(self.tensor_addrs):
            check_width(f"tensor_addrs[{position}]", address, 1, UINT64_MAX)
        if self.tensor_addrs and len(self.tensor_addrs) != self.cache_desc.num_tensors:
            raise invalid(
                f"tensor_addrs has {len(self.tensor_addrs)} addresses; "
                f"num_tensors={self.cache_desc.num_tensors} are needed"
            )


@dataclass(frozen=True, slots=True)
class RemoteCache:
    """A cache of another cluster, as its owner describes it.

    Attributes:
        key: its key for this engine.
        cache_desc: its description.
    """

    key: AnyCacheKey
    cache_desc: CacheDesc

    def __post_init__(self) -> None:
        if not isinstance(self.key, AnyCacheKey):
            raise TypeError(f"key={shown(self.key)} must be one of the three cache keys")
        check_type("cache_desc", self.cache_desc, CacheDesc)


LayerRange = range | tuple[int, int] | None
"""Layers: a `range` of step 1, or as in C++ (first, last), both included. None, (-1, -1): all."""


@dataclass(frozen=True, slots=True)
class KvCacheExtParam:
    """Pairs of layers of a transfer. A layer is `tensor_num_per_layer` consecutive tensors (K, V).

    Attributes:
        src_layer_range: layers of the source; a `LayerRange`.
        dst_layer_range: equally many layers of the destination.
        tensor_num_per_layer: tensors of one layer, a divisor of the number of tensors. None: as the
            layout or shard says, else 2; 1 for one tensor, and for an odd number without ranges.
    """

    src_layer_range: LayerRange = None
    dst_layer_range: LayerRange = None
    tensor_num_per_layer: int | None = None


def _check_format(text: str) -> None:
    if len(text) > MAX_FORMAT:
        raise invalid(
            f"kv_tensor_format has {len(text)} characters; at most {MAX_FORMAT} are allowed"
        )
    if not is_unicode(text):
        raise invalid(f"kv_tensor_format={shown(text)} is not Unicode text")
