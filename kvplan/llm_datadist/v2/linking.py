"""The links of an LLMDataDist: by name, which goes on in the background, or by address."""

from __future__ import annotations

import secrets

from kvplan.engine.datadist import LlmDataDist
from kvplan.links import RegisterMemStatus
from kvplan.llm_datadist.utils.utils import (
    check_dict,
    check_isinstance,
    check_uint32,
    check_uint64,
)
from kvplan.llm_datadist.v2 import link_codes
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from kvplan.llm_datadist.v2.engine_options import (
    BACKEND,
    CACHE_MANAGER,
    LOCAL_COMM_RES,
    engine_options,
)
from kvplan.llm_datadist.v2.link_codes import Clusters, Codes, OwnLinks, check_clusters
from kvplan.status import LLMException, LLMStatusCode, invalid

_MAX_COMM_NAME = 127


class Linking:
    """The half of `LLMDataDist` that links; see there."""

    def __init__(self) -> None:
        self._is_initialized = False
        self._llm_datadist: LlmDataDist | None = None
        self._engine_options: dict[str, str] = {}
        self._enable_cache_mgr = False
        self._cache_manager: CacheManager | None = None
        self._own_links: OwnLinks | None = None  # None: one end links

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Begin to link with all clusters that call this with the same name.

        Afterwards no cache can be registered with remote_accessible=True.

        Args:
            comm_name: of the communicator, 1 to 127 characters.
            cluster_rank_info: cluster id -> rank, of 2 to 4 clusters with this one; ranks must not
                decrease.
            rank_table: JSON that says where the ranks run; empty: all on this host.

        Returns:
            The id to ask `query_register_mem_status` with: it goes on in the background.

        Raises:
            TypeError, ValueError: an argument of another type or width.
            RuntimeError: not initialized.
            LLMException: LLM_PARAM_INVALID.
        """
        engine = self._running_by_name("link")
        check_isinstance("comm_name", comm_name, str, allow_none=False)
        if not 1 <= len(comm_name) <= _MAX_COMM_NAME:
            raise invalid(
                f"comm_name has {len(comm_name)} characters; [1, {_MAX_COMM_NAME}] are allowed"
            )
        check_isinstance("cluster_rank_info", cluster_rank_info, dict, allow_none=False)
        check_dict("cluster_rank_info", cluster_rank_info, int, int)
        for cluster_id, rank in cluster_rank_info.items():
            check_uint64("cluster_rank_info key", cluster_id)
            check_uint32("cluster_rank_info value", rank)
        check_isinstance("rank_table", rank_table, str, allow_none=False)
        ranks = {int(cluster_id): int(rank) for cluster_id, rank in cluster_rank_info.items()}
        comm_id = engine.link(comm_name, ranks, rank_table)
        assert self._cache_manager is not None
        self._cache_manager.set_is_call_linked()
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """End what `link` has begun.

        Raises:
            TypeError, ValueError: comm_id is no uint64.
            RuntimeError: not initialized.
            LLMException: LLM_NOT_YET_LINK: there is no such communicator (any more).
        """
        engine = self._running_by_name("unlink")
        check_uint64("comm_id", comm_id)
        engine.unlink(int(comm_id))

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return how far `link` is: PREPARING, OK or FAILED. Errors as for `unlink`."""
        engine = self._running_by_name("query_register_mem_status")
        check_uint64("comm_id", comm_id)
        return engine.query_register_mem_status(int(comm_id))

    def link_clusters(self, clusters: Clusters, timeout: int = 3000) -> Codes:
        """Link with clusters that listen, all at once.

        Args:
            clusters: each with its id, one remote address, and (unless llm.LocalCommRes is given)
                a local one.
            timeout: milliseconds that it may take, > 0.

        Returns:
            What became of the call and of each cluster: LLM_SUCCESS, LLM_ALREADY_LINK,
            LLM_LINK_FAILED... No failure to link is raised.

        Raises:
            TypeError, ValueError: an argument of another type or width.
            RuntimeError: not initialized.
            LLMException: LLM_PARAM_INVALID: timeout, or no local address.
        """
        engine = self._running()
        unneeded = not self._enable_cache_mgr or self._engine_options.get(LOCAL_COMM_RES)
        check_clusters(clusters, timeout, "" if unneeded else LOCAL_COMM_RES)
        if not self._enable_cache_mgr:
            engine = self._distinct_from(clusters)
        return link_codes.link(engine, clusters, int(timeout), self._own_links)

    def unlink_clusters(
        self, clusters: Clusters, timeout: int = 3000, force: bool = False
    ) -> Codes:
        """End links, at both ends; transfers in flight are waited for.

        Args:
            clusters: each with its id.
            timeout: milliseconds that it may take, > 0.
            force: end it here at once, whatever is in flight.

        Returns:
            What became of the call and of each cluster: LLM_SUCCESS, LLM_LINK_BUSY (still linked),
            LLM_UNLINK_FAILED (not linked, or the peer has not confirmed)...

        Raises:
            TypeError, ValueError: an argument of another type or width.
            RuntimeError: not initialized.
            LLMException: LLM_PARAM_INVALID: timeout.
        """
        engine = self._running()
        check_clusters(clusters, timeout)
        check_isinstance("force", force, bool)
        return link_codes.unlink(
            engine, clusters, int(timeout), force=bool(force), own=self._own_links
        )

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Return if the cluster is linked; only without llm.EnableCacheManager.

        Raises:
            TypeError, ValueError: remote_cluster_id is no uint64.
            RuntimeError: not initialized.
            LLMException: LLM_NOT_YET_LINK: no link; LLM_LINK_FAILED: it is broken;
                LLM_PARAM_INVALID: with llm.EnableCacheManager.
        """
        engine = self._running()
        self._check_mode("check_link_status", cache_manager=False)
        check_uint64("remote_cluster_id", remote_cluster_id)
        link_codes.check_linked(engine, int(remote_cluster_id))

    def _running(self) -> LlmDataDist:
        if not self._is_initialized:
            raise RuntimeError("llm datadist is not initialized")
        assert self._llm_datadist is not None
        return self._llm_datadist

    def _distinct_from(self, clusters: Clusters) -> LlmDataDist:
        """Return the engine, under another id if it is to link with a cluster of its own id.

        In version 1 a decoder may have its prompt's: whom it links with never asks for it. Only
        while it neither listens nor has a cache or link; otherwise linking refuses.
        """
        engine = self._running()
        if (
            all(it.remote_cluster_id != engine.cluster_id for it in clusters)
            or engine.listen_address is not None
            or engine.caches()
            or engine.links()
        ):
            return engine
        other = LlmDataDist(secrets.randbits(64), engine.role)
        other.initialize(engine_options(self._engine_options))
        self._replace_engine(other)
        return other

    def _running_by_name(self, name: str) -> LlmDataDist:
        engine = self._running()
        self._check_mode(name, cache_manager=True)
        if self._own_links is not None:
            raise LLMException(
                f"with {BACKEND} there is link_clusters, and no {name}",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        return engine

    def _replace_engine(self, engine: LlmDataDist) -> None:
        raise NotImplementedError

    def _check_mode(self, name: str, *, cache_manager: bool) -> None:
        if self._enable_cache_mgr is not cache_manager:
            word = "without" if cache_manager else "with"
            raise invalid(f"there is no {name} {word} {CACHE_MANAGER}")
