"""Counters and loss scale: a version has the counters with which the loop goes on after it, in any loop."""

from __future__ import annotations

import logging
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapters.torch.fake_device import FakeDevice, Watching
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
    _, progress = made()
    assert of(progress) == (3, 24)
    progress.iteration_begins()
    assert of(progress) == (4, 32)


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


def test_iterations_that_megatron_skips_at_the_start_do_not_make_its_loop_one_that_counts_early() -> None:
    """``--iterations-to-skip``: it counts these at once, and every other one after its update."""
    args, progress = made(curr_iteration=3, skipped_train_samples=0, iterations_to_skip=[4])
    args.consumed_train_samples += BATCH
    args.skipped_train_samples += BATCH
    for iteration in (4, 5, 6):
        args.curr_iteration = iteration
        progress.iteration_begins()
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)
        progress.updated()
        args.consumed_train_samples += BATCH


def test_a_loop_may_count_between_its_forward_pass_and_its_update() -> None:
    args, progress = made()
    for iteration in (3, 4, 5):
        progress.iteration_begins()
        count(args)
        progress.update_begins()
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)
        progress.updated()


def test_the_update_shows_an_iteration_whose_forward_pass_was_not_seen() -> None:
    """A program may call a module inside of the registered model."""
    args, progress = made()
    for iteration in (3, 4, 5):
        progress.update_begins()
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)
        progress.updated()
        count(args)


def test_an_iteration_that_overflowed_is_over_although_no_forward_pass_is_seen() -> None:
    """A checkpoint of the next update had the counters of the iteration before."""
    args, progress = made()
    for _ in range(2):  # microbatches
        progress.iteration_begins(forward=False)
    count(args)
    progress.iteration_begins(forward=False)
    progress.update_begins()
    assert of(progress) == (5, 5 * BATCH)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_loop_may_count_after_a_backward_pass_whose_forward_pass_was_not_seen(at_once: bool) -> None:
    args, progress = made()
    if at_once:
        progress.iteration_begins(forward=False)
        count(args)
    else:  # a loader that counts each microbatch when it fetches it
        for _ in range(2):
            args.consumed_train_samples += BATCH // 2
            progress.iteration_begins(forward=False)
    progress.update_begins()
    assert of(progress) == (4, 4 * BATCH)


def test_a_checkpoint_of_the_programs_own_is_no_early_count(caplog: pytest.LogCaptureFixture) -> None:
    """It is loaded after ``protect()``. Every checkpoint then lacked the samples of one batch, without a word."""
    args, progress = made(global_batch_size=None)
    args.iteration, args.consumed_train_samples = 100, 100 * BATCH
    for _ in range(2):
        progress.iteration_begins()
        found = of(progress)
        count(args)
    assert found == (102, 102 * BATCH) and "set args.global_batch_size" in caplog.text


def test_an_evaluation_that_follows_is_counted_although_it_is_not_made_again() -> None:
    """Else a resumed job validates with other samples from then on. Megatron-LM sets ``do_valid`` itself."""
    args, progress = made(consumed_valid_samples=0, eval_interval=4, eval_iters=2, do_valid=True)
    for iteration, before, after in ((4, 0, 16), (5, 16, 16), (8, 16, 32)):
        args.iteration = iteration - 1
        progress.iteration_begins()
        assert progress.state_dict()["counters"]["consumed_valid_samples"] == after
        args.consumed_valid_samples += after - before  # the loop evaluates
        assert progress.state_dict()["counters"]["consumed_valid_samples"] == after
        progress.updated()
    kept = progress.state_dict()
    progress.load_state_dict(kept)
    assert progress.state_dict() == kept


@pytest.mark.parametrize("more", [{"full_validation": True}, {"do_valid": False}, {"eval_interval": None}])
def test_samples_of_an_evaluation_are_counted_only_if_they_continue_those_of_the_one_before(more: Any) -> None:
    validated = {"consumed_valid_samples": 8, "eval_interval": 4, "eval_iters": 2, "do_valid": True}
    _, progress = made(**validated | more)
    progress.iteration_begins()
    assert progress.state_dict()["counters"]["consumed_valid_samples"] == 8


