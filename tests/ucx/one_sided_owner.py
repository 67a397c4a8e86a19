"""A process whose memory others reach one-sidedly: told what to do line by line, answers in JSON."""

from __future__ import annotations

import base64
import json
import mmap
import sys

import numpy as np

from kvnative._host import Board
from kvnative._ucx import UcxEnd, UcxLibrary
from kvnative._ucx_one_sided import UcxRegions

NBYTES = 8 << 20
NUM_SLOTS = 64


class Owner:
    """A buffer, its registration and the board that shows it."""

    def __init__(self, library: str, token: bytes) -> None:
        self.end = UcxEnd(UcxLibrary.load(library), mode="one_sided")
        self.regions = UcxRegions(self.end)
        self.board = Board(NUM_SLOTS)
        self.board_region = self.regions.map(self.board.address, NUM_SLOTS * 8)
        self.pages = mmap.mmap(-1, NBYTES)
        self.words = np.frombuffer(self.pages, dtype=np.uint64)
        self.words[:] = np.arange(len(self.words), dtype=np.uint64)
        self.region = self.regions.map(self.words.ctypes.data, NBYTES)
        self.slot, self.generation = self.board.take()
        self.link = self.end.link(token)

    def facts(self) -> dict[str, object]:
        """What a peer must know."""
        return {
            "address": base64.b64encode(self.end.address).decode(),
            "start": self.words.ctypes.data,
            "nbytes": NBYTES,
            "slot": self.slot,
            "generation": self.generation,
            "rkey": base64.b64encode(self.region.rkey).decode(),
            "board": self.board.address,
            "board_slots": NUM_SLOTS,
            "board_rkey": base64.b64encode(self.board_region.rkey).decode(),
        }

    def connect(self) -> str:
        """Wait for the peer; how it is reached."""
        self.link.connect(10_000)
        return self.link.way

    def sum(self) -> int:
        """Of all words."""
        return int(self.words.sum())

    def deregister(self) -> None:
        """Take it off the board; the memory stays."""
        self.board.release(self.slot, self.generation)

    def free(self) -> None:
        """Unmap the memory without telling anybody."""
        del self.words
        self.pages.close()


def main() -> None:
    """Answer each line of the standard input, the name of a method."""
    owner = Owner(sys.argv[1], bytes.fromhex(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(getattr(owner, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
