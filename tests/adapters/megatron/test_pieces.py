"""The parts of the Megatron adapter without a job: what they refuse, and what they save, restore and convert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.megatron.test_rank_layout import LAYOUT, TILE
from tests.adapters.megatron.test_refused import checkpoint
from tests.adapters.megatron.test_replicated import Scheduler
from ttp.adapters.megatron import adapter as adapting
from ttp.adapters.megatron import contents, restore
from ttp.adapters.megatron.adapter import MegatronAdapter, _extra_state
from ttp.adapters.megatron.contents import MegatronCheckpoint, Weight
from ttp.adapters.megatron.geometry import Described, Geometry, TensorView, describe
from ttp.adapters.megatron.optimizers import Holding, Inner, inner_optimizers
from ttp.adapters.megatron.rank_state import PROGRESS, Progress
from ttp.adapters.megatron.replica_groups import IDLE, layout_of
from ttp.adapters.megatron.restore import Wants, _is_saved, _refuse_foreign, restore_into
from ttp.adapters.megatron.source import MegatronSource, _updated
from ttp.adapters.megatron.stock import JOB_KEY, progress_of
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.loop.late_changes import LateChanges
from ttp.adapters.torch.loop.turns import Turns
from ttp.adapters.torch.saving.job_state import JobState
from ttp.core.layout import Layout, Rank, Shard
from ttp.errors import CheckpointError, ConfigError, UsageError
from ttp.store.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron, which is imported here


def described(tensor: Any, key: str = "w", *, first: bool = True) -> Described:
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride())
    view = TensorView(key, shape, (0,) * len(shape), shape, strides, 0, flexible=False)
    return Described(key, tensor, (view,), first)


def holding(tensor: Any, key: str = "w", main: Any = None) -> Holding:
    whole = described(tensor, key)
    return Holding(whole, tensor if main is None else main, 0, tensor.numel(), whole.whole)


# ------------------------------------------------------------------------------------------------------ the optimizers


def megatron_optimizer(name: str, inner: Any, **lists: Any) -> Any:
    from megatron.core.optimizer import optimizer as classes

    made = object.__new__(getattr(classes, name))
    made.config, made.optimizer = SimpleNamespace(), inner
    vars(made).update(lists)
    return made


def test_each_of_megatrons_optimizers_says_which_tensors_it_updates() -> None:
    """With fp32 copies of half precision parameters, and those in fp32 themselves. What none updates is the first's."""
    half, full, frozen = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3), torch.zeros(1)
    copy = torch.zeros(2)
    geometry = Geometry({id(t): described(t, key) for t, key in ((half, "half"), (full, "full"), (frozen, "frozen"))})
    sgd = torch.optim.SGD([copy, full], lr=0.1)
    mixed = megatron_optimizer(
        "Float16OptimizerWithFloat16Params", sgd,
        float16_groups=[[half]], fp32_from_float16_groups=[[copy]], fp32_from_fp32_groups=[[full]],
    )  # fmt: skip
    (inner,) = inner_optimizers(mixed, geometry)
    assert [(h.described.name, h.main is copy, h.main is full) for h in inner.holdings] == [
        ("half", True, False), ("full", False, True),
    ]  # fmt: skip
    assert (inner.kind, inner.main_key, [d.name for d in inner.fixed]) == ("dense", "fp32_param", ["frozen"])
    keys = [key for key, _ in _updated(inner, None)]
    assert keys == ["half", "optimizer.state.fp32_param.half", "full"], "an fp32 parameter has no copy"
    experts = torch.optim.SGD([{"params": [full], "is_expert_parallel": True}], lr=0.1)
    (plain,) = inner_optimizers(megatron_optimizer("FP32Optimizer", experts), geometry)
    assert (plain.kind, plain.main_key, [h.main is full for h in plain.holdings]) == ("expert", "", [True])


