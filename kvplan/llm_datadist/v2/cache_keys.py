"""What names a cache, or a slot of one, in another cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvplan.llm_datadist.fields import Field
from kvplan.llm_datadist.utils.utils import (
    check_int64,
    check_isinstance,
    check_uint32,
    check_uint64,
)
from kvplan.status import invalid
from kvplan.types import NO_ID

_CLUSTER_IDS = ("cluster_id", "prompt_cluster_id")


class CacheKey:
    """Names a slot by the request, or the prefix, whose KV it holds.

    Args:
        cluster_id: of the peer, also as prompt_cluster_id; where a cache is made, it is ignored.
        req_id: the request; 2**64-1: none.
        model_id: tells models of one request apart. Default 0.
        prefix_id: the prefix; 2**64-1, the default: none.

    Raises:
        TypeError, ValueError: an id that is no uint64.
        LLMException: LLM_PARAM_INVALID: an argument too many, too few, or of another name.
    """

    cluster_id = Field[int]("Of the peer.")
    prompt_cluster_id = Field[int]("The same.")
    req_id = Field[int]("The request.")
    model_id = Field[int]("The model.")
    prefix_id = Field[int]("The prefix.")

    def __init__(self, *args: int, **kwargs: int) -> None:
        given = _given(("cluster_id", "req_id", "model_id", "prefix_id"), args, kwargs)
        if "req_id" not in given:
            raise invalid("req_id is required")
        _check_names(given, ("req_id", "model_id", "prefix_id"))
        self._cluster_id = self._prompt_cluster_id = given[_cluster_id_name(given)]
        self._req_id = given["req_id"]
        self._model_id = given.get("model_id", 0)
        self._prefix_id = given.get("prefix_id", NO_ID)
        for name in ("cluster_id", "req_id", "model_id", "prefix_id"):
            check_uint64(name, getattr(self, name))

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self.cluster_id}, req_id={self.req_id}, "
            f"prefix_id={self.prefix_id}, model_id={self.model_id})"
        )


class BlocksCacheKey:
    """Names a paged cache.

    Args:
        cluster_id: of the peer, also as prompt_cluster_id; where a cache is made, it is ignored.
        model_id: tells caches of one cluster apart. Default 0.

    Raises:
        TypeError: an id that is no int.
        LLMException: LLM_PARAM_INVALID: an argument too many, too few, or of another name.
    """

    cluster_id = Field[int]("Of the peer.")
    prompt_cluster_id = Field[int]("The same.")
    model_id = Field[int]("The model.")

    def __init__(self, *args: int, **kwargs: int) -> None:
        given = _given(("cluster_id", "model_id"), args, kwargs)
        _check_names(given, ("model_id",))
        self._name = _cluster_id_name(given)
        self._cluster_id = self._prompt_cluster_id = given[self._name]
        self._model_id = given.get("model_id", 0)
        check_isinstance("cluster_id", self._cluster_id, int)
        check_isinstance("model_id", self._model_id, int)

    def __repr__(self) -> str:
        return f"BlocksCacheKey({self._name}={self.cluster_id}, model_id={self.model_id})"


class CacheKeyByIdAndIndex:
    """Names a slot by the id of its cache.

    Args:
        cluster_id: of the peer.
        cache_id: there.
        batch_index: the slot.

    Raises:
        TypeError, ValueError: cluster_id is no uint64, cache_id no int64, batch_index no uint32.
    """

    cluster_id = Field[int]("Of the peer.")
    cache_id = Field[int]("Of the cache there.")
    batch_index = Field[int]("The slot.")

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        check_uint64("cluster_id", cluster_id)
        check_int64("cache_id", cache_id)
        check_uint32("batch_index", batch_index)
        self._cluster_id = cluster_id
        self._cache_id = cache_id
        self._batch_index = batch_index

    def __repr__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id={self.cluster_id}, cache_id={self.cache_id}, "
            f"batch_index={self.batch_index})"
        )


def _given(names: Sequence[str], args: Sequence[int], kwargs: Mapping[str, int]) -> dict[str, int]:
    """Return the arguments by name; a positional one counts before a keyword."""
    if len(args) + len(kwargs) > len(names):
        raise invalid(f"{len(args) + len(kwargs)} arguments; at most {len(names)}: {names}")
    given = {**kwargs, **dict(zip(names, args, strict=False))}
    if not any(name in given for name in _CLUSTER_IDS):
        raise invalid("prompt_cluster_id or cluster_id is required")
    return given


def _check_names(given: Mapping[str, int], names: Sequence[str]) -> None:
    for name in given:
        if name not in (*_CLUSTER_IDS, *names):
            raise invalid(f"Unsupported argument {name}; there are {(*_CLUSTER_IDS, *names)}")


def _cluster_id_name(given: Mapping[str, int]) -> str:
    return next(name for name in _CLUSTER_IDS if name in given)
