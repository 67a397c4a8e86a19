"""An agent whose process was replaced by another one at the same address."""

from __future__ import annotations

import pytest

from kvplan.nixl import nixl_agent
from kvplan.nixl._bindings import nixlRemoteDisconnectError
from tests.support.ports import free_port


def test_metadata_of_a_replaced_process_makes_no_link_with_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each refused call would leave notifications in the successor's queue."""
    here = nixl_agent("here")
    monkeypatch.setenv("KVPLAN_LISTEN_IP_INFO", f"127.0.0.1:{free_port()}")
    old = nixl_agent("there")
    here.add_remote_agent(old.get_agent_metadata())
    here.make_connection("there")
    old.agent.close()
    new = nixl_agent("there")
    try:
        for call in (
            lambda: here.make_connection("there"),
            lambda: here.send_notif("there", b"message"),
        ):
            with pytest.raises(nixlRemoteDisconnectError, match="is another process now"):
                call()
            assert not new.agent.engine.datadist.links()
        here.add_remote_agent(new.get_agent_metadata())
        here.send_notif("there", b"message")
        assert new.get_new_notifs() == {"here": [b"message"]}
    finally:
        for agent in (here, new):
            agent.agent.close()