def test_a_rank_without_a_trained_parameter_and_an_unknown_optimizer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trains no parameter, .* train at least one on each rank"):
        inner_optimizers(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=None)]), Geometry())
    kind = type("TensorParallelMuon", (), {"config": SimpleNamespace(), "optimizer": object()})
    with pytest.raises(ConfigError, match="cannot protect the optimizer class TensorParallelMuon; it protects Dist"):
        inner_optimizers(kind(), Geometry())


def test_ranks_with_equal_shards_are_replicas_and_one_with_padding_only_is_idle() -> None:
    inner = Inner(None, torch.optim.SGD([torch.zeros(2)]), "dense", "param", (), 0, 1)
    layout, mine = layout_of([b'[["dense", "a", {}]]', b'[["dense", "a", {}]]', b"[]"], [inner])
    assert dict(layout.groups) == {Shard("dense"): (0, 1), IDLE: (0, 1, 2)} and mine == [IDLE]
    halves = [b'[["dense", "%d", {"w": [6, 3, "%d"]}]]' % each for each in ((1, 1), (2, 2), (3, 2))]
    assert len(layout_of(halves, [])[0].groups) == 3, "two shards have a copy of one half"
    with pytest.raises(ConfigError, match="not save the whole model: w has 3 of 6 elements"):
        layout_of(halves[1:], [])


# ------------------------------------------------------------------------------------------------------------ the model


class Model(nn.Module):
    """A model that describes its parameters as the test says."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self._make = make

    def sharded_state_dict(self, **_: Any) -> Any:
        return self._make(self.weight)


def entry(data: Any, shape: tuple[int, ...] = (2, 3)) -> Any:
    return SimpleNamespace(
        key="w", data=data, replica_id=0, global_shape=shape, global_offset=(0, 0), local_shape=shape,
        allow_shape_mismatch=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda weight: {}, "does not name its parameters weight"),
        (lambda weight: {"weight": entry(weight, (1, 3))}, "do not cover all of it"),
        (lambda weight: {"weight": entry(weight.t(), (3, 2))}, "is not contiguous"),
    ],
)
def test_a_model_that_does_not_describe_all_of_its_tensors_is_refused(
    make: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint would lack them, and nobody would notice before a resume."""
    monkeypatch.setattr("megatron.core.transformer.utils.ensure_metadata_has_dp_cp_group", lambda _: None)
    with pytest.raises(ConfigError, match=said):
        describe([Model(make)])
    (found,) = describe([Model(lambda weight: {"weight": entry(weight)})]).tensors.values()
    assert found.name == "weight" and [part.sizes for part in found.whole] == [(2, 3)]


# ----------------------------------------------------------------------------------------------------------- the saving


def source(inner: Inner, *, version: int = 4, on_device: bool = False, shard: str = "dense") -> Any:
    made: Any = object.__new__(MegatronSource)
    extra_states = SimpleNamespace(of=lambda _: {"extra": b""})
    made.held = SimpleNamespace(
        inners=[inner], shards=[Shard(shard)], extra_states=extra_states, rank_layout={"layout": b""},
        inner_of=lambda asked: inner if asked == shard else None,
    )  # fmt: skip
    gate, env = SimpleNamespace(version=version), SimpleNamespace(rank=1)
    made._processor = SimpleNamespace(gate=gate, env=env)
    return made


def job(version: int = 4, **extra: Any) -> JobState:
    return JobState(version, extra={JOB_KEY: {"optimizers": [{"groups": [], "step": None}], "increment": 4, **extra}})


