"""How ``Model.train`` ends for ttp's callback, and what a rank does not write or does not compare."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ttp import api, session
from ttp.adapters.mindspore import callbacks
from ttp.adapters.mindspore.callbacks import Protection
from ttp.adapters.mindspore.local_state import LocalState, Position
from ttp.adapters.mindspore.source import MindSporeSource, inspected
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import Phase
from ttp.errors import CheckpointError
from ttp.processor.source import Cancelled

pytestmark = pytest.mark.xdist_group("mindspore")

# -------------------------------------------------------------------------------------------------------- the callback


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a session that notes how the training of this rank ended."""
    made = Mock()
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1}")
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    monkeypatch.setattr(session, "current", lambda: made)
    monkeypatch.setattr(session, "reset", made.reset)
    monkeypatch.setattr(callbacks, "_decorated", lambda: False)
    return made


def protection() -> Any:
    made: Any = Protection("d")
    made._adapter = Mock(between_trainings=ExitStack())
    return made


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (KeyboardInterrupt(), "left"), (SystemExit(0), "left"), (SystemExit(), "left"), (SystemExit(3), "raised"),
        (ValueError("mine"), "raised"), (GeneratorExit(), ""),
    ],
)  # fmt: skip
def test_an_exception_of_the_training_is_reported_and_the_wish_of_the_user_to_end_it_is_none(
    ends: Any, problem: BaseException, told: str
) -> None:
    """Whatever it is, the callback lets go of the network: it may be trained again."""
    callback = protection()
    adapter = callback._adapter
    callback.__exit__(type(problem), problem, None)
    assert [call[0] for call in ends.method_calls if call[0] != "reset"] == [told] * bool(told)
    assert adapter.detach.called and callback._adapter is None and ends.reset.called


def test_a_training_that_ended_well_or_was_not_protected_reports_nothing(ends: Any) -> None:
    callback = protection()
    callback.__exit__(None, None, None)
    callback._adapter = None
    callback.__exit__(ValueError, ValueError(), None)
    callback.on_train_end(Mock())
    callback.on_train_step_begin(Mock())
    callback.on_train_step_end(Mock())
    assert not ends.method_calls


def test_between_the_trainings_of_a_decorated_function_the_rank_stays_in_the_job(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may prepare the next data set for minutes, which is no hang."""
    paused: list[str] = []

    def pause(what: str) -> ExitStack:
        paused.append(what)
        return ExitStack()

    callback = protection()
    adapter = callback._adapter
    monkeypatch.setattr(callbacks, "_decorated", lambda: True)
    monkeypatch.setattr(api, "paused", pause)
    callback.on_train_end(Mock())
    assert paused == ["between trainings"] and not ends.method_calls and not adapter.detach.called
    callback._adapter = adapter
    callback.__exit__(ValueError, ValueError("mine"), None)
    assert ends.raised.called and not ends.reset.called, "the decorator ends the session"
    callback._adapter = None
    callback._forget()


# ---------------------------------------------------------------------------------------------------------- the source


def source(*, on_host: bool = True, phase: Phase = Phase.IDLE, digest: str = "all") -> Any:
    made: Any = MindSporeSource(Mock(on_host=on_host, held={}), Mock(), ())
    made._processor = SimpleNamespace(
        config=SimpleNamespace(digest=digest), env=SimpleNamespace(rank=0), layout=Layout.data_parallel(2),
        gate=SimpleNamespace(version=Version(6), state=lambda: SimpleNamespace(phase=phase, version=6, parked=True)),
        broken=False,
    )  # fmt: skip
    return made


LOCAL = LocalState(Position(2, 6, 4), True, (b"",) * 4, b"", {})


def test_a_copy_is_nothing_to_go_back_to_while_an_update_writes() -> None:
    found = source(phase=Phase.UPDATING)
    assert not found.has_preimage
    found.preimage = SimpleNamespace(version=Version(5))
    assert not found.has_preimage and found.gradient_ready()
    found._processor.gate.state = lambda: SimpleNamespace(phase=Phase.IDLE, version=6)
    assert found.has_preimage


@pytest.mark.parametrize("how", [{"on_host": False}, {"digest": "off"}])
def test_replicas_are_not_compared_where_it_is_switched_off_or_would_wait_for_a_device(how: dict[str, Any]) -> None:
    """A device may hang in a collective, and a rank that waits for it saves nothing."""
    assert source(**how).inspect(Version(6)) == ((), ())
    assert [shard.shard for shard in source().inspect(Version(6))[0]] == [Shard("model")]


def test_parameters_with_numbers_that_are_none_are_named() -> None:
    def held(name: str, *values: float) -> Any:
        array = np.array(values, np.float32)
        return SimpleNamespace(name=name, array=array, dtype="Float32", shape=array.shape)

    assert inspected([held("good", 1.0), held("bad", 1.0, np.nan), held("worse", np.inf)], 6, "all")[1] == (
        "bad",
        "worse",
    )


def test_a_state_that_cannot_be_told_of_the_asked_version_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkpoint of two versions, or at an unknown position in the data, would not resume bit for bit."""
    found = source()
    with pytest.raises(CheckpointError, match="holds version 6, not version 5"):
        list(found._entries(Version(5), LOCAL, False))
    pages = SimpleNamespace(data={}, missing={Rank(0): "there is no page of rank 0"})
    monkeypatch.setattr(found, "read_pages", lambda *_: pages)
    with pytest.raises(
        CheckpointError, match="position of version 6 in the data is unknown: there is no page of rank 0"
    ):
        found._local(Version(6))
    with pytest.raises(Cancelled):
        found._write_rank(tmp_path, Shard("model"), Rank(0), Version(6), LOCAL, False, lambda: True)
    assert not list(tmp_path.iterdir())


def test_a_saver_writes_only_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another rank writes the pages and the state of the job."""
    found = source()
    monkeypatch.setattr(found, "_local", lambda _: LOCAL)
    monkeypatch.setattr(found, "wait_post_step", lambda _: None)
    order: Any = SimpleNamespace(how=None, shards=(), rank=Rank(0), pages=(), job_state=False)
    ask = {"version": Version(6), "draft": tmp_path, "generation": 0, "cancelled": lambda: False}
    assert found.write_pieces(order=order, **ask) == []
    order.job_state = True
    assert [piece.kind for piece in found.write_pieces(order=order, **ask)] == ["job"]
