"""Transfers that end when a test lets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvnative._backend import Backend
from kvplan import Transfers
from tests.support.wrappers import hold, let_go

LetGo = Callable[[], None]


@contextmanager
def held_transfers() -> Iterator[tuple[Transfers, LetGo]]:
    """Yield transfers, and a function to call before their submitted tasks can end."""
    held: list[Backend] = []

    def wrap(backend: Backend) -> Backend:
        held.append(hold(backend))
        return held[-1]

    def let_all_go() -> None:
        for backend in held:
            let_go(backend)

    with Transfers(1, wrap=wrap) as transfers:
        try:
            yield transfers, let_all_go
        finally:
            let_all_go()
