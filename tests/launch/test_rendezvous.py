"""Torch's static rendezvous at a restart, with stores of this process."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from tests.waiting import until
from ttp.launch import rendezvous
from ttp.launch.rendezvous import FreshStoreRendezvous, missing_nodes

TCPStore: Any = torch.distributed.TCPStore  # type: ignore[attr-defined,unused-ignore] # not in its stubs
HOST = "127.0.0.1"


def nodes(count: int) -> tuple[Any, list[FreshStoreRendezvous]]:
    """Return the store of a static rendezvous and the rendezvous of each node."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    where = RendezvousStoreInfo(HOST, store.port)
    met = [RendezvousInfo(store, node, count, where) for node in range(count)]
    inner = [SimpleNamespace(next_rendezvous=lambda info=info: info) for info in met]
    return store, [FreshStoreRendezvous(each, HOST) for each in inner]


def test_a_restart_to_which_another_launcher_does_not_come_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its launcher was stopped. Torch's agents do not wait for one another, and the ranks wait for half an hour."""
    monkeypatch.setattr(rendezvous, "SAY_S", 0.0)
    caplog.set_level(logging.INFO, "ttp.launch")
    _, both = nodes(2)
    for each in both:
        assert each.next_rendezvous().bootstrap_store_info is not None
    assert not caplog.messages, "torch's agents wait for one another in the first attempt"
    both[0].next_rendezvous()
    until(lambda: caplog.messages)
    assert "node 1 (--node-rank) has not started its ranks again" in caplog.messages[0]


def test_nodes_that_have_come_are_not_missing() -> None:
    store, all_of_them = nodes(3)
    for _ in range(3):
        ports = {getattr(each.next_rendezvous().bootstrap_store_info, "master_port", None) for each in all_of_them}
        assert len(ports) == 1
    assert [missing_nodes(store, attempt, 3) for attempt in (1, 2)] == ["", ""]
    assert "node 0, 1, 2 (" in missing_nodes(store, 3, 3)
    for each in all_of_them:
        each._late.cancel()


def test_a_store_that_is_gone_is_nothing_to_tell() -> None:
    gone = SimpleNamespace(check=lambda _: (_ for _ in ()).throw(RuntimeError("Broken pipe")))
    assert missing_nodes(gone, 1, 2) == ""
