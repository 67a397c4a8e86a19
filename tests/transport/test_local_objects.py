"""Objects of the local transport: their repr, and errors without free descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvplan import LLMStatusCode, Transfers
from kvplan.transport.local import LocalTransport
from tests.support.refusals import refused


def test_objects_have_a_readable_repr(transport: LocalTransport) -> None:
    pid = os.getpid()
    registration = transport.register(np.zeros(200, np.uint8))
    assert repr(transport) == f"<LocalTransport of process {pid}: 1 registrations>"
    link = transport.connect(transport.metadata())
    memory = link.memory([registration.address, registration.address + 100], 100)
    assert repr(link) == f"<LocalLink to peer {pid}: mapped arenas, process_vm>"
    assert repr(memory) == f"<LocalPeerMemory 2 tensors, 200 bytes: {link!r}>"
    link.close()
    transport.close()
    assert repr(link) == f"<LocalLink to peer {pid}: closed>"
    assert repr(transport) == f"<LocalTransport of process {pid}: closed>"
    with Transfers(2) as transfers:
        assert repr(transfers) == "<Transfers of 2 threads>"
    assert repr(transfers) == "<Transfers of 2 threads, closed>"


@contextmanager
def no_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "call",
    [
        lambda transport: transport.allocate(4096),
        lambda transport: transport.register(bytearray(100)),
    ],
    ids=["allocate", "register"],
)
def test_without_a_free_descriptor_calls_raise_an_error_of_the_interface(
    transport: LocalTransport, call: Callable[[LocalTransport], object]
) -> None:
    with (
        no_descriptors(),
        refused(LLMStatusCode.LLM_OUT_OF_MEMORY, "RLIMIT_NOFILE is 0"),
    ):
        call(transport)