def test_a_state_of_another_version_than_the_order_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a checkpoint of two versions."""
    found = source(Inner(None, torch.optim.SGD([torch.zeros(2)]), "dense", "", (), 0, 1), version=5)
    monkeypatch.setattr(MegatronSource, "on_device", False)
    pages: Any = SimpleNamespace(data={})
    with pytest.raises(CheckpointError, match="holds version 5, not 4"):
        found._state(pages, job(), None, [])
    found._processor.gate.version = 4
    assert found._state(pages, job(), None, [])["buffers"] == {}


def test_buffers_are_saved_as_they_were_when_the_version_was_finished() -> None:
    """The next forward pass has changed them. A shard of which this rank holds nothing is empty."""
    model = nn.Module()
    model.register_buffer("count", torch.tensor([9.0]))
    frozen = torch.tensor([7.0])
    fixed = (described(model.count, "count"), described(frozen, "frozen"))
    inner = Inner(None, torch.optim.SGD([torch.zeros(2)]), "dense", "", (), 0, 1, fixed)
    found = source(inner)
    found._model = model
    state = {"image": None, "buffers": {"count": torch.tensor([8.0])}, "extra": {}, "saved": {"dense": job_entry()}}
    written = found._state_of(Shard("dense"), state)
    assert [written[key][0].tensor.tolist() for key in ("count", "frozen")] == [[8.0], [7.0]]
    assert found._state_of(Shard("other"), state) == {}


def job_entry() -> dict[str, Any]:
    return {"class": "Adam", "groups": [], "step": None}


# -------------------------------------------------------------------------------------------------------- the restoring


def restoring(scheduler: Scheduler | None) -> Any:
    made: Any = object.__new__(MegatronAdapter)
    made._scheduler, made._noted = scheduler, 0
    made.source = SimpleNamespace(increment=0)
    made._held = SimpleNamespace(inners=[])
    return made


@pytest.mark.parametrize(
    ("pending", "increment", "steps", "note"),
    [(False, 4, 40, ""), (False, 0, 40, ""), (True, 4, 44, ""), (True, 0, 40, "the LR scheduler is one step behind")],
)
def test_a_step_of_the_scheduler_that_was_due_at_the_save_is_made(
    pending: bool, increment: int, steps: int, note: str
) -> None:
    """What the loop's next step adds is not mistaken for all that was loaded."""
    scheduler = Scheduler()
    adapter = restoring(scheduler)
    saved = replace(job(increment=increment), scheduler={"num_steps": 40}, scheduler_pending=pending)
    notes = adapter._load_scheduler(saved)
    assert scheduler.num_steps == steps and [text.partition(":")[0] for text in notes] == ([note] if note else [])
    scheduler.step(4)
    adapter._note_increment()
    assert adapter.source.increment == 4


def test_a_checkpoint_without_the_schedule_of_this_job_is_said() -> None:
    assert restoring(Scheduler())._load_scheduler(job()) == [
        "it has no LR scheduler: that of this job was not restored"
    ]
    assert restoring(None)._load_scheduler(job()) == []


def test_what_could_not_be_restored_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = restoring(Scheduler())
    taken: list[int] = []
    adapter._held.extra_states = SimpleNamespace(restore=lambda *_: ["an FP8 scale is missing"], take=taken.append)
    adapter._loaded = lambda restored, job: job.version
    monkeypatch.setattr(adapting, "restore_into", lambda *_: job(12))
    assert adapter.load(checkpoint(tmp_path / "c"), 0, 1, protected=False) == 12 and taken == [12]
    assert caplog.messages == [
        "restored version 12, but an FP8 scale is missing",
        "restored version 12, but it has no LR scheduler: that of this job was not restored",
    ]


