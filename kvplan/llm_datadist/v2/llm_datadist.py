"""`LLMDataDist` over `kvplan.LlmDataDist`: check and convert arguments, then call the engine."""

from __future__ import annotations

import atexit
import os
from importlib import import_module
from typing import ClassVar, Final, Never

from kvnative._signals import Mutex
from kvplan.engine.datadist import LlmDataDist
from kvplan.engine.option_rows import LISTENING
from kvplan.engine.options import unknown_key
from kvplan.links import RegisterMemStatus
from kvplan.llm_datadist.configs import LLMRole
from kvplan.llm_datadist.installation import SEVERAL_ENGINES
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import check_dict, check_isinstance, check_uint32, check_uint64
from kvplan.llm_datadist.v2 import link_codes
from kvplan.llm_datadist.v2.cache_manager import CacheManager
from kvplan.llm_datadist.v2.config import (
    BACKEND,
    CACHE_MANAGER,
    LOCAL_COMM_RES,
    check_listen,
    completed,
    engine_options,
    is_known,
)
from kvplan.llm_datadist.v2.layer_transfer import wait_for_feeds
from kvplan.llm_datadist.v2.link_codes import Clusters, Codes, OwnLinks, check_clusters
from kvplan.status import LLMException, invalid, unsupported
from kvplan.types import LlmRole

__all__ = ["LLMDataDist"]


class EngineSlots:
    """The initialized engines of this process, kept alive until they are finalized.

    Attributes:
        mutex: held while an engine is initialized or finalized.
        several: True if the process may have several engines.
    """

    def __init__(self) -> None:
        self.mutex = Mutex()
        self.several = False
        self._taken: list[LLMDataDist] = []

    @property
    def taken(self) -> tuple[LLMDataDist, ...]:
        """The initialized engines, oldest first."""
        return tuple(self._taken)

    @property
    def latest(self) -> LLMDataDist | None:
        """The engine that was initialized last; None if none is initialized."""
        return self._taken[-1] if self._taken else None

    @property
    def _are_several(self) -> bool:
        return self.several or os.environ.get(SEVERAL_ENGINES) == "1"

    def check_free(self, other: LLMDataDist | None) -> None:
        """Raise LLM_FAILED if the process may not have another engine."""
        if other is None or self._are_several:
            return
        raise LLMException(
            f"cluster {other.cluster_id} is initialized, and a process may have only one: finalize "
            "it first, or call kvplan.llm_datadist.permit_several_engines()"
        )

    def take(self, engine: LLMDataDist) -> None:
        """Add an engine that was initialized."""
        self._taken.append(engine)

    def release(self, engine: LLMDataDist) -> None:
        """Remove an engine that was finalized."""
        self._taken = [other for other in self._taken if other is not engine]

    def forget(self) -> None:
        """Forget the engines in a forked child: they belong to its parent."""
        self.mutex = Mutex()
        self._taken = []


ENGINES: Final = EngineSlots()


def permit_several_engines(permit: bool = True) -> None:
    """Let this process initialize more than one LLMDataDist; they may link with each other.

    `KVPLAN_SEVERAL_ENGINES=1` in the environment permits it too.

    Args:
        permit: False to allow only one again; initialized engines stay.
    """
    ENGINES.several = permit


