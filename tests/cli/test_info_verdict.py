"""The first lines of `kvplan info`, for machines of many kinds."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan.cli.info.text import verdict


@pytest.fixture
def found() -> dict[str, Any]:
    """Findings of a host without accelerator or RDMA, where everything else works."""
    no_rdma = "this host has no RDMA device"
    return {
        "kvplan": "1.2.3",
        "native_modules": {"_executor": "", "_host": ""},
        "accelerator": {"places": [{"has": []}], "why_not": "no library"},
        "cuda": {"why_not": "no library"},
        "ucx": {"version": "1.22.0", "missing_for_rdma": [no_rdma, "built without verbs"]},
        "copies": [{"local": "host", "remote": "host", "works": True, "why_not": ""}],
        "transports": [
            {"name": "hccl", "works": False, "why_not": "there is no accelerator"},
            {"name": "local", "works": True},
            {"name": "ucx", "works": False, "why_not": no_rdma},
            {"name": "tcp", "works": True},
        ],
        "copies_tuned": {
            "why_not": "",
            "bypass_nbytes": 24 << 20,
            "threads": 2,
            "source": "built in",
            "measured": None,
            "note": "",
        },
        "user_key": {"why_not": ""},
        "limits": {
            "open_files": {"soft": 1024, "hard": 4096},
            "links_by_open_files": {"local": 170, "tcp": 146},
            "ptrace_scope": 0,
        },
        "stopped": None,
    }


def lines(found: dict[str, Any], *, works: bool = True) -> list[str]:
    summary = verdict(found)
    assert summary.works is works
    text = [line for line, _ in summary.lines]
    assert all(line.startswith("  ") and line[2] != " " for line in text[1:])
    assert max(len(part) for line in text for part in line.splitlines()) <= 110
    return [" ".join(item.split()) for item in text]


def test_a_plain_host(found: dict[str, Any]) -> None:
    assert lines(found) == [
        "kvplan 1.2.3 works here",
        "in this host shared memory (local), else sockets (tcp)",
        "across hosts sockets (tcp)",
        "accelerator none: found neither the Ascend library (ACL) nor CUDA",
        "RDMA none: this host has no RDMA device",
        "copies 2 threads, past the caches from 24 MiB on (built in)",
    ]


def test_a_host_that_has_everything(found: dict[str, Any]) -> None:
    for entry in found["transports"]:
        entry |= {"works": True, "tried": "rc_mlx5/mlx5_0:1"}
    found["ucx"] = {"version": "1.18.0", "missing_for_rdma": []}
    devices = [{"name": "Ascend910B"}, {"why_not": "busy"}]
    found["accelerator"] = {
        "soc": "Ascend910B", "num_devices": 2, "version": "8.5.0", "devices": devices, "places": [],
    }  # fmt: skip
    assert lines(found)[1:] == [
        "in this host HCCL between devices (hccl), else shared memory (local), else sockets (tcp)",
        "across hosts HCCL between devices (hccl), else RDMA (ucx), else sockets (tcp)",
        "accelerator Ascend910B, 1 of 2 devices can be opened, CANN 8.5.0",
        "RDMA by UCX 1.18.0, over rc_mlx5/mlx5_0:1",
        "copies 2 threads, past the caches from 24 MiB on (built in)",
    ]


def test_how_copies_are_made(found: dict[str, Any]) -> None:
    entry = found["copies_tuned"]
    entry.update(source="measured", measured="2026-11-25T18:50:00Z")
    assert lines(found)[-1] == (
        "copies 2 threads, past the caches from 24 MiB on (measured on 2026-11-25)"
    )
    entry.update(source="built in", measured=None, note="/a/file: it is not a file")
    assert lines(found)[-1] == "to do copies are as built in: /a/file: it is not a file"
    found["copies_tuned"] = {"why_not": "no module"}
    assert lines(found)[-1] == "copies not known: no module"


def test_a_native_module_that_does_not_load(found: dict[str, Any]) -> None:
    found["native_modules"]["_host"] = "gone"
    assert lines(found, works=False)[0] == (
        "kvplan 1.2.3 does not work here: 1 of 2 native modules do not load: _host: gone"
    )


def test_without_any_transport(found: dict[str, Any]) -> None:
    for entry in found["transports"]:
        entry |= {"works": False, "why_not": "refused"}
    assert "does not work here: no transport does" in lines(found, works=False)[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"ucx": {"missing_for_rdma": ["the library is built without verbs"]}},
            "the library is built without verbs",
        ),
        ({"user_key": {"why_not": "its mode is 0644"}}, "FAIL without a key file: its mode is"),
        ({"limits": {"ptrace_scope": 1}}, "set kvplan.permit_any_peer where memory is registered"),
        ({"limits": {"ptrace_scope": 3}}, "ptrace_scope is 3: registered memory is reached by tcp"),
        (
            {"limits": {"links_by_open_files": {"local": 42, "tcp": 36}}},
            "1024 open files are enough for 36 links: ulimit -n (at most 4096)",
        ),
    ],
    ids=["verbs", "key", "yama", "yama-3", "files"],
)
def test_the_report_ends_with_things_to_do(
    found: dict[str, Any], change: dict[str, Any], expected: str
) -> None:
    for name, part in change.items():
        found[name] |= part
    (said,) = [line for line in lines(found) if line.startswith("to do ")]
    assert expected in said


def test_findings_that_are_incomplete(found: dict[str, Any]) -> None:
    found["transports"] = []
    found["stopped"] = {"step": "opening the ACL library", "reason": "ended with SIGABRT"}
    said = lines(found, works=False)
    assert said[0].startswith("kvplan 1.2.3 may not work here")
    assert "NOT CHECKED opening the ACL library: ended with SIGABRT; -v says more" in said