def test_a_layout_that_does_not_fit_the_job_is_refused_and_one_without_copies_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks hear of a rank that was refused meanwhile."""
    adapter, gathered = restoring(None), list[object]()
    monkeypatch.setattr(adapting, "connected", lambda world: True)
    monkeypatch.setattr(adapting, "gather_or_refuse", gathered.append)
    adapter._held.layout = Layout(2, {Shard("a"): (Rank(0),), Shard("b"): (Rank(0), Rank(1))})
    with pytest.raises(ConfigError, match="WORLD_SIZE says 4 ranks, torch's process group has 2"):
        adapter.layout(4)
    assert adapter.layout(2).world_size == 2 and len(gathered) == 2
    assert "1 of 2 shards (a) are held by one rank only and die with it" in caplog.text


def test_names_of_ttps_own_state_are_taken() -> None:
    progress: Any = object.__new__(Progress)
    mine = SimpleNamespace(state_dict=dict, load_state_dict=len)
    taken = set(_extra_state({"mine": mine}, progress)) - {"mine"}
    for name in taken:
        with pytest.raises(UsageError, match=f"extra_state may not be named {name}"):
            _extra_state({name: mine}, progress)


def test_a_module_as_extra_state_is_refused() -> None:
    """It was in no checkpoint, without a word."""
    progress: Any = object.__new__(Progress)
    for given in (nn.Linear(1, 1), {"average": nn.Linear(1, 1)}):
        with pytest.raises(UsageError, match=r"extra_state.* is an nn.Module \(Linear\).*no nn.Module"):
            _extra_state(given, progress)


@pytest.mark.parametrize(("clips", "by_hand", "told"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_weights_that_megatron_clips_after_the_update_are_told(
    clips: bool, by_hand: bool, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of any version lacked what ``clip_qk()`` changes after its update, without a word."""
    adapter: Any = object.__new__(MegatronAdapter)
    adapter._chunks = [nn.Identity()]
    adapter._chunks[0].config = SimpleNamespace(qk_clip=clips)
    adapter._held = SimpleNamespace(inners=())
    turns = Turns(["Adam"], chained=True)
    turns.by_hand, late = by_hand, LateChanges(ExtraState(), (), turns)
    for _ in range(4):
        adapter._after_end(late, turns)
    texts = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(texts) == told and all("qk_clip" in each and "ttp.step_done()" in each for each in texts)


def test_a_checkpoint_of_another_program_or_model_is_refused_before_anything_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest: Any = SimpleNamespace(version=4, pieces=[])
    held: Any = SimpleNamespace()
    for saved in (JobState(4), job(5)):
        monkeypatch.setattr(restore, "read_megatron_job", lambda *_, saved=saved: saved)
        with pytest.raises(CheckpointError, match="was not written by a Megatron job of version 4"):
            restore_into(tmp_path, manifest, held)
    wants, live = Wants(), {"w": torch.zeros(2, 2), "gone": torch.zeros(1)}
    for key, tensor in live.items():
        for part in described(tensor, key).whole:
            wants.add("", part, tensor.view(-1), 0)
    there: Any = {"w": [SimpleNamespace(shape=(3, 2))]}
    with pytest.raises(
        CheckpointError, match=r"another model: w has shape \[3, 2\] there and \[2, 2\] here; it lacks gone\. Nothing"
    ):
        _refuse_foreign(tmp_path, wants, there, ())
    _refuse_foreign(tmp_path, Wants(), there, ())


@pytest.mark.parametrize(
    ("rows", "whole"), [([(0, 2), (2, 2)], True), ([(0, 2)], False), ([(2, 2)], False), ([], True)]
)
def test_moments_that_the_checkpoint_has_of_a_part_only_begin_anew(rows: list[tuple[int, int]], whole: bool) -> None:
    """Layers that were frozen have none; half of a parameter's moments would be wrong."""
    tensor = torch.zeros(4, 2)
    entries: Any = [SimpleNamespace(shape=(4, 2), offsets=(at, 0), sizes=(count, 2)) for at, count in rows]
    assert _is_saved(holding(tensor), "optimizer.state.exp_avg.", {"optimizer.state.exp_avg.w": entries}) is whole