class LLMDataDist:
    """An engine: its caches, and its links to other clusters.

    A process may have one initialized engine (`kvplan.llm_datadist.permit_several_engines` permits
    more). Engines that are still initialized when the process ends are finalized then.

    Every method raises TypeError for an argument of the wrong type, and ValueError for an integer
    outside its width. Methods that need the engine raise RuntimeError if it is not initialized.

    Args:
        role: PROMPT, DECODER or MIX.
        cluster_id: id of this engine, unique among linked clusters.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: cluster_id is not a uint64.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    """The initialized engine; the latest of several."""

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_isinstance("role", role, LLMRole, allow_none=False)
        check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = int(cluster_id)
        self._is_initialized = False
        self._llm_datadist: LlmDataDist | None = None
        self._engine_options: dict[str, str] = {}
        self._cache_manager: CacheManager | None = None
        self._own_links: OwnLinks | None = None  # None: only one end of a pair links

    @property
    def cluster_id(self) -> int:
        """The id of this engine, as given."""
        return self._cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        """The caches of this engine."""
        self._running()
        assert self._cache_manager is not None
        return self._cache_manager

    @property
    def kv_cache_manager(self) -> Never:
        """The cache manager of version 1, which kvplan does not have. Use `cache_manager`.

        Raises:
            LLMException: LLM_PARAM_INVALID.
        """
        self._running()
        raise invalid(f"kv_cache_manager is not available with {CACHE_MANAGER}; use cache_manager")

    def init(self, options: dict[str, str]) -> None:
        """Start the engine. No effect if it is initialized.

        Args:
            options: from `LLMConfig.generate_options`; `kvplan.` options work too.

        Raises:
            ModuleNotFoundError: llm.EnableCacheManager is not "1", which means version 1.
            TypeError: options of the wrong type, or a value that is not a str.
            AttributeError: options is None.
            LLMException: LLM_FAILED: another engine is initialized, or the port is in use;
                LLM_PARAM_INVALID: an invalid option; LLM_OUT_OF_MEMORY: no memory for a pool.
        """
        with ENGINES.mutex:
            if self._is_initialized:
                return
            ENGINES.check_free(LLMDataDist.llm_engine_instance)
            check_isinstance("options", options, dict)
            own = completed(options, self._role_to_str(self._role))
            if own.get(CACHE_MANAGER) != "1":
                import_module("kvplan.llm_datadist.v1")  # which raises
            engine = LlmDataDist(self._cluster_id, LlmRole(self._role))
            engine.initialize(engine_options(own))
            self._cache_manager = CacheManager(engine, own)
            self._engine_options = own
            self._own_links = OwnLinks() if BACKEND in own else None
            self._llm_datadist = engine
            self._is_initialized = True
            LLMDataDist.llm_engine_instance = self
            ENGINES.take(self)
        log.info("cluster %s is initialized, options = %s", self._cluster_id, own)

    def finalize(self) -> None:
        """End transfers and links, and release all memory; idempotent. `init` starts it again."""
        with ENGINES.mutex:
            if not self._is_initialized:
                return
            assert self._llm_datadist is not None
            self._is_initialized = False
            ENGINES.release(self)
            if LLMDataDist.llm_engine_instance is self:
                LLMDataDist.llm_engine_instance = ENGINES.latest
            self._llm_datadist.finalize()

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Change the role and the listening address. No cluster may be linked.

        Args:
            role: the new one, or the same.
            switch_options: llm.listenIpInfo is the new address; without it, stop listening.

        Raises:
            LLMException: LLM_EXIST_LINK: clusters are linked; LLM_PARAM_INVALID: a malformed
                address, or a misspelled llm.listenIpInfo; LLM_FAILED: the address is not available.
                After an error nothing has changed.
        """
        engine = self._running()
        check_isinstance("role", role, LLMRole, allow_none=False)
        check_isinstance("switch_options", switch_options, dict)
        options = switch_options or {}
        for key, text in options.items():
            check_isinstance(f"switch_options[{key!r}]", text, str, allow_none=False)
            if not is_known(key):
                log.warn(unknown_key(key))
        listen = {key: text for key, text in options.items() if key in LISTENING}
        for address in listen.values():
            check_listen(address)
        engine.set_role(LlmRole(role), listen)
        log.info("cluster %s: %s -> %s", self._cluster_id, self._role.name, role.name)
        self._role = role

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Begin to link with all clusters that call `link` with the same name.

        Afterwards no cache can be registered with remote_accessible=True.

        Args:
            comm_name: name of the communicator, 1 to 127 characters.
            cluster_rank_info: cluster id -> rank, of 2 to 4 clusters including this one; ranks must
                not decrease.
            rank_table: JSON with the hosts of the ranks; empty: all on this host.

        Returns:
            The id for `query_register_mem_status`; linking continues in the background.

        Raises:
            LLMException: LLM_PARAM_INVALID; LLM_FEATURE_NOT_ENABLED: with llm.TransferBackend.
        """
        engine = self._running_by_name("link")
        check_isinstance("comm_name", comm_name, str, allow_none=False)
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
        """End a communicator that `link` made.

        Raises:
            LLMException: LLM_NOT_YET_LINK: the communicator does not exist; LLM_LINK_BUSY:
                transfers are in flight; LLM_FEATURE_NOT_ENABLED: with llm.TransferBackend.
        """
        engine = self._running_by_name("unlink")
        check_uint64("comm_id", comm_id)
        engine.unlink(int(comm_id))

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return the state of a communicator that `link` made: PREPARING, OK or FAILED.

        Raises:
            LLMException: LLM_NOT_YET_LINK, LLM_FEATURE_NOT_ENABLED: as for `unlink`.
        """
        engine = self._running_by_name("query_register_mem_status")
        check_uint64("comm_id", comm_id)
        return engine.query_register_mem_status(int(comm_id))

    def link_clusters(self, clusters: Clusters, timeout: int = 3000) -> Codes:
        """Link with several listening clusters at once.

        Args:
            clusters: each with its id, one remote address, and a local address unless
                llm.LocalCommRes is given.
            timeout: milliseconds, > 0.

        Returns:
            The status of the call and of each cluster: LLM_SUCCESS, LLM_ALREADY_LINK,
            LLM_LINK_FAILED... A failure to link does not raise.

        Raises:
            LLMException: LLM_PARAM_INVALID: an invalid timeout, or no local address.
        """
        engine = self._running()
        unneeded = self._engine_options.get(LOCAL_COMM_RES)
        check_clusters(clusters, timeout, "" if unneeded else LOCAL_COMM_RES)
        return link_codes.link(engine, clusters, int(timeout), self._own_links)

    def unlink_clusters(
        self, clusters: Clusters, timeout: int = 3000, force: bool = False
    ) -> Codes:
        """End links at both ends, after transfers in flight.

        Args:
            clusters: each with its id.
            timeout: milliseconds, > 0.
            force: True to end the links of this side at once, and stop transfers in flight.

        Returns:
            The status of the call and of each cluster: LLM_SUCCESS, LLM_LINK_BUSY (still linked),
            LLM_UNLINK_FAILED (was not linked, or the peer has not confirmed)...

        Raises:
            LLMException: LLM_PARAM_INVALID: an invalid timeout.
        """
        engine = self._running()
        check_clusters(clusters, timeout)
        check_isinstance("force", force, bool)
        return link_codes.unlink(
            engine, clusters, int(timeout), force=bool(force), own=self._own_links
        )

    def check_link_status(self, remote_cluster_id: int) -> Never:
        """Raise LLM_PARAM_INVALID: the call belongs to version 1, which kvplan does not have.

        Raises:
            LLMException: LLM_PARAM_INVALID.
        """
        self._running()
        raise invalid(
            f"check_link_status is not available with {CACHE_MANAGER}; link_clusters returns the "
            f"status of cluster {remote_cluster_id}"
        )

    def _running(self) -> LlmDataDist:
        if not self._is_initialized:
            raise RuntimeError("llm datadist is not initialized")
        assert self._llm_datadist is not None
        return self._llm_datadist

    def _running_by_name(self, name: str) -> LlmDataDist:
        engine = self._running()
        if self._own_links is not None:
            raise unsupported(f"{name} is not available with {BACKEND}; use link_clusters")
        return engine

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        return role.name.capitalize()

    def __repr__(self) -> str:
        state = "initialized" if self._is_initialized else "not initialized"
        return f"<LLMDataDist of cluster {self._cluster_id}, {self._role.name}: {state}>"


def _shutdown_handler() -> None:
    for engine in ENGINES.taken:
        try:
            engine.finalize()
        except LLMException as error:
            log.warn("could not finalize cluster %s: %s", engine.cluster_id, error)
    wait_for_feeds()


def _forget_all() -> None:
    ENGINES.forget()
    LLMDataDist.llm_engine_instance = None


atexit.register(_shutdown_handler)
os.register_at_fork(after_in_child=_forget_all)
