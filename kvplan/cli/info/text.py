"""Texts of `kvplan info`: the verdict, and all findings as an outline."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

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
    """The lines of the verdict, each with its style for terminals."""

    works: bool
    lines: list[tuple[str, str]]


def verdict(found: Found) -> Verdict:
    """Sum up the findings in a few lines. The first says whether kvplan works."""
    broken = {name: why for name, why in found["native_modules"].items() if why}
    usable = {row["name"]: row for row in found["transports"] if row["works"]}
    head = f"kvplan {found['kvplan']}"
    if broken:
        name, why = next(iter(broken.items()))
        count = f"{len(broken)} of {len(found['native_modules'])} native modules do not load"
        lines = [(f"{head} does not work here: {count}: {name}: {why}", "bold red")]
    elif not usable and found["stopped"]:
        lines = [(f"{head} may not work here: not everything could be checked", "bold red")]
    elif not usable:
        lines = [(f"{head} does not work here: no transport does", "bold red")]
    else:
        lines = [(f"{head} works here", "bold green")]
        lines.append((wrapped("in this host", _means(usable, _IN_HOST)), ""))
        lines.append((wrapped("across hosts", _means(usable, _ACROSS)), ""))
    lines.append(
        (wrapped("accelerator", _accelerator_found(found["accelerator"], found["cuda"])), "")
    )
    lines.append((wrapped("RDMA", _rdma(found, usable)), ""))
    lines.append((wrapped("copies", tuned_text(found["copies_tuned"])), ""))
    if stopped := found["stopped"]:
        text = f"{stopped['step']}: {stopped['reason']}; -v says more"
        lines.append((wrapped("NOT CHECKED", text), "yellow"))
    lines += [(wrapped("to do", text), "yellow") for text in _to_do(found)]
    return Verdict(bool(usable) and not broken, lines)


def _means(usable: Found, names: tuple[str, ...]) -> str:
    """Return `shared memory (local), else sockets (tcp)`, in the order of preference."""
    found = [f"{_MEANS[name]} ({name})" for name in names if name in usable]
    return ", else ".join(found) or "nothing works"


def _accelerator_found(ascend: Found, cuda: Found) -> str:
    if "devices" in ascend:
        text = f"{ascend['soc']}, {_opened(ascend)}"
        return f"{text}, CANN {ascend['version'] or '(of unknown version)'}"
    if "devices" in cuda:
        names = {device["name"] for device in cuda["devices"] if "name" in device}
        text = f"{' and '.join(sorted(names)) or 'CUDA'}, {_opened(cuda)}"
        return f"{text}, driver of CUDA {cuda['version']}"
    broken = [
        kind.get("why_not", "not known")
        for kind in (ascend, cuda)
        if "library" in kind or any(place["has"] for place in kind.get("places", []))
    ]
    return f"none: {'; '.join(broken) or 'found neither the Ascend library (ACL) nor CUDA'}"


def _opened(kind: Found) -> str:
    working = [device for device in kind["devices"] if "name" in device]
    return f"{len(working)} of {kind['num_devices']} devices can be opened"


def _rdma(found: Found, usable: Found) -> str:
    if "ucx" in usable:
        return f"by UCX {found['ucx'].get('version', '')}, over {usable['ucx']['tried']}"
    if "hccl" in usable:
        return "by HCCL, between devices"
    missing = found["ucx"].get("missing_for_rdma") or []
    return f"none: {missing[0] if missing else _why_not_ucx(found)}"


def _why_not_ucx(found: Found) -> str:
    whys: Any = (row.get("why_not") for row in found["transports"] if row["name"] == "ucx")
    return next(whys, None) or "not known"


def _to_do(found: Found) -> Iterator[str]:
    """Yield changes that would improve the machine, except for missing hardware."""
    missing = found["ucx"].get("missing_for_rdma") or []
    if len(missing) == 1 and "RDMA device" not in missing[0]:
        yield missing[0]
    if note := found["copies_tuned"].get("note"):
        yield f"copies are as built in: {note}"
    for copy in found["copies"]:
        if not copy["works"]:
            ends = f"{copy['local']} and {copy['remote']}"
            yield f"copies between {ends} memory FAILED: {copy['why_not']}"
    for device in found["cuda"].get("devices", []):
        for restriction in device.get("restrictions", []):
            yield f"GPU {device['id']} is restricted by {restriction}"
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
    links = [count for count in limits["links_by_open_files"].values() if count is not None]
    if links and min(links) < _FEW_LINKS:
        soft, hard = limits["open_files"]["soft"], limits["open_files"]["hard"]
        yield (f"{soft} open files are enough for {min(links)} links: ulimit -n (at most {hard})")


_WIDTH: Final = 110
Found = dict[str, Any]


def outline(found: Found, indent: int = 0) -> Iterator[str]:
    """Yield findings as lines, by the names of `--json`; leave out empty ones."""
    for name, value in found.items():
        entries = value if isinstance(value, list) else [value]
        if any(isinstance(entry, dict) for entry in entries):
            for lines in ([*outline(entry, indent + 2)] for entry in entries):
                yield from [f"{' ' * indent}{name}", *lines] if lines else []
        elif text := "; ".join(map(_word, filter(_is_known, entries))):
            yield wrapped(name, text, 22 - indent, indent - 2)


def _is_known(value: object) -> bool:
    return value is not None and value != ""


def _word(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def tuning_text(tuning: Found) -> str:
    """Return a tuning in words: "2 threads, past the caches from 16 MiB on"."""
    mib = tuning["bypass_nbytes"] / (1 << 20)
    bypass = f", past the caches from {mib:g} MiB on" if mib < 1 << 40 else ""
    return f"{tuning['threads']} threads{bypass}"


def tuned_text(tuning: Found) -> str:
    """Return a tuning in words, with its source."""
    if tuning["why_not"]:
        return f"not known: {tuning['why_not']}"
    measured = tuning["measured"]
    how = f"measured on {measured[:10]}" if measured else tuning["source"]
    return f"{tuning_text(tuning)} ({how})"


def wrapped(name: str, text: str, width: int = 14, indent: int = 0) -> str:
    """Return a named text, wrapped below its beginning; names have `width` columns."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=f"{' ' * (indent + 2)}{name:<{width}}  ",
        subsequent_indent=" " * (width + 4 + indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
