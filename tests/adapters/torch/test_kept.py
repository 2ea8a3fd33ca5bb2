"""A state that is kept in memory: when it may be kept, how new objects take it over, and how it is sent to another
rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.adapters.torch.checkpoints import Counting
from tests.adapters.torch.stub_processor import Loop, leave
from tests.adapters.torch.worlds import run_world
from tests.making import making
from ttp.adapters.torch import adapter
from ttp.adapters.torch.restoring import registered, restore, transfer
from ttp.adapters.torch.restoring.kept import Kept, KeptTensor, UnlikeError, hand_over, keep
from ttp.adapters.torch.saving.piece_index import IndexEntry
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.core.layout import Version
from ttp.core.rank.kept_state import Origin
from ttp.errors import RestoreError
from ttp.processor.kept_state import KeptState
from ttp.testing.digests import digest

pytestmark = pytest.mark.xdist_group("kept")  # they share a world of two ranks

ORIGIN = Origin(Version(1), "incident")


def net(width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width, dtype=dtype), nn.Linear(width, 3, dtype=dtype))


class Job(Loop):
    """A program that has stopped after its first update."""

    def __init__(self, directory: Path, model: nn.Module | None = None, **settings: Any) -> None:
        model = model or net()
        super().__init__(directory, model, torch.optim.AdamW(model.parameters(), **settings))
        self.start(directory / "pages")
        self.step()
        self.gate.close()
        self.source.inspect(Version(1))

    def step(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weight(self) -> Any:
        return next(self.model.parameters())

    def saved(self) -> list[IndexEntry]:
        """Return the optimizer state in a checkpoint."""
        kept = keep(ORIGIN, ModelNames(self.model, self.optimizer), self.optimizer)
        values = [(name, key) for name, of_parameter in kept.optimizer.items() for key in of_parameter]
        return [IndexEntry(("optim", "state", name, key), "file", 0, 0) for name, key in values]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with making(partial(Job, tmp_path), lambda job: leave(job.adapter)) as make:
        yield make


def add_in_place(job: Job) -> None:
    with torch.no_grad():
        job.weight.add_(1)


def add_unseen(job: Job) -> None:
    job.weight.data.add_(1)  # by a view that counts for itself


def replace_moments(job: Job) -> None:
    values = job.optimizer.state[job.weight]
    values["exp_avg"] = values["exp_avg"].clone()


def replace_values(job: Job) -> None:
    job.weight.data = job.weight.data.clone()


def lose_a_moment(job: Job) -> None:
    del job.optimizer.state[job.weight]["exp_avg"]


def tear(job: Job) -> None:
    job.gate.open()
    job.gate.begin_update()
    job.gate.mark_torn()


def go_on(job: Job) -> None:
    job.gate.open()
    job.step()
    job.gate.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (add_in_place, "0.weight was written to"),
        (add_unseen, "its values differ"),
        (replace_values, "0.weight was written to or replaced"),
        (replace_moments, "exp_avg was written to or replaced"),
        (lose_a_moment, "was written to or replaced"),
        (tear, "half done"),
        (go_on, "compared at step 1, but is at step 2 now"),
    ],
)
def test_a_state_that_has_changed_since_all_stopped_is_not_kept(
    make: Callable[..., Job], change: Callable[[Job], None], why: str
) -> None:
    job = make()
    change(job)
    with pytest.raises(UnlikeError, match=why):
        job.adapter.source.keep("incident")


def tied_by_memory() -> nn.Module:
    model = net(3)
    model[1].weight.data = model[0].weight.data
    return model


@pytest.mark.parametrize(
    ("make_model", "kind", "why"),
    [
        (tied_by_memory, torch.optim.SGD, "share their memory"),
        (lambda: Counting(3, 3), torch.optim.SGD, "extra state"),
        (net, torch.optim.LBFGS, "state has a list"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(make_model: Any, kind: Any, why: str) -> None:
    model = make_model()
    optimizer = kind(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step(lambda: model(torch.ones(1, 3)).sum())
    with pytest.raises(UnlikeError, match=why):
        keep(ORIGIN, ModelNames(model, optimizer), optimizer)


def test_new_objects_take_the_state_of_the_old_ones(make: Callable[..., Job]) -> None:
    job = make()
    kept, expected = job.adapter.source.keep("incident"), digest(job.optimizer.state_dict())
    assert kept.origin == ORIGIN
    assert kept.parameters["0.weight"].data_ptr() == job.weight.data_ptr()
    assert kept.size == sum(3 * p.nbytes + 4 for p in job.model.parameters())
    model = net()
    optimizer, looked_at = torch.optim.AdamW(model.parameters()), model.state_dict()
    hand_over(kept, ModelNames(model, optimizer), optimizer, job.saved())
    assert digest(looked_at) == digest(model.state_dict()) == digest(job.model.state_dict())
    assert digest(optimizer.state_dict()) == expected
    for new, old in zip(model.parameters(), job.model.parameters(), strict=True):
        assert optimizer.state[new]["exp_avg"] is not None
        assert optimizer.state[new]["exp_avg"].data_ptr() == job.optimizer.state[old]["exp_avg"].data_ptr()


def test_the_same_objects_are_left_as_they_are_if_the_checkpoint_has_the_same_entries(make: Callable[..., Job]) -> None:
    job = make()
    before = [(p.data_ptr(), p._version) for p in job.model.parameters()]
    hand_over(job.adapter.source.keep("i"), ModelNames(job.model, job.optimizer), job.optimizer, job.saved())
    assert [(p.data_ptr(), p._version) for p in job.model.parameters()] == before
    with pytest.raises(UnlikeError, match="other entries than the checkpoint"):
        hand_over(job.adapter.source.keep("i"), ModelNames(job.model, job.optimizer), job.optimizer, job.saved()[1:])


def test_a_parameter_in_the_memory_of_another_tensor_gets_the_values() -> None:
    source, target = net(), net()
    flat = torch.zeros(sum(p.numel() for p in target.parameters()))
    at = 0
    for p in target.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    one, two = torch.optim.SGD(source.parameters()), torch.optim.SGD(target.parameters())
    hand_over(keep(ORIGIN, ModelNames(source, one), one), ModelNames(target, two), two, [])
    assert digest(target.state_dict()) == digest(source.state_dict())
    assert next(target.parameters()).untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("model", "kind", "why"),
    [
        (lambda: net(5), torch.optim.AdamW, "another shape or dtype"),
        (lambda: net(dtype=torch.float64), torch.optim.AdamW, "another shape or dtype"),
        (lambda: nn.Sequential(*net(), nn.Linear(3, 3)), torch.optim.AdamW, "was not there"),
        (net, torch.optim.SGD, "the optimizer was torch.optim.adamw.AdamW"),
    ],
)
def test_other_objects_get_nothing(make: Callable[..., Job], model: Any, kind: Any, why: str) -> None:
    job, other = make(), model()
    optimizer = kind(other.parameters())
    before = digest(other.state_dict())
    with pytest.raises(UnlikeError, match=why):
        hand_over(job.adapter.source.keep("i"), ModelNames(other, optimizer), optimizer, job.saved())
    assert digest(other.state_dict()) == before and not optimizer.state


@pytest.mark.parametrize("unlike", ["another incident", "another model"])
def test_what_is_not_handed_over_is_freed_before_the_checkpoint_is_read(
    make: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unlike: str
) -> None:
    job = make()
    saved, state = job.save(1), KeptState()
    state.keep(job.adapter, "y" if unlike == "another incident" else "x")
    held = weakref.ref(state._kept.parameters["0.weight"])
    if unlike == "another model":
        state._kept.optimizer["0.weight"]["more"] = 1
    freed = []
    other = net()

    def restore_into(*args: Any, kept: Kept | None, **settings: Any) -> Any:
        freed.append(held() is None)
        return restore.restore_into(*args, kept=kept, **settings)

    monkeypatch.setattr(registered, "restore_into", restore_into)
    adapter = Loop(tmp_path, other, torch.optim.AdamW(other.parameters())).adapter
    assert adapter.load_going_on(saved, 0, 1, state, lambda: None) == 1
    assert freed[-1] and len(freed) == (1 if unlike == "another incident" else 2)
    assert "read from the checkpoint" in state.way
    assert digest(other.state_dict()) == digest(job.model.state_dict())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two ranks saw in each of these cases, by its name."""
    return run_world(tmp_path_factory.mktemp("kept"), __name__, "all_cases", 2)


