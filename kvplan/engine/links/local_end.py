"""What is the same at this end of every link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.control.cluster_key import Keys
from kvplan.control.loop import ControlLoop
from kvplan.control.messages import Offer
from kvplan.engine.options import Options
from kvplan.status import LLMException, LLMStatusCode
from kvplan.transport.choice import WHERE_MISSING
from kvplan.types import LlmRole

if TYPE_CHECKING:
    from kvplan.engine.registry import CacheRegistry
    from kvplan.transport.protocol import Transport


@dataclass(frozen=True, eq=False)
class LocalEnd:
    """This engine, as its links need it.

    Attributes:
        cluster_id: of this engine.
        instance: 16 random bytes, which no other engine has, nor this one after a restart.
        role: of this engine, now.
        options: limits and deadlines.
        registry: the caches that are offered.
        transports: in order of preference.
        missing: why others are not there, by name.
        control: the loop that all links live on.
        keys: what peers are authenticated with.
    """

    cluster_id: int
    instance: bytes
    role: Callable[[], LlmRole]
    options: Options
    registry: CacheRegistry
    transports: Sequence[Transport]
    missing: Mapping[str, str]
    control: ControlLoop
    keys: Keys

    def offers(self) -> tuple[Offer, ...]:
        """What a peer could reach this process by."""
        return tuple(Offer(it.name, it.metadata(())) for it in self.transports)

    def choose(self, peer: int, offers: Sequence[Offer]) -> tuple[Transport, bytes]:
        """The transport to use with a peer that makes these offers, and the peer's metadata.

        Args:
            peer: its cluster.
            offers: of the peer.

        Raises:
            LLMException: LLM_LINK_FAILED: there is none; says why each will not do, and what is
                missing at which end.
        """
        offered = {it.transport: it.metadata for it in offers}
        refusals = []
        for transport in self.transports:
            name = transport.name
            if (metadata := offered.get(name)) is None:
                remedy = f" ({WHERE_MISSING[name]})" if name in WHERE_MISSING else ""
                refusals.append(f"{name}: cluster {peer} does not offer it{remedy}")
            elif (refusal := transport.refusal(metadata)) is not None:
                refusals.append(f"{name}: {refusal}")
            else:
                return transport, metadata
        for name in offered.keys() & self.missing.keys():
            why = self.missing[name]
            refusals.append(f"{name}: cluster {self.cluster_id} does not have it: {why}")
        raise link_failed(
            f"no transport between cluster {self.cluster_id} and cluster {peer}: "
            f"{'; '.join(refusals)}"
        )

    def transport(self, name: str) -> Transport:
        """The transport that a peer has chosen.

        Raises:
            LLMException: LLM_LINK_FAILED: it was never offered.
        """
        for transport in self.transports:
            if transport.name == name:
                return transport
        raise link_failed(f"the peer chose {name!r}, which was not offered")


def link_failed(message: str) -> LLMException:
    """LLM_LINK_FAILED with a message that says who, in which phase, and why."""
    return LLMException(message, status_code=LLMStatusCode.LLM_LINK_FAILED)
