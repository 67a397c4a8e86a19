"""Texts of `kvplan info`: the verdict, and the details of `-v`."""

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
    """Sum up the findings in 3 to 9 lines. The first says whether kvplan works."""
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
    lines.append(
        (wrapped("accelerator", _accelerator_found(found["accelerator"], found["cuda"])), "")
    )
    lines.append((wrapped("RDMA", _rdma(found, usable)), ""))
    lines.append((wrapped("copies", tuned_text(found["copies_tuned"])), ""))
    if it := found["stopped"]:
        text = f"{it['step']}: {it['reason']}; -v says more"
        lines.append((wrapped("NOT LOOKED AT", text), "yellow"))
    lines += [(wrapped("to do", text), "yellow") for text in _to_do(found)]
    return Verdict(bool(usable) and not broken, lines)


def _means(usable: Found, names: tuple[str, ...]) -> str:
    """Return `shared memory (local), else sockets (tcp)`, in the order of preference."""
    found = [f"{_MEANS[it]} ({it})" for it in names if it in usable]
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
    """Yield changes that would improve the machine, except for missing hardware."""
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


_WIDTH: Final = 110
_NAME: Final = 10
Found = dict[str, Any]


def render(found: Found) -> str:
    """Return all findings as lines."""
    parts = (
        _host, _accelerator, _cuda, _ucx, _copies, _transports, _tuned, _user_key, _limits, _pages,
        _stopped,
    )  # fmt: skip
    return "\n".join(line for part in parts for line in part(found)) + "\n"


def _host(found: Found) -> Iterator[str]:
    python, system = found["python"], found["platform"]
    yield f"kvplan {found['kvplan']}"
    yield _row(
        "python", f"{python['version']} ({python['implementation']}), {python['executable']}"
    )
    yield _row(
        "platform",
        f"{system['system']}, {system['machine']}, {system['libc']}, {system['cores']} cores",
    )
    modules = found["native_modules"]
    broken = {name: why for name, why in modules.items() if why}
    yield _row("native", f"{len(modules) - len(broken)} of {len(modules)} modules load")
    yield from (_row("", f"{name}: {why}") for name, why in broken.items())


def _accelerator(found: Found) -> Iterator[str]:
    it = found["accelerator"]
    yield ""
    if "devices" not in it:
        yield _heading("accelerator: none", it.get("why_not"))
        yield from _places(it.get("places", []))
    else:
        count = it["num_devices"]
        yield f"accelerator: {it['soc']}, {count} device{'' if count == 1 else 's'}"
    if "library" in it:
        yield _row("ACL", f"{it['library']}, CANN {it['version'] or '(of unknown version)'}")
        batch = "there" if it["has_batch"] else "not there: one call for each descriptor"
        yield _row("batch copy", batch)
        yield from _missing(it["missing"])
    for device in it.get("devices", []):
        yield _row(f"device {device['id']}", _device(device))
    if "hccl" in it:
        yield from _hccl(it["hccl"])
    if "devices" in it and "why_not" in it:
        yield _row("", it["why_not"])


def _cuda(found: Found) -> Iterator[str]:
    it = found["cuda"]
    yield ""
    if "devices" not in it:
        yield _heading("CUDA: none", it.get("why_not"))
    else:
        count = it["num_devices"]
        yield f"CUDA: {count} device{'' if count == 1 else 's'}"
    if "library" in it:
        driver = f"driver {it['driver']}, " if it["driver"] else ""
        yield _row("library", f"{it['library']}, {driver}of CUDA {it['version']}")
    if it.get("missing"):
        yield _row("", f"lacks {', '.join(it['missing'])}")
    for device in it.get("devices", []):
        yield _row(f"device {device['id']}", _cuda_device(device))
        for direction, how in device.get("copies", {}).items():
            yield _row("", f"{direction.replace('_', ' ')}: {how}")
        if "peer_access" in device and it["num_devices"] > 1:
            yield _row("", f"peer access: {_peers(device, it['num_devices'])}")
        if reason := device.get("fallback"):
            yield _row("", f"not the fastest way: {reason}")
    if "devices" in it and "why_not" in it:
        yield _row("", it["why_not"])