def all_cases(_: Path, rank: int) -> dict[str, Any]:
    cases = verified_together, cut_in_other_ways, sent, sent_with_a_flipped_bit
    return {case.__name__: case(rank) for case in cases}


def verified_together(rank: int) -> str:
    """Each rank verifies its share of a checkpoint, which is damaged in the share of rank 1."""

    def verify() -> None:
        if rank == 1:
            raise RestoreError("a piece is damaged")

    with pytest.raises(RestoreError) as found:
        registered._verify_together(verify, 2)
    return str(found.value)


def test_what_one_rank_finds_damaged_no_rank_loads(ranks: list[dict[str, Any]]) -> None:
    assert [rank["verified_together"] for rank in ranks] == ["a piece is damaged"] * 2


def test_who_keeps_its_tensors_takes_nothing_from_a_damaged_checkpoint(make: Callable[..., Job]) -> None:
    job = make()
    saved, state = job.save(1), KeptState()
    state.keep(job.adapter, "x")
    rates = [group["lr"] for group in job.optimizer.param_groups]

    def verify() -> None:
        raise RestoreError("a piece is damaged")

    with pytest.raises(RestoreError, match="a piece is damaged"):
        job.adapter.load_going_on(saved, 0, 1, state, verify)
    assert [group["lr"] for group in job.optimizer.param_groups] == rates


