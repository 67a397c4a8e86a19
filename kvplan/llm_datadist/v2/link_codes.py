"""Status codes of `link_clusters` and `unlink_clusters`, from the results of the engine."""

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
"""The code of the call (that of the last failure, if any), and of each cluster in order."""

_UNLINKED = {LLMStatusCode.LLM_NOT_YET_LINK: LLMStatusCode.LLM_UNLINK_FAILED}


def check_clusters(clusters: Clusters, timeout: int, needed: str = "") -> None:
    """Check the types of clusters, and that timeout (ms) is >= 1.

    `needed`: option without which local addresses are mandatory; empty: they are optional.
    """
    check_int32("timeout", timeout)
    if timeout < 1:
        raise invalid(f"timeout={timeout} is out of range [1, 2147483647]")
    check_isinstance("clusters", clusters, [list, tuple], LLMClusterInfo, allow_none=False)
    for cluster in clusters:
        if needed and not cluster.local_ip_info_list:
            raise invalid(
                f"local_ip_info_list of cluster {cluster.remote_cluster_id} is empty, and "
                f"option {needed} is not given; give the cluster an address of this host by "
                "append_local_ip_info(ip, port)"
            )
        check_uint64("remote_cluster_id", cluster.remote_cluster_id)


class OwnLinks(set[int]):
    """Clusters that this process has linked itself, with llm.TransferBackend.

    With that option the original has a link for each direction: both ends link and unlink. Here a
    pair has one link, from the first link call to the first unlink call of either end.
    """

    def linked(self, cluster_id: int, code: LLMStatusCode) -> LLMStatusCode:
        """Return the code of a link call, as if the peer had not linked."""
        if code is LLMStatusCode.LLM_ALREADY_LINK and cluster_id not in self:
            code = LLMStatusCode.LLM_SUCCESS
        if code is LLMStatusCode.LLM_SUCCESS:
            self.add(cluster_id)
        return code

    def unlinked(self, cluster_id: int, code: LLMStatusCode) -> LLMStatusCode:
        """Return the code of an unlink call, as if the peer had not unlinked."""
        if code is LLMStatusCode.LLM_NOT_YET_LINK and cluster_id in self:
            code = LLMStatusCode.LLM_SUCCESS
        if code in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_UNLINK_FAILED):
            self.discard(cluster_id)  # ended here, even if the peer has not confirmed
        return code


def link(
    engine: LlmDataDist, clusters: Clusters, timeout: int, own: OwnLinks | None = None
) -> Codes:
    """Link with the valid clusters. The code of the others is LLM_PARAM_INVALID."""
    codes: dict[int, LLMStatusCode] = {}
    linkable: dict[int, ClusterInfo] = {}
    for position, cluster in enumerate(clusters):
        try:
            linkable[position] = _linkable(engine, cluster)
        except LLMException as error:
            codes[position] = error.status_code
            log.error("could not link cluster %s: %s", cluster.remote_cluster_id, error)
    if linkable:
        results = engine.link_clusters(list(linkable.values()), timeout)
        for position, result in zip(linkable, _logged(results), strict=True):
            code = result.status
            codes[position] = code if own is None else own.linked(result.cluster_id, code)
    return _of_all([codes[position] for position in range(len(clusters))])


def unlink(
    engine: LlmDataDist,
    clusters: Clusters,
    timeout: int,
    *,
    force: bool,
    own: OwnLinks | None = None,
) -> Codes:
    """Unlink clusters. Without `force`, one that was not linked has LLM_UNLINK_FAILED."""
    if not clusters:
        return _of_all([])
    ids = [int(cluster.remote_cluster_id) for cluster in clusters]
    codes = []
    for result in _logged(engine.unlink_clusters(ids, timeout, force)):
        code = result.status if own is None else own.unlinked(result.cluster_id, result.status)
        codes.append(_UNLINKED.get(code, code))
    return _of_all(codes)


def about(peer: str, error: LLMException) -> str:
    """Return the text of an error, prefixed with `peer` unless the text names the peer already."""
    text = str(error)
    return text if re.search(rf"\b{re.escape(peer)}\b", text) else f"{peer}: {text}"


def _linkable(engine: LlmDataDist, cluster: LLMClusterInfo) -> ClusterInfo:
    if cluster.remote_cluster_id == engine.cluster_id:
        raise invalid(f"remote_cluster_id={cluster.remote_cluster_id} is this engine's own")
    found = cluster_of(cluster)
    found.endpoint()  # raises unless there is exactly one valid address
    return found


def _logged(results: LinkResults) -> LinkResults:
    for result in results:
        if result.error is not None:
            log.error("%s", about(f"cluster {result.cluster_id}", result.error))
    return results


def _of_all(codes: Sequence[LLMStatusCode]) -> Codes:
    if not codes:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    failures = [code for code in codes if code is not LLMStatusCode.LLM_SUCCESS]
    return failures[-1] if failures else LLMStatusCode.LLM_SUCCESS, list(codes)
