"""Values in a state of ``extra_state`` that are equal on all ranks survive the death of a rank in its update."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters.torch.stub_processor import Stateful
from tests.adapters.torch.test_local_piece import adapter
from tests.adapters.torch.test_states_of_peers import BIAS, Peers
from ttp.adapters.torch.local_state.image import BUFFER
from ttp.processor.local_state.local_piece import UpdateChanges
from ttp.store.encoding import encode, values_in
from ttp.store.manifest import Manifest


def progress_after(root: Path, *ranks: tuple[dict[str, Any], dict[str, Any] | None]) -> Path:
    """Let each rank have these states before and after an update; None: it dies in the update. Rank 0 saves."""
    job = Peers(root, len(ranks))
    for before, after in ranks:
        progress = Stateful(**before)
        capture = job.join({"progress": progress}).capture
        capture.capture(0, final=False)
        if after is not None:
            progress.state = after
            capture.capture(0, final=True)
    return job.save()


def progress_of(path: Path, rank: int, world_size: int) -> dict[str, Any]:
    progress = Stateful(nothing=None)
    adapter({"progress": progress}).load(path, rank, world_size, protected=False)
    return progress.state


def test_values_that_are_equal_on_all_ranks_are_lent_beside_those_of_the_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = progress_after(
        tmp_path,
        ({"step": 7, "best": 0.5, "cursor": 10}, {"step": 8, "best": 0.4, "cursor": 10}),
        ({"step": 7, "best": 0.5, "cursor": 20}, None),
        ({"step": 7, "best": 0.5, "cursor": 30}, {"step": 8, "best": 0.4, "cursor": 30}),
    )
    assert progress_of(path, 1, 3) == {"step": 8, "best": 0.4, "cursor": 20}
    assert "one update behind" not in caplog.text


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ({"step": 8, "loss": 0.1}, {"step": 8, "loss": 0.2}),  # each rank has its own
        ({"step": 8, "loss": 0.3}, {"step": 9, "loss": 0.4}),  # they disagree
        ({"step": 8, "loss": 0.3}, {"step": 7, "loss": 0.4}),  # one had nothing to count
        ({"step": 8, "loss": 0.3, "new": 1}, {"step": 8, "loss": 0.4, "new": 1}),
        ({"step": 8}, {"step": 8}),
    ],
)
def test_a_state_is_not_put_together_that_the_rank_never_had(
    first: dict[str, Any], last: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, dead = {"step": 7, "loss": 0.3}, {"step": 7, "loss": 0.5}
    path = progress_after(tmp_path, (before, first), (dead, None), (before | {"loss": 0.4}, last))
    assert progress_of(path, 1, 3) == dead
    assert "its extra_state ('progress') was captured before that update" in caplog.text


def test_values_that_could_be_had_and_those_that_hold_them_back_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of an epoch: a rank that does not know of it evaluates no more, and the others wait for it."""
    statistics = [{"mean": each / 2} for each in range(6)]
    path = progress_after(
        tmp_path,
        ({"epoch": 1, "since": 2, "best": statistics[0]}, {"epoch": 2, "since": 0, "best": statistics[1]}),
        ({"epoch": 1, "since": 2, "best": statistics[2]}, None),
        ({"epoch": 1, "since": 2, "best": statistics[4]}, {"epoch": 2, "since": 0, "best": statistics[5]}),
    )
    assert progress_of(path, 1, 3) == {"epoch": 1, "since": 2, "best": statistics[2]}
    (said,) = (each.getMessage() for each in caplog.records if "did not get the values of" in each.getMessage())
    assert caplog.records[-1].levelname == "WARNING"
    for text in (
        "extra_state['progress'] of rank 1 did not get the values of 'epoch', 'since', which are equal",
        "those of 'best' for it",
        "wait for each other",
        "move tft_saved_checkpoints-step_0 out of its directory",
    ):
        assert text in said


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (100, (0, 0)),  # only one rank counts what is logged: whether it has in this update is not known
        (np.ones(1 << 16), (0, 1)),  # values beside a large array are not compared
    ],
)
def test_a_value_that_a_rank_alone_may_have_changed_keeps_the_state_whole(
    own: Any, others: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    then = [{"step": 7, "logged": value} for value in others]
    path = progress_after(tmp_path, *((each, each | {"step": 8}) for each in then), ({"step": 7, "logged": own}, None))
    assert progress_of(path, 2, 3)["step"] == 7
    assert "its extra_state ('progress') was captured before that update" in caplog.text


def test_a_value_beside_a_large_array_is_not_taken_from_a_rank_that_had_another(tmp_path: Path) -> None:
    large, small = np.ones(1 << 16), 0
    path = progress_after(
        tmp_path, ({"step": 7, "kept": large * 2}, {"step": 8, "kept": small}), ({"step": 7, "kept": large}, None)
    )
    found = progress_of(path, 1, 2)
    assert found["step"] == 7 and np.array_equal(found["kept"], large)


def test_values_of_objects_that_no_update_changes_are_not_in_the_manifest(tmp_path: Path) -> None:
    state = {"seed": 1, "cursor": 2}
    path = progress_after(tmp_path, (state, state), (state, state))
    assert UpdateChanges(Manifest.load(path).pieces).names == ["progress"]


@pytest.mark.parametrize("kind", [BUFFER, "value:", "object:"])
def test_an_object_may_be_named_as_a_buffer_is(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Peers(tmp_path, 2)
    for rank in range(2):
        count = Stateful(n=1)
        each = job.join({kind + BIAS: count})
        dict(each._model.named_buffers())[BIAS].fill_(5 + 10 * rank)
        each.capture.capture(0, final=False)
        if rank == 0:
            count.state = {"n": 2}
            each.capture.capture(0, final=True)
    path = job.save()
    fresh = adapter({kind + BIAS: (count := Stateful(n=0))})
    fresh.load(path, 1, 2, protected=False)
    assert (count.state, int(dict(fresh._model.named_buffers())[BIAS])) == ({"n": 2}, 15)
    assert "before that update" not in caplog.text


def test_the_values_of_a_dict_are_found_without_decoding_them() -> None:
    state = {"step": 7, "losses": [0.5, 1.5], "rng": {"state": b"x" * 300, "n": (1, 2)}, "t\udc80": None}
    found = values_in(memoryview(encode(state)), 4)
    assert found.keys() == state.keys()
    equal = values_in(memoryview(encode({"losses": [0.5, 1.5], "step": 8})), 4)
    assert found["losses"] == equal["losses"] and found["step"] != equal["step"]


@pytest.mark.parametrize("state", [{"a": 1, "b": 2, "c": 3}, {1: 2}, [1, 2], None, OrderedDict(a=1)])
def test_there_are_none_in_anything_else(state: object) -> None:
    assert values_in(memoryview(encode(state)), 2) == {}
