"""Sockets where members of link(comm_name, ...) meet on one host, and their directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvplan import LLMException
from kvplan.control.endpoint import MAX_PATH
from kvplan.engine.options import Options
from kvplan.links import RegisterMemStatus
from kvplan.links.rendezvous import Location, meeting_point, socket_directory
from kvplan.system.users import runtime_directory
from tests.links.end import End, settle
from tests.support.refusals import refused

MakeEnd = Callable[..., End]
FAILED = RegisterMemStatus.FAILED


def test_sockets_are_in_the_absolute_runtime_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path / "kvplan"
    for ignored in ("", "run", "./run"):  # it would depend on the current directory
        monkeypatch.setenv("XDG_RUNTIME_DIR", ignored)
        assert runtime_directory() == Path(f"/tmp/kvplan-{os.geteuid()}")


@pytest.mark.parametrize("nbytes", [81, 82])
def test_a_runtime_directory_with_too_long_a_path(
    make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """The default of comm_dir needs 7 more bytes. Members on other hosts do not need it."""
    runtime = "/" + (nbytes - 1) * "r"
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    end = make_end(2, listen="")
    hosts = [
        {"server_id": f"127.0.0.{host}", "device": [{"rank_id": str(host)}]} for host in (1, 2)
    ]
    table = json.dumps({"version": "1.2", "server_list": hosts})
    end.links.comm_unlink(end.links.comm_link("far", {1: 1, 2: 2}, table))
    why = f"XDG_RUNTIME_DIR/kvplan='{runtime}/kvplan' has {nbytes + 7} bytes; at most 88 "
    why += "are allowed, as paths of sockets in it have at most 107: set kvplan.comm_dir"
    with refused("LLM_PARAM_INVALID", why) if nbytes == 82 else nullcontext():
        end.links.comm_unlink(end.links.comm_link("near", {1: 1, 2: 1}))


def test_a_directory_that_others_may_use(make_end: MakeEnd, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    end = make_end(1, listen="", comm_dir=str(tmp_path))
    comm_id = end.links.comm_link("name", {1: 0, 2: 1})
    assert settle(end, comm_id) is FAILED


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_below_one_that_others_may_write_to(
    make_end: MakeEnd, short_folder: Path, mode: int
) -> None:
    """Others could replace the directory, but not in a sticky one."""
    shared, between = short_folder / "shared", short_folder / "shared" / "between"
    between.mkdir(parents=True)
    shared.chmod(mode)
    end = make_end(1, listen="", comm_dir=str(between / "own"))
    assert settle(end, end.links.comm_link("name", {1: 0, 2: 1})) is FAILED
    with pytest.raises(LLMException, match=rf"{shared}, which others.*chmod go-w {shared}"):
        end.links.get(2)
    own = short_folder / "own"
    own.mkdir(0o700)
    (shared / "link").symlink_to(short_folder)
    with pytest.raises(LLMException, match=f"{shared}, which others"):
        socket_directory(str(shared / "link" / "own"))
    shared.chmod(0o1777)
    assert socket_directory(str(between / "own")) == between / "own"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_in_one_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(0o755)
    os.chown(theirs, 12345, -1)
    with pytest.raises(LLMException, match=f"is inside {theirs} of user 12345"):
        socket_directory(str(theirs / "own"))


def test_a_directory_that_is_spoiled_while_members_are_awaited_fails(
    make_end: MakeEnd, comm_dir: str
) -> None:
    end = make_end(1, listen="", comm_dir=comm_dir, link_total_time=2)
    comm_id = end.links.comm_link("name", {1: 0, 2: 1})
    while not any(path.is_socket() for path in Path(comm_dir).glob("*")):
        os.sched_yield()
    Path(comm_dir).chmod(0o755)
    assert settle(end, comm_id) is FAILED
    with pytest.raises(LLMException, match="has mode 0755"):
        end.links.get(2)


@pytest.mark.parametrize("cluster_id", [1, 2**64 - 1])
def test_sockets_of_any_cluster_have_room_in_the_longest_directory(
    short_folder: Path, cluster_id: int
) -> None:
    options = Options.of({"kvplan.comm_dir": f"{short_folder}/".ljust(88, "a")})
    here = Location("", 0)
    path = meeting_point(here, here, "n" * 127, cluster_id, options).path
    assert path is not None
    assert len(path) == MAX_PATH
