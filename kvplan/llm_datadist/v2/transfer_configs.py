"""What `CacheManager.transfer_cache_async` takes: destinations, and who tells of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvplan.llm_datadist.fields import Checked, checked_by
from kvplan.llm_datadist.utils.utils import (
    check_isinstance,
    check_list_uint64,
    check_uint32,
    check_uint64,
)
from kvplan.llm_datadist.v2.cache_keys import BlocksCacheKey, CacheKeyByIdAndIndex
from kvplan.status import invalid

DestinationKey = BlocksCacheKey | CacheKeyByIdAndIndex


class LayerSynchronizer(ABC):
    """Tells when the layers of a cache are computed; to be subclassed."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until a layer holds its final values.

        Args:
            layer_index: which.
            timeout_in_millis: milliseconds that it may take; None: as long as it takes.

        Returns:
            Whether it does.
        """


def check_layer_range(name: str, layer_range: range | None, allow_none: bool = True) -> None:
    """Refuse what is no range of layers.

    Raises:
        TypeError: another type.
        LLMException: LLM_PARAM_INVALID: a step other than 1, no layer, or a negative one.
    """
    check_isinstance(name, layer_range, range, allow_none=allow_none)
    if layer_range is not None and (
        layer_range.step != 1 or not 0 <= layer_range.start < layer_range.stop
    ):
        raise invalid(f"{name}={layer_range} must be range(first, end) of step 1, 0 <= first < end")


def _checked_layers(name: str, layer_range: range | None) -> range | None:
    check_layer_range(name, layer_range)
    return layer_range


def _checked_addrs(name: str, addrs: list[int] | tuple[int, ...]) -> list[int] | tuple[int, ...]:
    check_isinstance(name, addrs, [list, tuple], int, allow_none=False)
    check_list_uint64(name, addrs)
    return addrs


def _checked_key(name: str, key: DestinationKey) -> DestinationKey:
    return check_isinstance(name, key, [BlocksCacheKey, CacheKeyByIdAndIndex])


class TransferConfig:
    """A destination by its addresses.

    Args:
        dst_cluster_id: of the peer.
        dst_addrs: there, one for each tensor of `src_layer_range`, two tensors a layer.
        src_layer_range: layers here; None: all.
        src_batch_index: slot here.

    Raises:
        TypeError, ValueError: an argument of another type or width.
        LLMException: LLM_PARAM_INVALID: a step other than 1, no layer, or a negative one.

    Attributes:
        dst_layer_range: None.
    """

    dst_cluster_id = Checked[int](checked_by(check_uint64), "Of the peer.")
    dst_addrs = Checked[list[int] | tuple[int, ...]](_checked_addrs, "An address for each tensor.")
    src_layer_range = Checked[range | None](_checked_layers, "Layers here; None: all.")
    src_batch_index = Checked[int](checked_by(check_uint32), "Slot here.")

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: list[int] | tuple[int, ...],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range: range | None = None

    def __repr__(self) -> str:
        return (
            f"TransferConfig(dst_cluster_id={self.dst_cluster_id}, dst_addrs={self.dst_addrs}, "
            f"src_layer_range={self.src_layer_range}, src_batch_index={self.src_batch_index})"
        )


class TransferWithCacheKeyConfig:
    """A destination by the key of its cache.

    Args:
        cache_key: of the cache there.
        src_layer_range: layers here; needed.
        dst_layer_range: as many layers there; needed.
        src_batch_index: slot here; 0 with a BlocksCacheKey.

    Raises:
        TypeError, ValueError: an argument of another type or width.
        LLMException: LLM_PARAM_INVALID: a step other than 1, no layer, a negative one, ranges of
            unequal length, or a slot with a BlocksCacheKey.

    Attributes:
        dst_cluster_id: of the key that it is made with.
    """

    cache_key = Checked[DestinationKey](_checked_key, "Of the cache there.")
    src_layer_range = Checked[range | None](_checked_layers, "Layers here.")
    dst_layer_range = Checked[range | None](_checked_layers, "Layers there.")

    def __init__(
        self,
        cache_key: DestinationKey,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        check_isinstance(
            "cache_key", cache_key, [BlocksCacheKey, CacheKeyByIdAndIndex], allow_none=False
        )
        check_layer_range("src_layer_range", src_layer_range, allow_none=False)
        check_layer_range("dst_layer_range", dst_layer_range, allow_none=False)
        assert src_layer_range is not None
        assert dst_layer_range is not None
        if len(src_layer_range) != len(dst_layer_range):
            raise invalid(
                f"src_layer_range={src_layer_range} and dst_layer_range={dst_layer_range} must be "
                "of equal length"
            )
        self.cache_key = cache_key
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        self.src_batch_index = src_batch_index
        self.dst_cluster_id = cache_key.cluster_id

    @property
    def src_batch_index(self) -> int:
        """Slot here."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        check_uint32("src_batch_index", src_batch_index)
        if isinstance(self.cache_key, BlocksCacheKey) and src_batch_index != 0:
            raise invalid(f"src_batch_index={src_batch_index} must be 0: {self.cache_key}")
        self._src_batch_index = src_batch_index

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig(cache_key={self.cache_key}, "
            f"src_layer_range={self.src_layer_range}, dst_layer_range={self.dst_layer_range}, "
            f"src_batch_index={self.src_batch_index})"
        )