@pytest.mark.parametrize(("size", "counted"), [(2, 4), (None, 16)])
def test_an_evaluation_may_have_batches_of_another_size(size: Any, counted: int) -> None:
    """``--eval-global-batch-size`` of newer versions of Megatron-LM."""
    validated = {"consumed_valid_samples": 0, "eval_interval": 4, "eval_iters": 2, "do_valid": True}
    _, progress = made(**validated, eval_global_batch_size=size)
    progress.iteration_begins()
    assert progress.state_dict()["counters"]["consumed_valid_samples"] == counted


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
    progress = Progress(None, [SimpleNamespace(grad_scaler=None)])
    progress.iteration_begins()
    assert progress.state_dict() == {"scalers": []}
    progress.load_state_dict({"scalers": [], "counters": {"iteration": 3}})


def test_a_loop_of_the_programs_own_is_followed_after_a_restore_too() -> None:
    """It raises ``iteration``; only Megatron-LM's loop sets ``curr_iteration``, and leaves ``iteration``."""
    args, progress = made()
    progress.load_state_dict({"scalers": [], "counters": {"iteration": 9, "consumed_train_samples": 72}})
    assert (args.iteration, args.consumed_train_samples) == (9, 72) == of(progress)
    for iteration in (9, 10, 11):
        progress.iteration_begins()
        assert of(progress) == (iteration + 1, (iteration + 1) * BATCH)
        count(args)
    assert not hasattr(args, "curr_iteration")


def test_a_counter_may_appear_after_the_registration() -> None:
    progress = Progress(args := Namespace(global_batch_size=BATCH), [])
    args.iteration = args.consumed_train_samples = 0
    progress.iteration_begins()
    assert of(progress) == (1, BATCH)


class Scaler:
    """A stand-in for Megatron's dynamic scaler."""

    def __init__(self, scale: float, tracker: int) -> None:
        self.scale, self.tracker = torch.tensor([scale]), tracker

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_tracker": self.tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.tracker = state["scale"], state["growth_tracker"]


def test_counters_are_those_of_the_finished_iteration_and_come_back() -> None:
    args = SimpleNamespace(iteration=0, curr_iteration=6, consumed_train_samples=48, global_batch_size=8)
    progress = Progress(args, [SimpleNamespace(grad_scaler=Scaler(64.0, 1))])
    progress.iteration_begins()
    kept = progress.state_dict()
    assert kept["counters"] == {"consumed_train_samples": 56, "iteration": 7}
    fresh = SimpleNamespace(iteration=0, curr_iteration=3, consumed_train_samples=0, global_batch_size=8)
    scaler = Scaler(4.0, 0)
    Progress(fresh, [SimpleNamespace(grad_scaler=scaler)]).load_state_dict(kept)
    assert (fresh.iteration, fresh.curr_iteration, fresh.consumed_train_samples) == (7, 7, 56)
    assert (float(scaler.scale), scaler.tracker) == (64.0, 1)


def test_a_loss_scale_on_a_device_is_waited_for_only_when_it_is_another_one() -> None:
    """It is captured several times per step."""
    device, scaler = FakeDevice(), Scaler(64.0, 1)
    device.put(scaler.scale)
    progress = Progress(None, [SimpleNamespace(grad_scaler=scaler)])
    with Watching(device):
        for _ in range(6):
            assert progress.state_dict()["scalers"] == [{"scale": 64.0, "growth_tracker": 1}]
        assert device.waits.total() == 1
        scaler.scale.mul_(2)
        assert [progress.state_dict()["scalers"][0]["scale"] for _ in range(3)] == [128.0] * 3
        scaler.scale = device.put(torch.tensor([32.0]))
        assert [progress.state_dict()["scalers"][0]["scale"] for _ in range(3)] == [32.0] * 3
        assert device.waits.total() == 3
