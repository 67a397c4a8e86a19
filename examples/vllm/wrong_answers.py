"""Two vLLM engines on NIXL, observed: three wrong answers, and the tools that say why.

No transfer fails. What is wrong:

  stale    a router sends parameters a second time; the blocks are other requests' by then
  swapped  a router exchanges two blocks of the table
  layer    the decode engine reads each layer from the one after it

`python -m examples.vllm.wrong_answers FOLDER` leaves the recordings of each in a folder of its own,
for docs/how-to/why-is-it-wrong.md.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.vllm.engine import Engine
from examples.vllm.live_engines import FINISH
from examples.vllm.report import FOLDER, ROOT, TOKENS, Answer, Report, free_port, prompts

BLOCKS = 120  # of each engine
MISTAKE = "EXAMPLES_VLLM_MISTAKE"  # as in observed_nixl, which imports vLLM
FOUND = {
    "stale": (["--sums"], "which are no bytes of this"),
    "swapped": (["--sums"], "which are the bytes of layer 0"),
    "layer": (["--sums"], "which are the bytes of layer 1"),
}
"""The options of `kvplan trace` that find each, and words of what is printed."""


def config(role: str) -> dict[str, Any]:
    """NixlConnector on a CPU, as this example extends it."""
    return {
        "kv_connector": "ObservedNixl",
        "kv_connector_module_path": "examples.vllm.observed_nixl",
        "kv_role": role,
        "kv_buffer_device": "cpu",
    }


class Pair:
    """A prefill engine and a decode engine, both observed."""

    def __init__(self, held: ExitStack, folder: Path) -> None:
        self.mistake = folder / "mistake"
        self.engines = []
        for core, role in enumerate(("prefill", "decode")):
            environment = {
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "KVPLAN_OBSERVE": f"nixl,sums={folder / 'seen'}",
                MISTAKE: str(self.mistake),
            }
            name = "kv_producer" if role == "prefill" else "kv_consumer"
            engine = Engine(
                f"wrong-{role}", FOLDER, core, config(name), environment,
                num_gpu_blocks_override=BLOCKS,
            )  # fmt: skip
            held.callback(engine.close)
            self.engines.append(engine)
        self.prefill, self.decode = self.engines
        for engine in self.engines:
            engine.started()

    def finished(self, prompt: list[int]) -> dict[str, Any]:
        """Let the prefill engine compute a prompt; returns what travels with the request."""
        return self.prefill.generate([prompt], 1, [FINISH])[0].params or {}

    def answer(self, prompt: list[int], params: Mapping[str, Any]) -> Answer:
        """Return what the decode engine answers."""
        self.decode.forget()
        return self.decode.generate([prompt], TOKENS, [dict(params)])[0]

    def stale(self, prompt: list[int]) -> Answer:
        """Send parameters twice, with other requests in between."""
        params = self.finished(prompt)
        self.answer(prompt, copy.deepcopy(params))
        self.prefill.forget()
        others = [[1000 + number, *range(8)] for number in range(2 * BLOCKS)]
        self.prefill.generate(others, 1)  # a block for each
        return self.answer(prompt, params)

    def swapped(self, prompt: list[int]) -> Answer:
        """Exchange the first and the last block, which is not full.

        Two full blocks would change no answer: keys have their positions in them.
        """
        params = self.finished(prompt)
        table = params["remote_block_ids"][0]
        table[0], table[-1] = table[-1], table[0]
        return self.answer(prompt, params)

    def layer(self, prompt: list[int]) -> Answer:
        """Have the decode engine read other layers."""
        params = self.finished(prompt)
        self.mistake.touch()
        try:
            return self.answer(prompt, params)
        finally:
            self.mistake.unlink()


def trace(folder: Path, options: list[str]) -> tuple[int, str]:
    """Return the exit code of `kvplan trace` and what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kvplan", "trace", str(folder), *options],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def run(report: Report, left: Path | None = None) -> None:
    """Make each mistake with two fresh engines, and have it found."""
    prompt, other = prompts()[7:9]
    for kind, (options, words) in FOUND.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            with ExitStack() as held:
                pair = Pair(held, folder)
                alone = [its.tokens for its in pair.prefill.generate([prompt, other], TOKENS)]
                pair.prefill.forget()
                right = pair.answer(other, pair.finished(other))
                wrong = getattr(pair, kind)(prompt)
            code, text = trace(folder / "seen", options)
            problems = []
            if right.tokens != alone[1]:
                problems.append("the answer to the other prompt is wrong, too")
            if wrong.tokens == alone[0]:
                problems.append("the answer is right")
            if code != 1 or words not in " ".join(text.split()):
                problems += [f"exit code {code}", *text.splitlines()[:20]]
            report.check(f"{kind}: the answer is wrong, and kvplan trace says why", problems)
            if left is not None:
                shutil.copytree(folder / "seen", left / kind)


def main() -> int:
    """Make them alone."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.vllm.wrong_answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the recordings are left")
    report = Report()
    run(report, parser.parse_args().folder)
    report.say(f"{report.failed} failed" if report.failed else "all is well")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
