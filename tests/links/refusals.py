"""Expecting a refusal, by status and by what it says."""

from __future__ import annotations

import re

from kvplan import LLMStatusCode
from kvplan.links import ClusterInfo
from tests.links.end import End


def refused(end: End, cluster: ClusterInfo, status: LLMStatusCode, message: str) -> None:
    """Linking with `cluster` fails so."""
    (result,) = end.links.link([cluster], 5000)
    assert result.status is status, result
    assert re.search(message, str(result.error)), result
