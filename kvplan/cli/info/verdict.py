"""What `kvplan info` found, in a few lines: whether kvplan works here, how, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvplan.cli.info.text import Found, tuned_text, wrapped

_IN_HOST: Final = ("hccl", "local", "tcp")
_ACROSS: Final = ("hccl", "ucx", "tcp")
_MEANS: Final = {
    "hccl": "HCCL between devices",
    "local": "shared memory",
    "ucx": "RDMA",
    "tcp": "sockets",
}
_FEW_LINKS: Final = 100


class Verdict(NamedTuple):
    """A line in each: `style` is one of rich's, for terminals."""

    works: bool
    lines: list[tuple[str, str]]


def verdict(found: Found) -> Verdict:
    """Sum up `found`: 3 to 9 lines, the first of which says whether it works."""
    broken = {name: why for name, why in found["native_modules"].items() if why}
    usable = {it["name"]: it for it in found["transports"] if it["works"]}
    head = f"kvplan {found['kvplan']}"
    if broken:
        name, why = next(iter(broken.items()))
        count = f"{len(broken)} of {len(found['native_modules'])} native modules do not load"
        lines = [(f"{head} does not work here: {count}: {name}: {why}", "bold red")]
    elif not usable and found["stopped"]:
        lines = [(f"{head} may not work here: not all could be looked at", "bold red")]
    elif not usable:
        lines = [(f"{head} does not work here: there is no transport", "bold red")]
    else:
        lines = [(f"{head} works here", "bold green")]
        lines.append((wrapped("in this host", _means(usable, _IN_HOST)), ""))
        lines.append((wrapped("across hosts", _means(usable, _ACROSS)), ""))
    lines.append((wrapped("accelerator", _accelerator(found["accelerator"], found["cuda"])), ""))
    lines.append((wrapped("RDMA", _rdma(found, usable)), ""))
    lines.append((wrapped("copies", tuned_text(found["copies_tuned"])), ""))
    if it := found["stopped"]:
        text = f"{it['step']}: {it['reason']}; -v says more"
        lines.append((wrapped("NOT LOOKED AT", text), "yellow"))
    lines += [(wrapped("to do", text), "yellow") for text in _to_do(found)]
    return Verdict(bool(usable) and not broken, lines)


def _means(usable: Found, names: tuple[str, ...]) -> str:
    """`shared memory (local), else sockets (tcp)`: in the order in which they are tried."""
    found = [f"{_MEANS[it]} ({it})" for it in names if it in usable]
    return ", else ".join(found) or "nothing works"


def _accelerator(ascend: Found, cuda: Found) -> str:
    if "devices" in ascend:
        text = f"{ascend['soc']}, {_opened(ascend)}"
        return f"{text}, CANN {ascend['version'] or '(of unknown version)'}"
    if "devices" in cuda:
        names = {device["name"] for device in cuda["devices"] if "name" in device}
        text = f"{' and '.join(sorted(names)) or 'CUDA'}, {_opened(cuda)}"
        return f"{text}, driver of CUDA {cuda['version']}"
    broken = [
        it.get("why_not", "not known")
        for it in (ascend, cuda)
        if "library" in it or any(place["has"] for place in it.get("places", []))
    ]
    neither = (
        "neither a library of Ascend (ACL) nor CUDA's driver is installed where it is looked for"
    )
    return f"none: {'; '.join(broken) or neither}"


def _opened(it: Found) -> str:
    working = [device for device in it["devices"] if "name" in device]
    return f"{len(working)} of {it['num_devices']} devices can be opened"


def _rdma(found: Found, usable: Found) -> str:
    if "ucx" in usable:
        return f"by UCX {found['ucx'].get('version', '')}, over {', '.join(found['ucx']['over'])}"
    if "hccl" in usable:
        return "by HCCL, between devices"
    missing = found["ucx"].get("missing_for_rdma") or []
    return f"none: {missing[0] if missing else _why_not(found, 'ucx')}"


def _why_not(found: Found, name: str) -> str:
    whys: Any = (it.get("why_not") for it in found["transports"] if it["name"] == name)
    return next(whys, None) or "not known"


def _to_do(found: Found) -> Iterator[str]:
    """What a person could change, for the better; missing hardware is not among it."""
    missing = found["ucx"].get("missing_for_rdma") or []
    if len(missing) == 1 and "RDMA device" not in missing[0]:
        yield missing[0]
    if note := found["copies_tuned"].get("note"):
        yield f"copies are as built in: {note}"
    for it in found["copies"]:
        if not it["works"]:
            yield f"copies between {it['local']} and {it['remote']} memory FAILED: {it['why_not']}"
    if found["user_key"]["why_not"]:
        yield f"links inside this host FAIL without a key file: {found['user_key']['why_not']}"
    limits = found["limits"]
    if limits["ptrace_scope"] == 1:
        yield (
            "kernel.yama.ptrace_scope is 1: set kvplan.permit_any_peer where memory is registered"
        )
    elif limits["ptrace_scope"]:
        yield (
            f"kernel.yama.ptrace_scope is {limits['ptrace_scope']}: registered memory is reached "
            "by tcp only; allocate caches instead, or set it to 1"
        )
    links = [it for it in limits["links_by_open_files"].values() if it is not None]
    if links and min(links) < _FEW_LINKS:
        soft, hard = limits["open_files"]["soft"], limits["open_files"]["hard"]
        yield (f"{soft} open files are enough for {min(links)} links: ulimit -n (at most {hard})")