def _peers(device: Found, num_devices: int) -> str:
    """Return the other devices that a device reaches, and those that need tcp."""
    reached = device["peer_access"]
    lacking = [it for it in range(num_devices) if it not in (device["id"], *reached)]
    parts = [f"to {', '.join(map(str, reached))}"] if reached else []
    if lacking:
        parts.append(f"none to {', '.join(map(str, lacking))}: use kvplan.transport=tcp")
    return "; ".join(parts)


def _cuda_device(it: Found) -> str:
    if "name" not in it:
        return str(it["why_not"])
    return "; ".join(
        [
            f"{it['name']} (compute capability {it['capability']})",
            f"{_gib(it['free_bytes'])} of {_gib(it['total_bytes'])} GiB free",
            f"{it['pci']}, {it['uuid']}",
        ]
    )


def _device(it: Found) -> str:
    if "soc" not in it:
        return str(it["why_not"])
    product = "no one-sided transfers"
    if it["product"]:
        product = f"{it['product']}, {it['max_batch']} descriptors a batch of HCCL"
    parts = [
        f"{it['soc']} ({product}), physical {it['physical_id']}",
        f"{_gib(it['free_bytes'])} of {_gib(it['total_bytes'])} GiB free",
        f"HDK {it['driver'] or 'of unknown version'}",
    ]
    if address := it.get("address"):
        ip = address["device_ip"] or "no address: peers on this host only"
        parts.append(f"network {ip}")
    if reason := it.get("no_address"):
        parts.append(reason)
    return "; ".join(parts)


def _hccl(it: Found) -> Iterator[str]:
    if "library" in it:
        how = {
            "global": "memory is registered once for all links",
            "per_comm": "memory is registered with each link",
        }
        yield _row("HCCL", f"{it['library']}; {how.get(it['generation'], it['generation'])}")
        if it["missing"]:
            yield _row("", f"lacks {', '.join(it['missing'])}")
        return
    yield _row("HCCL", f"none: {it['why_not']}")
    yield from _places(it["places"])


def _missing(missing: list[Found]) -> Iterator[str]:
    for it in missing:
        yield _row("", f"lacks {it['name']}" + (f": {it['cost']}" if it["cost"] else ""))


def _places(places: list[Found]) -> Iterator[str]:
    for it in places:
        has = ", ".join(it["has"]) or "nothing there"
        path = it["path"] or "(empty)"
        yield _row("looked at", f"{path} ({it['origin']}): {has}")


def _ucx(found: Found) -> Iterator[str]:
    it = found["ucx"]
    yield ""
    if "version" not in it:
        yield _heading("UCX: none", it.get("why_not") if "library" in it else None)
        yield from _places(it.get("places", []))
    else:
        yield f"UCX {it['version']}"
    if "library" in it:
        yield _row("library", f"{it['library']} ({it['source']})")
        modules = ", ".join(it["modules"]) or "none"
        yield _row("modules", f"{modules}; shared memory is built in")
    if settings := it.get("environment"):
        yield _row("set", " ".join(f"{name}={value}" for name, value in settings.items()))
    if "finds" in it:
        yield _row("finds", ", ".join(it["finds"]) or "nothing")
    if missing := it.get("missing_for_rdma"):
        yield _row("no RDMA", "; ".join(missing))
    if "over" in it:
        yield _row("over", ", ".join(it["over"]))
    if "copy" in it:
        yield _row("tried", _tried(it["copy"]))
    elif "version" in it and "why_not" in it:
        yield _row("FAILED", it["why_not"])


def _tried(it: Found) -> str:
    text = f"between two ends of one process, {it['way'] or 'which were not linked'}: "
    return text + ("all blocks arrived correctly" if it["works"] else f"FAILED: {it['why_not']}")


def _copies(found: Found) -> Iterator[str]:
    yield ""
    yield "inside one process"
    for it in found["copies"]:
        text = it["note"] if it["works"] else f"FAILED: {it['why_not']}"
        if it["works"] and it["remote"] == "device" != it["local"] and it["one_by_one"]:
            text = f"asynchronous copies, one by one: {it['one_by_one']}"
        yield _row("", f"{it['local']:<6} <-> {it['remote']:<6}  {text}", indent=20)


def _transports(found: Found) -> Iterator[str]:
    yield ""
    yield "between processes: the first that works at both ends is used (kvplan.transport=auto)"
    for it in found["transports"]:
        if not it["works"]:
            yield _row(it["name"], f"cannot be used: {it['why_not']}")
            continue
        yield _row(it["name"], f"works; peers reach {' and '.join(it['reaches'])} memory here")
        for way in it["ways"]:
            ends = f"local {way['local']:<6} remote {way['remote']:<6}"
            text = f"{way['how']}: {way['note']}" if way["note"] else way["how"]
            yield _row("", f"{ends}  {text}", indent=29)
        if tried := it.get("tried"):
            yield _row(
                "",
                f"tried between two engines of one process ({tried}): all blocks arrived correctly",
            )


