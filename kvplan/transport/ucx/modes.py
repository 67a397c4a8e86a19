"""The two ways in which bytes move over UCX, and which of them this host is for."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, get_args

from kvnative._backend import MAX_STRIPES
from kvplan.status import invalid
from kvplan.validation import check_type, shown

Mode = Literal["gathered", "one_sided"]
"""gathered: messages over TCP, which carry many blocks each and are scattered where they arrive;
one_sided: a get or put for each descriptor, done by the fabric."""

MODES: Final = ("auto", *get_args(Mode))
"""What can be asked for."""

MAX_LANES: Final = MAX_STRIPES
"""Connections of one link, each with a thread of its own at both ends."""

DEFAULT_LANES: Final = 2
"""Faster than one even where both ends have one core each (docs/performance.md); more take more
descriptors and threads than every user may have to spare."""

_RDMA: Final = Path("/sys/class/infiniband")
_VERBS: Final = "libuct_ib.so*"


def check_mode(name: str, value: object) -> str:
    """`value`, if it is one of MODES.

    Raises:
        TypeError: not a str.
        LLMException: LLM_PARAM_INVALID.
    """
    if check_type(name, value, str) not in MODES:
        raise invalid(f"{name}={shown(value)} must be one of {', '.join(MODES)}")
    return str(value)


def check_lanes(name: str, value: object) -> int:
    """`value`, if it is a number of lanes.

    Raises:
        TypeError: not an int.
        LLMException: LLM_PARAM_INVALID.
    """
    number = check_type(name, value, int)
    if not 1 <= number <= MAX_LANES:
        raise invalid(f"{name}={number} is out of range [1, {MAX_LANES}]")
    return number


def choose_mode(asked: str, library: str) -> Mode:
    """The mode that is asked for; with "auto" one_sided where RDMA can be had.

    Args:
        asked: one of MODES.
        library: path of the UCX library.
    """
    if asked == "one_sided":
        return "one_sided"
    return "gathered" if asked == "gathered" or why_no_rdma(library) else "one_sided"


def why_no_rdma(library: str) -> str:
    """What is missing for RDMA with the UCX library of that path; empty: nothing."""
    if not _RDMA.is_dir():
        return f"this host has no RDMA device ({_RDMA} is not there)"
    if not any(_is_active(it) for it in _RDMA.glob("*/ports/*/state")):
        return f"no port of an RDMA device is active (as {_RDMA}/*/ports/*/state says)"
    if library and not any(Path(library).resolve().parent.glob(f"**/{_VERBS}")):
        return (
            f"the UCX library {library} is built without verbs ({_VERBS} is not beside it), as the "
            "wheel is: install the UCX of the system, or of MLNX_OFED"
        )
    return ""


def _is_active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text()
    except OSError:
        return False
