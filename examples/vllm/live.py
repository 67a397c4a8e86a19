"""`make vllm`: real vLLM engines with kvplan between them, on a machine without accelerator.

One line for each check; exits with 1 if one has failed. Every answer is compared with what one
engine alone generates: it has to be the same, or an error, never something else.

`python -m examples.vllm.live PART...` makes only some of the checks.
"""

from __future__ import annotations

import argparse
import signal
import sys

from examples.vllm import (
    beside_nixl,
    hybrid,
    live_engines,
    live_parallel,
    live_push,
    live_servers,
    wrong_answers,
)
from examples.vllm.report import FOLDER, Report

PARTS = {
    "engines": live_engines.run,
    "servers": live_servers.run,
    "push": live_push.run,
    "hybrid": hybrid.run,
    "parallel": live_parallel.run,
    "nixl-over-kvplan": beside_nixl.over_kvplan,
    "wrong-answers": wrong_answers.run,
    "nixl": beside_nixl.run,
}


def main() -> int:
    """Make the checks that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m examples.vllm.live", description=__doc__)
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; all, if none is given")
    asked = parser.parse_args().part or list(PARTS)
    if unknown := sorted(set(asked) - set(PARTS)):
        parser.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    for path in FOLDER.glob("*.log"):
        path.unlink()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends as well
    report = Report()
    for name in asked:
        report.say(f"{name}:")
        PARTS[name](report)
    report.say(f"{report.failed} failed" if report.failed else "all is well")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