def test_counters_are_those_of_the_first_page_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks keep them; Megatron-LM begins to count anew if all pages are lost."""
    from ttp.adapters.megatron import stock

    kept: dict[int, Any] = {0: None, 1: SimpleNamespace(extra={})}
    monkeypatch.setattr(stock, "ranks_kept", lambda _: [0, 1])
    monkeypatch.setattr(stock, "read_local_state", lambda _draft, _pieces, rank: kept[rank])
    assert progress_of(tmp_path, ()) == {}
    monkeypatch.setattr(stock, "decode", lambda data: data)
    kept[1].extra[PROGRESS] = {"counters": {"iteration": 12}}
    assert progress_of(tmp_path, ()) == {"counters": {"iteration": 12}}


# ------------------------------------------------------------------------------------------------------- the conversion


def test_what_is_no_checkpoint_of_a_megatron_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = checkpoint(tmp_path / "c")
    monkeypatch.setattr(contents, "read_megatron_job", lambda *_: JobState(12))
    with pytest.raises(CheckpointError, match="is damaged: its job state lacks the part that Megatron jobs write"):
        MegatronCheckpoint(place)
    monkeypatch.setattr(contents, "read_megatron_job", lambda *_: job(12))
    with pytest.raises(CheckpointError, match="does not say which names its ranks had for the tensors"):
        MegatronCheckpoint(place).rank_layouts()
    (place / "manifest.json").write_text(replace(Manifest.load(place), framework="torch").to_json())
    with pytest.raises(CheckpointError, match="was written by the torch adapter, not by a Megatron job"):
        MegatronCheckpoint(place)


def stored(*optimizers: dict[str, Any], keys: tuple[str, ...] = (), pending: bool = False) -> Any:
    items = {key: [SimpleNamespace(shape=(4, 8, 3), torch_dtype=torch.float32)] for key in keys}
    state = SimpleNamespace(scheduler_pending=pending)
    return SimpleNamespace(
        optimizers=optimizers, items=items, dtype=lambda key: items[key][0].torch_dtype, job=state,
        manifest=SimpleNamespace(pieces=()),
    )  # fmt: skip


def test_names_without_the_numbers_of_layers_are_of_all_layers_together() -> None:
    """As in Megatron's own checkpoint, and it is told."""
    found = stored(keys=(TILE.key,))
    layers = replace(LAYOUT, chunks=({"decoder.layers.mlp.weight": 0},))
    assert [contents._weights(found, [layout])[1] for layout in (layers, LAYOUT)] == [["decoder.layers.mlp.weight"], []]


def test_a_frozen_weight_has_no_moments_and_an_optimizer_that_counts_nothing_no_step() -> None:
    view = contents.whole_view("w", (4, 2), ())
    keys = ("optimizer.state.exp_avg.w",)
    for kind, trained, wanted in (
        ("dense", True, {"exp_avg": None, "step": 7.0}),
        ("muon", True, {"exp_avg": None}),
        ("dense", False, {}),
    ):
        weight = Weight(view, (kind, 0) if trained else None)
        saved = stored({"kind": "dense", "step": 7.0}, {"kind": "muon", "step": None, "groups": [{}]}, keys=keys)
        values = {leaf.path[-1]: leaf.value for leaf in contents._moments(saved, {"w": weight})}
        assert values.keys() == wanted.keys()
        assert "step" not in wanted or float(values["step"].read()) == 7.0


def test_param_groups_without_a_parameter_are_left_out() -> None:
    """Megatron makes one for the parameters without weight decay, whether there are any or not."""
    saved = stored({"kind": "dense", "groups": [{"lr": 1}, {"lr": 2}], "step": None})
    leaves = list(contents._groups(saved, {"w": Weight(contents.whole_view("w", (4,), ()), ("dense", 1))}))
    assert {leaf.path: leaf.value for leaf in leaves} == {
        ("optim", "param_groups", 0, "lr"): 2,
        ("optim", "param_groups", 0, "params"): ["w"],
    }


def test_what_a_converted_checkpoint_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "left_out_of", lambda _: ["loader"])
    loader, stacked, behind = contents._notes(stored(pending=True), ["w"])
    assert "loader was left out" in loader and "w holds several layers" in stacked and "had not made its step" in behind
