"""`link_clusters` and `unlink_clusters` return codes, where the engine returns results."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvplan.engine.datadist import LlmDataDist
from kvplan.links import ClusterInfo, LinkResults
from kvplan.llm_datadist.configs import LLMClusterInfo
from kvplan.llm_datadist.conversion import cluster_of
from kvplan.llm_datadist.utils import log
from kvplan.llm_datadist.utils.utils import check_int32, check_isinstance, check_uint64
from kvplan.status import LLMException, LLMStatusCode, invalid

Clusters = list[LLMClusterInfo] | tuple[LLMClusterInfo, ...]
Codes = tuple[LLMStatusCode, list[LLMStatusCode]]
"""Of the call (the last failure's, if there is one), and of each cluster in order."""

_UNLINKED = {LLMStatusCode.LLM_NOT_YET_LINK: LLMStatusCode.LLM_UNLINK_FAILED}


def check_clusters(clusters: Clusters, timeout: int, needed: str = "") -> None:
    """Refuse what is not clusters, or a timeout (ms) < 1; with `needed` each has a local address.

    `needed` is the option that is empty, so that the addresses are needed; "": they are not.
    """
    check_int32("timeout", timeout)
    if timeout < 1:
        raise invalid(f"timeout={timeout} is out of range [1, 2147483647]")
    check_isinstance("clusters", clusters, [list, tuple], LLMClusterInfo, allow_none=False)
    for cluster in clusters:
        if needed and not cluster.local_ip_info_list:
            raise invalid(
                f"local_ip_info_list of cluster {cluster.remote_cluster_id} is empty, and so is "
                f"option {needed}; give the cluster an address of this host by "
                "append_local_ip_info(ip, port)"
            )
        check_uint64("remote_cluster_id", cluster.remote_cluster_id)


class OwnLinks(set[int]):
    """Clusters that this process has linked with, where the original has a link for each direction.

    So it is with llm.TransferBackend: both ends link, and both unlink. Here a pair has one link: it
    is there when the first has linked, and gone when the first has unlinked.
    """

    def linked(self, cluster_id: int, code: LLMStatusCode) -> LLMStatusCode:
        """Return the code of linking where the peer may have linked already."""
        if code is LLMStatusCode.LLM_ALREADY_LINK and cluster_id not in self:
            code = LLMStatusCode.LLM_SUCCESS
        if code is LLMStatusCode.LLM_SUCCESS:
            self.add(cluster_id)
        return code

    def unlinked(self, cluster_id: int, code: LLMStatusCode) -> LLMStatusCode:
        """Return the code of unlinking where the peer may have unlinked already."""
        if code is LLMStatusCode.LLM_UNLINK_FAILED and cluster_id in self:
            code = LLMStatusCode.LLM_SUCCESS
        if code is LLMStatusCode.LLM_SUCCESS:
            self.discard(cluster_id)
        return code


def link(
    engine: LlmDataDist, clusters: Clusters, timeout: int, own: OwnLinks | None = None
) -> Codes:
    """Link with those that can be; the others are LLM_PARAM_INVALID."""
    codes: dict[int, LLMStatusCode] = {}
    linkable: dict[int, ClusterInfo] = {}
    for position, cluster in enumerate(clusters):
        try:
            linkable[position] = _linkable(engine, cluster)
        except LLMException as error:
            codes[position] = error.status_code
            log.error("cluster %s cannot be linked: %s", cluster.remote_cluster_id, error)
    if linkable:
        results = engine.link_clusters(list(linkable.values()), timeout)
        for position, it in zip(linkable, _reported(results), strict=True):
            codes[position] = it.status if own is None else own.linked(it.cluster_id, it.status)
    return _of_all([codes[position] for position in range(len(clusters))])


def unlink(
    engine: LlmDataDist,
    clusters: Clusters,
    timeout: int,
    *,
    force: bool,
    own: OwnLinks | None = None,
) -> Codes:
    """Unlink all of them; one that was not linked is LLM_UNLINK_FAILED, as in the original."""
    if not clusters:
        return _of_all([])
    ids = [int(it.remote_cluster_id) for it in clusters]
    codes = []
    for it in _reported(engine.unlink_clusters(ids, timeout, force)):
        code = _UNLINKED.get(it.status, it.status)
        codes.append(code if own is None else own.unlinked(it.cluster_id, code))
    return _of_all(codes)


def about(who: str, error: LLMException) -> str:
    """Return the text of an error, with `who` it is about in front unless the text names it."""
    text = str(error)
    return text if re.search(rf"\b{re.escape(who)}\b", text) else f"{who}: {text}"


def _linkable(engine: LlmDataDist, cluster: LLMClusterInfo) -> ClusterInfo:
    if cluster.remote_cluster_id == engine.cluster_id:
        raise invalid(f"remote_cluster_id={cluster.remote_cluster_id} is this engine's own")
    found = cluster_of(cluster)
    found.endpoint()  # refuses none, several, and impossible ones
    return found


def _reported(results: LinkResults) -> LinkResults:
    for it in results:
        if it.error is not None:
            log.error("%s", about(f"cluster {it.cluster_id}", it.error))
    return results


def _of_all(codes: Sequence[LLMStatusCode]) -> Codes:
    if not codes:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    failures = [code for code in codes if code is not LLMStatusCode.LLM_SUCCESS]
    return failures[-1] if failures else LLMStatusCode.LLM_SUCCESS, list(codes)
