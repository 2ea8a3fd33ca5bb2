"""The counters of Megatron's namespace: a version has those with which the loop goes on after it, in any loop."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import pytest

from ttp.adapters.megatron.rank_state import Progress

BATCH = 8


def made(**more: Any) -> tuple[Namespace, Progress]:
    """Return the namespace of a job at iteration 3, and what captures its counters."""
    args = Namespace(**{"iteration": 3, "consumed_train_samples": 3 * BATCH, "global_batch_size": BATCH, **more})
    return args, Progress(args, [])


def of(progress: Progress) -> tuple[int, int]:
    """Return the captured iteration and samples."""
    counters = progress.state_dict()["counters"]
    return counters["iteration"], counters["consumed_train_samples"]


def count(args: Namespace) -> None:
    args.iteration += 1
    args.consumed_train_samples += BATCH


def test_before_the_first_iteration_nothing_is_added() -> None:
    args, progress = made()
    assert of(progress) == (3, 24)
    progress.iteration_begins()
    assert of(progress) == (4, 32)
    progress.load_state_dict({"scalers": [], "counters": {"iteration": 9, "consumed_train_samples": 72}})
    assert (args.iteration, args.consumed_train_samples) == (9, 72) and of(progress) == (9, 72)


def test_an_iteration_that_the_loop_has_counted_is_not_added_again() -> None:
    """As when a loop calls ``ttp.step_done()`` at the end of its iteration."""
    args, progress = made()
    for iteration in (3, 4, 5):
        progress.iteration_begins()
        progress.iteration_begins()  # a forward pass for each microbatch
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)
        count(args)
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)


def test_a_loop_may_count_an_iteration_before_its_forward_pass() -> None:
    args, progress = made()
    for iteration in (3, 4, 5):
        count(args)
        progress.iteration_begins()
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)


def test_a_loader_may_count_samples_when_it_fetches_them() -> None:
    args, progress = made()
    for iteration in (3, 4, 5):
        args.consumed_train_samples += BATCH
        progress.iteration_begins()
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)
        args.iteration += 1


def test_a_loop_may_count_between_its_forward_pass_and_its_update() -> None:
    args, progress = made()
    for iteration in (3, 4, 5):
        progress.iteration_begins()
        count(args)
        progress.iteration_begins(forward=False)
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)
        progress.updated()


def test_the_update_shows_an_iteration_whose_forward_pass_was_not_seen() -> None:
    """A program may call a module inside of the registered model."""
    args, progress = made()
    for iteration in (3, 4, 5):
        progress.iteration_begins(forward=False)
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)
        progress.updated()
        count(args)


def test_a_batch_of_unknown_size_is_as_large_as_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    args, progress = made(global_batch_size=None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            progress.iteration_begins()
            found = of(progress)
            count(args)
    assert found == (6, 48) == (args.iteration, args.consumed_train_samples)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "set args.global_batch_size" in caplog.text


def test_a_program_without_these_counters_has_none() -> None:
    progress = Progress(Namespace(lr=1.0, consumed_train_samples=None), [])
    progress.iteration_begins()
    assert progress.state_dict() == {"scalers": [], "counters": {}}
    progress = Progress(None, [])
    progress.iteration_begins()
    assert progress.state_dict() == {"scalers": []}