def cut_in_other_ways(_: int) -> str:
    """Returns the refusal for statistics of rows, which some optimizers keep. Moments are cut like their parameter."""
    model = net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    names, owner = ModelNames(model, optimizer), next(model.parameters())
    keep(ORIGIN, names, optimizer)
    optimizer.state[owner]["exp_avg"] = owner.detach().new_zeros((owner.shape[0], 1))
    with pytest.raises(UnlikeError) as refused:
        keep(ORIGIN, names, optimizer)
    return str(refused.value)


def test_what_is_distributed_in_another_way_is_refused(ranks: list[dict[str, Any]]) -> None:
    text = "the optimizer keeps a tensor that is distributed in another way than its parameter"
    assert [rank["cut_in_other_ways"] for rank in ranks] == [text] * 2


# ------------------------------------------------------------------------------------------------------------- transfer


def some_state() -> Kept:
    """Return tensors of many kinds: large, small, empty, one element of a row, without dimensions, transposed, tied."""
    generator = torch.Generator().manual_seed(3)
    large = torch.randn(3 << 20, generator=generator)
    parameters = {
        "large": large,
        "tied": large,
        "small": torch.randn(3, 5, generator=generator).bfloat16(),
        "one": torch.randn(1, 5, generator=generator)[:, 0],
        "odd": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "complex": torch.randn(2, dtype=torch.complex64, generator=generator),
    }
    values = {
        "step": KeptTensor(torch.tensor(7.0), cut=False),
        "exp_avg": KeptTensor(large + 1, cut=True),
        "n": 5,
        "x": None,
    }
    return Kept(ORIGIN, "some.Optimizer", parameters, {"large": values})


def told(kept: Kept) -> list[Any]:
    parts = [[n, str(t.dtype), list(t.stride()), digest(t.contiguous())] for n, t in kept.parameters.items()]
    values = [
        [name, key, digest(v.tensor) if isinstance(v, KeptTensor) else v, isinstance(v, KeptTensor) and v.cut]
        for name, of_parameter in kept.optimizer.items()
        for key, v in of_parameter.items()
    ]
    tied = kept.parameters["large"] is kept.parameters["tied"]
    return [parts, values, tied, kept.kind, *astuple(kept.origin)]


def sent(rank: int) -> Any:
    if rank == 0:
        kept = some_state()
        transfer.give(kept, 1)
        return told(kept)
    return told(transfer.receive(0))


def sent_with_a_flipped_bit(rank: int) -> str:
    if rank == 0:
        library: Any = dist
        stock = library.isend

        def isend(data: Tensor, to: int) -> Any:
            broken = data.clone()
            broken[1] ^= 1
            return stock(broken, to)

        library.isend = isend
        transfer.give(some_state(), 1)
        return ""
    with pytest.raises(UnlikeError) as caught:
        transfer.receive(0)
    return str(caught.value)


def test_another_rank_gets_the_same_and_uses_nothing_with_other_bytes(ranks: list[dict[str, Any]]) -> None:
    mine, theirs = ranks
    assert theirs["sent"] == mine["sent"]
    why = theirs["sent_with_a_flipped_bit"]
    assert why == "the state that rank 0 sent was damaged on the way: its digest differs"


def test_a_model_that_outlives_train_begins_in_its_first_mode_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies while the others evaluate, and train() is called again with the same model."""

    survivor: Any = SimpleNamespace(clock=SimpleNamespace(runs=False))
    monkeypatch.setattr(adapter, "current", lambda: survivor)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3).eval())

    def registered() -> list[bool]:
        Loop(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [module.training for module in model.modules()]

    first = registered()
    assert first == [True, True, True, False]
    model.eval()
    survivor.clock.runs = True
    assert registered() == first
    model.eval()
    survivor.clock.runs = False
    assert registered() == [False] * 4, "the program's own registration of the same model"
