"""The seats that a launcher fills: what an operator says meanwhile."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.multiprocessing import SignalException

from ttp.config import Config
from ttp.launch.seats import Seats


@pytest.mark.parametrize("problem", [SignalException("stop", signal.SIGTERM), RuntimeError("no memory")])
def test_a_signal_that_comes_while_seats_are_filled_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    """torch's agent gets it as an exception; anything else that goes wrong is a start of all."""
    ended: list[str] = []
    group = SimpleNamespace(group_world_size=1, spec=SimpleNamespace(max_restarts=1))
    agent: Any = SimpleNamespace(_worker_group=group, _remaining_restarts=1)
    host: Any = SimpleNamespace(stop_going_on=lambda workers, why: ended.append(why))
    worker: Any = SimpleNamespace(poll=lambda: None)
    seats = Seats(agent, host, Config(continuity="keep"))

    def fill(*_: Any) -> None:
        raise problem

    monkeypatch.setattr(seats, "_fill", fill)
    if isinstance(problem, SignalException):
        with pytest.raises(SignalException):
            seats.fill({0: worker})
        assert not ended
    else:
        seats.fill({0: worker})
        assert ended == ["RuntimeError('no memory')"]
