"""SGLang's transfer classes for NIXL and Mooncake, unmodified, over kvplan, on CPUs.

`make sglang` installs SGLang and runs this. Each of two processes has SGLang's own manager,
sender, receiver and bootstrap server under `python -m kvplan.run --as nixl`, then `--as mooncake`.
Requests with different pages arrive with all bytes, and no other page changes. Then decode gives
up a request in its middle, and prefill is killed in the middle of another one: decode sees both
fail, and no byte arrives once SGLang may use the pages again.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
ROOT = WORKER.parents[2]
FAILED, SUCCESS = 0, 4  # SGLang's KVPoll
REQUESTS = {
    4711: ([9, 3, 4, 20], [1, 30, 2, 8]),
    4712: ([*range(32, 48)], [*range(48, 64)]),
    4713: ([63, 0, 31, 5, 6, 7, 50], [15, 14, 13, 20, 21, 22, 3]),
}


class Worker:
    """A process with SGLang's classes."""

    def __init__(self, role: str, surface: str, port: int) -> None:
        self.role = role
        run = [sys.executable, "-m", "kvplan.run", "--as", surface]
        command = [*run, str(WORKER), role, surface, str(port)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {
            "PYTHONPATH": path,
            "MC_FORCE_TCP": "1",  # SGLang looks for no RDMA card
            "SGLANG_HOST_IP": "127.0.0.1",
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def reply(self) -> "dict[str, Any]":
        """Return the answer to the last command."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("REPLY "):
                answer: dict[str, Any] = json.loads(line[6:])
                return answer
        sys.exit(f"FAILED: {self.role} ended with {self.process.wait()}")

    def tell(self, do: str, **values: Any) -> None:
        """Give a command."""
        assert self.process.stdin
        print(json.dumps({"do": do, **values}), file=self.process.stdin, flush=True)

    def ask(self, do: str, **values: Any) -> "dict[str, Any]":
        """Give a command and return its answer."""
        self.tell(do, **values)
        return self.reply()


def expect(what: str, is_right: bool) -> None:
    """Print the line of a check; end if it is wrong."""
    print(f"  {'ok' if is_right else 'FAILED'}: {what}", flush=True)
    if not is_right:
        sys.exit(1)


def both(
    prefill: Worker, decode: Worker, room: int, theirs: "list[int]", mine: "list[int]", rest: bool
) -> None:
    """Start a request at both ends."""
    decode.tell("receive", room=room, pages=mine)
    prefill.ask("send", room=room, pages=theirs, rest=rest)
    decode.reply()


def live(surface: str) -> None:
    """Run all checks over one of the names."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    prefill = Worker("prefill", surface, port)
    decode = Worker("decode", surface, port)
    try:
        started = prefill.reply()
        decode.reply()
        print(f"{surface}: {started['file']}, torch {started['torch']}", flush=True)
        for room, (theirs, mine) in REQUESTS.items():
            both(prefill, decode, room, theirs, mine, rest=True)
            states = prefill.ask("wait", room=room)["state"], decode.ask("wait", room=room)["state"]
            answer = decode.ask("check", room=room, pages=mine)
            expect(
                f"request {room}, {len(mine)} pages: {states}, {answer}",
                states == (SUCCESS, SUCCESS) and all(answer.values()),
            )
        theirs, mine = [40, 41, 42, 43], [10, 11, 12, 16]
        both(prefill, decode, 4714, theirs, mine, rest=False)
        is_safe = decode.ask("abort", room=4714)["is_safe"]  # SGLang keeps the pages until then
        states = decode.ask("wait", room=4714)["state"], prefill.ask("wait", room=4714)["state"]
        decode.ask("fill", pages=mine)
        prefill.ask("rest", room=4714, pages=theirs[2:])
        both(prefill, decode, 4716, [1, 2], [4, 5], rest=True)  # it comes after what was given up
        states += (decode.ask("wait", room=4716)["state"],)
        filled = decode.ask("filled", pages=mine)["filled"]
        expect(
            f"request 4714 given up by decode: {states[:2]}, acknowledged: {is_safe}, pages "
            f"untouched from then on: {filled}",
            states == (FAILED, FAILED, SUCCESS) and is_safe and filled,
        )
        both(prefill, decode, 4715, theirs, mine, rest=False)
        prefill.process.kill()
        state = decode.ask("wait", room=4715)["state"]
        decode.ask("fill", pages=mine)
        time.sleep(1)
        filled = decode.ask("filled", pages=mine)["filled"]
        expect(
            f"prefill killed in the middle of 4715: {state}, pages untouched: {filled}",
            state == FAILED and filled,
        )
    finally:
        for worker in (prefill, decode):
            worker.process.kill()
            worker.process.wait()


def main() -> None:
    """Run all checks over each name that is given."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("surfaces", nargs="*", default=["nixl", "mooncake"])
    for surface in parser.parse_args().surfaces:
        live(surface)


if __name__ == "__main__":
    main()
