"""Two vLLM engines on NIXL, observed: three wrong answers, and the tools that say why.

No transfer fails. What is wrong:

  stale    a router sends parameters a second time; the blocks are other requests' by then
  swapped  a router exchanges two blocks of the table
  layer    the decode engine reads each layer from the one after it

`python -m examples.vllm.wrong_answers FOLDER` leaves the recordings of both engines in a folder;
docs/how-to/why-is-it-wrong.md reads them.
"""

from __future__ import annotations

import argparse
import copy
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.vllm.beside_nixl import nixl
from examples.vllm.engine import Engine
from examples.vllm.live_engines import FINISH
from examples.vllm.report import FOLDER, ROOT, TOKENS, Answer, Report, free_port, prompts

BLOCKS = 120  # of each engine
MISTAKE = "EXAMPLES_VLLM_MISTAKE"  # as in observed_nixl, which imports vLLM
FOUND = {
    "stale": "arrived: no bytes of this request",
    "swapped": "arrived: the bytes of layer 0, run 3",
    "layer": "arrived: the bytes of layer 1, run 0",
}
"""Texts of `kvplan trace --sums` about the first block that differs, by mistake."""


def config(role: str) -> dict[str, Any]:
    """NixlConnector on a CPU, as this example extends it."""
    module = "examples.vllm.observed_nixl"
    return nixl(role) | {"kv_connector": "ObservedNixl", "kv_connector_module_path": module}


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

    def stale(self, prompt: list[int], params: dict[str, Any]) -> Answer:
        """Send parameters twice, with other requests in between."""
        self.answer(prompt, copy.deepcopy(params))
        self.prefill.forget()
        others = [[1000 + number, *range(8)] for number in range(2 * BLOCKS)]
        self.prefill.generate(others, 1)  # a block for each
        return self.answer(prompt, params)

    def swapped(self, prompt: list[int], params: dict[str, Any]) -> Answer:
        """Exchange the first and the last block, which is not full.

        Two full blocks would change no answer: keys have their positions in them.
        """
        table = params["remote_block_ids"][0]
        table[0], table[-1] = table[-1], table[0]
        return self.answer(prompt, params)

    def layer(self, prompt: list[int], params: dict[str, Any]) -> Answer:
        """Have the decode engine read other layers."""
        self.mistake.touch()
        try:
            return self.answer(prompt, params)
        finally:
            self.mistake.unlink()


def sums(folder: Path) -> dict[str, str]:
    """Return what `kvplan trace --sums` prints of the last transfer of each request."""
    done = subprocess.run(
        [sys.executable, "-m", "kvplan", "trace", str(folder), "--sums"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    texts = re.split(r"^(?=\S+: transfer #)", done.stdout, flags=re.MULTILINE)[1:]
    return {text.partition(":")[0]: " ".join(text.split()) for text in texts}


def run(report: Report, left: Path | None = None) -> None:
    """Make each mistake, and have it found; `left`: the folder where the recordings are left."""
    text, *others = (prompts()[index] for index in (6, 8, 7, 9))  # 7: its last block is not full
    with tempfile.TemporaryDirectory() as made, ExitStack() as held:
        pair = Pair(held, Path(made))
        alone = [answer.tokens for answer in pair.prefill.generate([text, *others], TOKENS)]
        pair.prefill.forget()
        params = pair.finished(text)
        found = {params["remote_request_id"]: ("right", pair.answer(text, params))}
        for kind, other in zip(FOUND, others, strict=True):
            params = pair.finished(other)
            found[params["remote_request_id"]] = kind, getattr(pair, kind)(other, params)
        held.pop_all().close()  # so that the recordings are whole
        said = sums(Path(made) / "seen")
        for right, (request, (kind, answer)) in zip(alone, found.items(), strict=True):
            problems = []
            if (answer.tokens == right) != (kind == "right"):
                problems.append(f"{answer.tokens} were answered; one engine alone answers {right}")
            if FOUND.get(kind, "sums equal") not in said.get(request, ""):
                problems.append(f"kvplan trace says {said}")
            report.check(
                f"{kind}: kvplan trace --sums says why the answer of {request} is so", problems
            )
        if left is not None:
            shutil.copytree(Path(made) / "seen", left)


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
