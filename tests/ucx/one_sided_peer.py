"""The tests' side of a peer whose memory is reached one-sidedly, and backends that reach it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvnative._backend import Backend
from kvnative._ucx import UcxNativeLink
from kvnative._ucx_one_sided import UcxRegions, one_sided_backend
from tests.ucx.peer import NBYTES, UcxPeer, u64

SLOTS = 16


class RegionPeer(UcxPeer):
    """Its memory is one region, of which `ranges` parts are on its board."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, "one_sided")
        self.run(
            f"""
            from kvnative._host import Board
            from kvnative._ucx_one_sided import UcxRegions
            regions, board = UcxRegions(end), Board({SLOTS})
            shown = regions.map(board.address, {SLOTS} * 8)
            region = regions.map(base, {NBYTES})
            """
        )
        self.board: int = self.run("result = board.address")
        self.board_key = bytes.fromhex(self.run("result = shown.rkey.hex()"))
        self.key = bytes.fromhex(self.run("result = region.rkey.hex()"))

    def take(self) -> tuple[int, int]:
        """A slot of the board, and its generation."""
        slot, generation = self.run("result = board.take()")
        return slot, generation

    def one_sided(
        self,
        link: UcxNativeLink,
        direction: str,
        regions: UcxRegions,
        ranges: Iterable[tuple[int, int, tuple[int, int]]],
        **changes: Any,
    ) -> Backend:
        """A backend that knows `ranges`: offset, size, (slot, generation)."""
        rows = list(ranges)
        given = {
            "addresses": u64(*(self.base + offset for offset, _, _ in rows)),
            "nbytes": u64(*(nbytes for _, nbytes, _ in rows)),
            "slots": u64(*(slot for _, _, (slot, _) in rows)),
            "generations": u64(*(generation for _, _, (_, generation) in rows)),
            "keys": u64(*(0 for _ in rows)),
            "rkeys": [self.key],
            "board_address": self.board,
            "board_slots": SLOTS,
            "board_rkey": self.board_key,
            **changes,
        }
        return one_sided_backend(link, direction, regions, **given)  # type: ignore[arg-type]