def tuning_text(it: Found) -> str:
    """Return a tuning in words: "2 threads, past the caches from 16 MiB on"."""
    mib = it["bypass_nbytes"] / (1 << 20)
    bypass = f", past the caches from {mib:g} MiB on" if mib < 1 << 40 else ""
    return f"{it['threads']} threads{bypass}"


def tuned_text(it: Found) -> str:
    """Return a tuning in words, with its source."""
    if it["why_not"]:
        return f"not known: {it['why_not']}"
    how = f"measured on {it['measured'][:10]}" if it["measured"] else it["source"]
    return f"{tuning_text(it)} ({how})"


def _tuned(found: Found) -> Iterator[str]:
    it = found["copies_tuned"]
    yield ""
    yield f"plain copies: {tuned_text(it)}"
    if it["why_not"]:
        return
    yield from (_row("", reason) for reason in it["reasons"])
    if it["note"]:
        yield _row("not used", it["note"])


def _user_key(found: Found) -> Iterator[str]:
    it = found["user_key"]
    yield ""
    yield "links inside this host: without kvplan.cluster_key_file, engines with this user's key"
    yield _row("key", it["path"] + ("" if it["is_made"] else ": is made at first use"))
    if it["why_not_home"]:
        yield _row("", f"not below the home: {it['why_not_home']}")
    if it["why_not"]:
        yield _row("FAILED", it["why_not"])


def _limits(found: Found) -> Iterator[str]:
    it = found["limits"]
    files, scope = it["open_files"], it["ptrace_scope"]
    links = ", ".join(f"{count} over {name}" for name, count in it["links_by_open_files"].items())
    yield ""
    yield "limits"
    if files["soft"] < 0:
        yield _row("open files", "unlimited")
    else:
        many = f"{files['soft']} (at most {files['hard']}): about so many links: {links}"
        yield _row("open files", many)
    if (free := it["shared_memory_free_bytes"]) is not None:
        yield _row("/dev/shm", f"{_gib(free)} GiB free")
    if scope:
        what = "only with kvplan.permit_any_peer" if scope == 1 else "not at all"
        yield _row("Yama", f"ptrace_scope {scope}: peers reach registered host memory {what}")


def _pages(found: Found) -> Iterator[str]:
    it = found["pages"]
    hugetlb, nodes = it["hugetlb"], it["numa_nodes"]
    huge = {True: "made of prefaulted memory", False: "not made now", None: "not known"}
    yield ""
    yield f"pages of {it['nbytes'] >> 10} KiB"
    ahead = "peers' pages are mapped ahead" if it["populates"] else "at first use"
    yield _row("populate", ahead if not it["why_not"] else f"FAILED: {it['why_not']}")
    yield _row("huge", f"{huge[it['huge']]}; shmem_enabled is {it['shmem_enabled'] or 'not there'}")
    if size := hugetlb["nbytes"]:
        free = f"{hugetlb['free']} free of {hugetlb['total']} reserved (vm.nr_hugepages)"
        yield _row("hugetlb", f"{free}, of {size >> 10} KiB")
    if nodes:
        cores = ", ".join(f"node {node}: {count} cores" for node, count in nodes.items())
        yield _row("NUMA", cores)


def _stopped(found: Found) -> Iterator[str]:
    if it := found["stopped"]:
        yield ""
        yield _heading(f"NOT ALL WAS LOOKED AT: {it['step']}", it["reason"])
        yield from (f"  | {line}" for line in it["said"])


def _heading(title: str, reason: str | None) -> str:
    return textwrap.fill(f"{title}: {reason}" if reason else title, _WIDTH, subsequent_indent="  ")


def _row(name: str, text: str, indent: int = 0) -> str:
    return wrapped(name, text, _NAME, indent)


def wrapped(name: str, text: str, width: int = 14, indent: int = 0) -> str:
    """Return a named text, wrapped below its beginning; names have `width` columns."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=f"  {name:<{width}}  ",
        subsequent_indent=" " * (width + 4 + indent),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f}"
