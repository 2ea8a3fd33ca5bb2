"""The entry point for torchrun, and torch versions that lack what it needs."""

from __future__ import annotations

import inspect
import logging
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry as registry
from torch.distributed.launcher import api as launcher_api

from ttp.launch import plugin, torch_compat

api: Any = launcher_api
PYPROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"


@pytest.fixture(autouse=True)
def undo(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    """Restore what the plug-in replaces."""
    monkeypatch.setattr(registry, "create_handler", type(registry).create_handler.__get__(registry))
    monkeypatch.setattr(api, "LocalElasticAgent", LocalElasticAgent)
    monkeypatch.setattr(os, "environ", dict(environ))


def create_handler() -> Any:
    """Do what torch does just before it makes the agent; the backend does not exist."""
    with pytest.raises(ValueError, match="not registered"):
        registry.create_handler(type("Parameters", (), {"backend": "none"}))  # type: ignore[arg-type,unused-ignore]
    return api.LocalElasticAgent


def test_the_entry_point_is_declared() -> None:
    declared = re.search(r'entry-points\."torchrun.handlers"\]\nttp = "(.*)"', PYPROJECT.read_text())
    assert declared is not None
    assert declared[1] == f"{plugin.__name__}:{plugin.handler.__name__}"


def test_without_port_nothing_is_touched() -> None:
    before = registry.create_handler
    plugin.handler()
    assert registry.create_handler == before
    assert create_handler() is LocalElasticAgent


def test_with_port_the_agent_is_ours(unused_port: int) -> None:
    os.environ["TTP_PORT"] = str(unused_port)
    plugin.handler()
    plugin.handler()  # a second time changes nothing
    assert getattr(create_handler(), "of_ttp", False)
    ours = api.LocalElasticAgent
    assert create_handler() is ours
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_what_the_user_has_chosen_stays(unused_port: int) -> None:
    chosen = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    os.environ.update(TTP_PORT=str(unused_port), **chosen)
    plugin.handler()
    create_handler()
    assert {name: os.environ[name] for name in chosen} == chosen


def test_there_is_no_such_backend() -> None:
    with pytest.raises(ValueError, match="not a rendezvous backend"):
        plugin.handler()(None)


@pytest.mark.parametrize("env", [{"TTP_PORT": "abc"}, {"TTP_PROT": "1"}])
def test_bad_settings_leave_torchrun_as_it_is(env: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """The ranks report the same error and fail."""
    os.environ.update({"TTP_PORT": "29999"} | env)
    plugin.handler()
    assert create_handler() is LocalElasticAgent
    assert "ttp could not extend torchrun" in caplog.text


def test_somebody_elses_agent_is_left_alone(
    unused_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["TTP_PORT"] = str(unused_port)
    other = type("Other", (), {})
    monkeypatch.setattr(api, "LocalElasticAgent", other)
    plugin.handler()
    assert create_handler() is other
    assert "another package has replaced torch's agent" in caplog.text


def test_this_torch_is_as_we_know_it() -> None:
    """If a new torch fails here, first look at what differs and at ttp/launch/agent.py."""
    assert torch_compat.differences() == []


def _without_signal(self: Any) -> None:
    """Stand in for a ``_shutdown`` with another signature."""


@pytest.mark.parametrize(
    ("name", "replacement"),
    [("_shutdown", _without_signal), ("_monitor_workers", _without_signal), ("_stop_workers", _without_signal)],
)
def test_another_torch_is_left_alone_with_one_warning(
    name: str, replacement: Any, unused_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LocalElasticAgent, name, replacement)
    os.environ["TTP_PORT"] = str(unused_port)
    plugin.handler()
    assert create_handler() is LocalElasticAgent
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert name in warnings[0].getMessage()


def test_a_torch_without_elastic_agent_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(api, "launch_agent")
    assert "launch_agent" in torch_compat.differences()[0]


def test_an_event_of_the_rendezvous_is_named_without_a_look_at_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    record = MagicMock()
    monkeypatch.setattr(dynamic_rendezvous, "construct_and_record_rdzv_event", record)
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", dynamic_rendezvous.get_method_name)
    monkeypatch.setattr(inspect, "stack", lambda *_: pytest.fail("every module is looked at"))
    torch_compat.name_methods_quickly()
    executor = dynamic_rendezvous._DistributedRendezvousOpExecutor(MagicMock(), MagicMock(), MagicMock())
    executor._state = MagicMock()
    executor._keep_alive()
    assert record.call_args.kwargs["name"] == "_DistributedRendezvousOpExecutor._keep_alive"


def test_expectations_cover_what_the_agent_uses() -> None:
    """Each private name of torch that agent.py uses is checked before the agent is replaced."""
    source = inspect.getsource(__import__("ttp.launch.agent", fromlist=["x"]))
    private = set(re.findall(r"super\(\)\.(_\w+)|self\.(_pcontext)|\.(subprocess_handlers)", source))
    checked = inspect.getsource(torch_compat)
    for name in {next(filter(None, groups)) for groups in private}:
        assert name in checked
