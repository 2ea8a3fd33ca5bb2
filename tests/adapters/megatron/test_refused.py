"""State that cannot be protected is refused at the start; checkpoints offered to Megatron have the names that it looks
for.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import ttp
from ttp.adapters.megatron import contents, offer_to_megatron, restore, stock
from ttp.adapters.megatron.adapter import MegatronAdapter
from ttp.adapters.megatron.geometry import Described, Geometry, TensorView
from ttp.adapters.megatron.optimizers import Holding, Inner, _fixed, refuse_unknown, unchained, with_counts
from ttp.adapters.megatron.restore import Wants, _install_groups, _moments, _other_optimizers, restore_groups
from ttp.adapters.megatron.source import MegatronSource, _leaves_of, refuse_unsaved
from ttp.adapters.megatron.stock import JOB_KEY
from ttp.adapters.torch.restoring.reader import load_chunks
from ttp.adapters.torch.saving.checkpoint import Chunk, write_shard
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.errors import CheckpointError, ConfigError, UsageError
from ttp.store.manifest import Manifest


def checkpoint(directory: Path, *names: str) -> Path:
    directory.mkdir()
    manifest = Manifest(
        version=Version(12), run_id="r", incarnation=0, incident="i", cause="c", reason="why", world_size=1,
        groups=Layout.data_parallel(1).groups, framework="megatron", created_unix_s=0.0, pieces=(),
    )  # fmt: skip
    (directory / "manifest.json").write_text(manifest.to_json())
    for name in names:
        (directory / name).write_text("")
    return directory


def test_a_checkpoint_is_offered_by_links(tmp_path: Path) -> None:
    """Also where a process of the same pid has crashed: containers that share a directory use the same few pids."""
    saved, load = checkpoint(tmp_path / "tft_saved_checkpoints-step_12", "common.pt"), tmp_path / "load"
    load.mkdir()
    (load / f".iter_0000012.{os.getpid()}").symlink_to(tmp_path / "another")
    for _ in range(2):  # again is fine
        link = offer_to_megatron(saved, load)
    assert link == load / "iter_0000012" and (link / "common.pt").is_file()
    assert (load / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert {path.name for path in load.iterdir()} == {link.name, "latest_checkpointed_iteration.txt"}


def test_a_name_that_is_taken_leaves_no_temporary_file(tmp_path: Path) -> None:
    saved, load = checkpoint(tmp_path / "tft_saved_checkpoints-step_12", "common.pt"), tmp_path / "load"
    (load / "iter_0000012").mkdir(parents=True)  # Megatron's own
    with pytest.raises(OSError, match="iter_0000012"):
        offer_to_megatron(saved, load)
    assert [path.name for path in load.iterdir()] == ["iter_0000012"]


def test_what_megatron_cannot_read_is_not_offered(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        offer_to_megatron(checkpoint(tmp_path / "saved"), tmp_path / "load")


@pytest.mark.parametrize("setting", ["use_precision_aware_optimizer", "optimizer_cpu_offload"])
def test_state_that_is_not_where_it_is_looked_for_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        refuse_unknown(SimpleNamespace(config=SimpleNamespace(**{setting: True})))


@pytest.mark.parametrize(
    ("name", "given"),
    [("scaler", torch.amp.GradScaler("cpu")), ("layout", Layout.data_parallel(2)), ("shard_of", lambda name: "model")],
)
def test_what_ttp_finds_itself_cannot_be_given(name: str, given: Any, tmp_path: Path) -> None:
    """A layout with other names of shards would make empty checkpoints."""
    optimizer = type("DistributedOptimizer", (), {"__module__": "megatron.core.optimizer.distrib_optimizer"})()
    with pytest.raises(UsageError, match=f"takes no {name}="):
        ttp.wrap_optimizer(optimizer, model=torch.nn.Linear(1, 1), save_dir=tmp_path, **{name: given})


@pytest.mark.filterwarnings("ignore")  # of Megatron, which is imported here
def test_megatron_fsdp_is_refused_before_its_model_is_described() -> None:
    """Its model has no ``sharded_state_dict()``."""
    fsdp = SimpleNamespace(config=SimpleNamespace(), ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    adapter: Any = object.__new__(MegatronAdapter)
    adapter._chunks = [nn.Linear(1, 1)]
    with pytest.raises(ConfigError, match=r"leave --use-megatron-fsdp out; .* DistributedOptimizer"):
        adapter._look(fsdp, None, None)


def test_a_layer_wise_optimizer_is_refused_although_it_is_a_chain() -> None:
    kind = type("LayerWiseDistributedOptimizer", (), {"chained_optimizers": ()})
    with pytest.raises(ConfigError, match="layer-wise"):
        list(unchained(kind()))


def test_chains_of_chains_are_followed_in_order() -> None:
    one, two, three = (SimpleNamespace(name=name) for name in "abc")
    chain = SimpleNamespace(chained_optimizers=[one, SimpleNamespace(chained_optimizers=[two, three])])
    assert list(unchained(chain)) == [one, two, three]
    assert list(unchained(one)) == [one]


def test_all_param_groups_have_one_count_of_updates() -> None:
    """As Megatron saves it: the rank that writes what is equal on all ranks may have an empty group."""
    fused: list[dict[str, Any]] = [
        {"kind": "dense", "groups": [{"lr": 1, "step": 8}, {"lr": 2, "step": 4}, {"lr": 3}], "step": None},
        {"kind": "expert", "groups": [{"lr": 4}], "step": None},
    ]
    counted = with_counts(fused)
    assert [[group["step"] for group in each["groups"]] for each in counted] == [[8, 8, 8], [8]]
    assert [each["kind"] for each in counted] == ["dense", "expert"] and counted[0]["groups"][1]["lr"] == 2
    plain: list[dict[str, Any]] = [{"groups": [{"lr": 1}], "step": 8.0}, {"groups": [{"lr": 2}], "step": None}]
    assert with_counts(plain) == [{"groups": [{"lr": 1}], "step": 8.0}, {"groups": [{"lr": 2}], "step": 8.0}]
    fresh: list[dict[str, Any]] = [{"groups": [{"lr": 1}], "step": None}]
    assert with_counts(fresh) == fresh


def test_the_count_of_one_class_is_not_that_of_another() -> None:
    """Megatron chains Muon, which counts no updates, and Adam. An optimizer may have no parameters on this rank."""
    muon: dict[str, Any] = {"class": "Muon", "groups": [{"lr": 1}], "step": None}
    stale: dict[str, Any] = {"class": "Adam", "groups": [{"lr": 2, "step": 4}], "step": None}
    adam: dict[str, Any] = {"class": "Adam", "groups": [{"lr": 3, "step": 8}], "step": None}
    assert with_counts([muon, stale, adam]) == [muon, {**stale, "groups": [{"lr": 2, "step": 8}]}, adam]


def test_a_writer_without_parameters_has_the_counts_of_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank, which writes what is equal on all ranks, may have frozen layers only."""
    mine: dict[str, Any] = {"kind": "dense", "class": "Adam", "groups": [{"lr": 1}, {"lr": 2}], "step": None}
    told = stock.count_entry(Shard("dense-pp1"), {**mine, "groups": [{"step": torch.tensor(8)}, {}], "step": None})
    assert stock.count_entry(Shard("dense-pp0"), mine) == {}
    (key,) = told
    items = [SimpleNamespace(key="decoder.weight"), SimpleNamespace(key=key)]
    monkeypatch.setattr(stock, "read_job_state", lambda *_: JobState(8, extra={JOB_KEY: {"optimizers": [mine]}}))
    monkeypatch.setattr(stock, "items_of", lambda _: items)
    monkeypatch.setattr(stock, "read_value", lambda _, item: told[item.key])
    job = stock.read_megatron_job(tmp_path, ())
    assert job.extra[JOB_KEY]["optimizers"] == [{**mine, "groups": [{"lr": 1, "step": 8}, {"lr": 2, "step": 8}]}]


@pytest.mark.parametrize(("copied", "finished", "saved"), [(3, 3, 3), (3, 4, 3), (None, 4, 4)])
def test_an_update_that_is_undone_is_not_counted(copied: int | None, finished: int, saved: int) -> None:
    """An update that was left half done has increased the count of its first parameters."""
    main = torch.zeros(2, requires_grad=True)
    live = torch.optim.AdamW([main])
    live.state[main] = {"step": torch.tensor(4.0)}
    image = SimpleNamespace(state={main: {"step": torch.tensor(3.0)}})
    source: Any = SimpleNamespace(
        _preimage_now=SimpleNamespace(version=copied, image=lambda _: image),
        processor=SimpleNamespace(gate=SimpleNamespace(version=finished)),
        _to_host=lambda tensor: tensor,
        on_device=False,
    )
    held = Holding(Described("", main, (), first=True), main, 0, 2, ())
    inner = Inner(None, live, "dense", "", (held,), 0, 1)
    assert MegatronSource._step(source, inner, Version(saved)) == saved


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_two_optimizers_of_one_kind_get_their_own_param_groups(kind: Any) -> None:
    """Muon and Adam, for example: their param groups differ in the class of the optimizer only."""
    saved = [
        {"kind": "dense", "class": f"{each.__module__}.{each.__qualname__}", "groups": [{"lr": lr}], "step": None}
        for each, lr in ((torch.optim.SGD, 0.25), (torch.optim.AdamW, 0.5))
    ]
    inner = Inner(None, kind([torch.zeros(2)], lr=1.0), "dense", "param", (), 0, 1)
    job = JobState(1, extra={JOB_KEY: {"optimizers": saved}})
    held: Any = SimpleNamespace(inners=[inner])
    restore_groups(held, job)
    assert inner.optimizer.param_groups[0]["lr"] == (0.25 if kind is torch.optim.SGD else 0.5)


def test_two_optimizers_of_one_class_get_their_own_param_groups_by_their_order() -> None:
    """A program that chains Megatron's optimizers itself may give matrices and vectors to Adam with other rates."""
    name = f"{torch.optim.AdamW.__module__}.AdamW"
    saved = [{"kind": "dense", "class": name, "groups": [{"max_lr": lr}], "step": None} for lr in (0.25, 0.5)]
    made = [Inner(None, torch.optim.AdamW([torch.zeros(2)], lr=1.0), "dense", "", (), 0, 1) for _ in saved]
    held: Any = SimpleNamespace(inners=made)
    restore_groups(held, JobState(1, extra={JOB_KEY: {"optimizers": saved}}))
    assert [inner.optimizer.param_groups[0]["max_lr"] for inner in made] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("kind", "lost"),
    [(torch.optim.Adam, ""), (torch.optim.SGD, ""), (torch.optim.Adagrad, ""), (torch.optim.NAdam, "mu_product"),
     (torch.optim.Adafactor, "col_var, row_var")],
)  # fmt: skip
def test_state_of_an_optimizer_that_has_no_place_in_a_checkpoint_is_refused(kind: Any, lost: str) -> None:
    """A resumed optimizer would lack it: NAdam raises a KeyError then, others begin it anew."""
    weight, described = nn.Parameter(torch.ones(2, 2)), Described("layer.weight", torch.zeros(2, 2), (), first=True)
    weight.grad = torch.ones(2, 2)
    optimizer = kind([weight], lr=0.1)
    optimizer.step()
    inner = Inner(None, optimizer, "dense", "", (Holding(described, weight, 0, 4, ()),), 0, 1)
    if not lost:
        refuse_unsaved([inner])
        return
    with pytest.raises(UsageError, match=rf"the {kind.__name__} keeps {lost} of layer.weight, .*ttp cannot save"):
        refuse_unsaved([inner])


def test_moments_of_a_parameter_without_dimensions_are_saved() -> None:
    """A temperature, for example."""
    weight, described = nn.Parameter(torch.ones(())), Described("scale", torch.zeros(()), (), first=True)
    weight.grad = torch.ones(())
    optimizer = torch.optim.Adam([weight], lr=0.1)
    optimizer.step()
    inner = Inner(None, optimizer, "dense", "", (Holding(described, weight, 0, 1, ()),), 0, 1)
    refuse_unsaved([inner])
    assert [leaf.name for leaf in _leaves_of(inner)] == ["0.scale", "0.scale.exp_avg", "0.scale.exp_avg_sq"]


@pytest.mark.parametrize(
    ("here", "there", "refused"),
    [(torch.optim.SGD, torch.optim.AdamW, True), (torch.optim.AdamW, torch.optim.SGD, True),
     (torch.optim.AdamW, torch.optim.Adam, False), (torch.optim.SGD, torch.optim.SGD, False)],
)  # fmt: skip
def test_a_checkpoint_of_another_optimizer_is_refused(here: Any, there: Any, refused: bool) -> None:
    """Another library's Adam is not another optimizer."""
    kept = {"kind": "dense", "class": there.__name__, "groups": there([torch.zeros(2)], lr=1.0).param_groups}
    held: Any = SimpleNamespace(inners=[Inner(None, here([torch.zeros(2)], lr=1.0), "dense", "", (), 0, 1)])
    others = list(_other_optimizers(held, JobState(1, extra={JOB_KEY: {"optimizers": [kept]}})))
    assert bool(others) is refused
    assert not others or f"here and {there.__name__} in the checkpoint" in others[0]


def test_they_are_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [{"kind": "dense", "class": "Muon"}, {"kind": "dense", "class": "Adam"}]
    monkeypatch.setattr(contents, "MegatronCheckpoint", lambda _path: SimpleNamespace(optimizers=both))
    with pytest.raises(CheckpointError, match=r"several optimizers for one kind of parameters \(Muon, Adam\)"):
        contents.read_megatron(tmp_path)


@pytest.mark.filterwarnings("ignore")  # of Megatron, which is imported here
@pytest.mark.parametrize("fused", [True, False])
def test_counts_of_a_fused_optimizer_are_on_its_device(fused: bool, tmp_path: Path) -> None:
    from ttp.adapters.megatron.replicated_loading import put_back

    main = torch.zeros(2, device="meta")
    optimizer: Any = SimpleNamespace(param_groups=[{"fused": fused}], state={})
    own: Any = SimpleNamespace(trained={"w": torch.zeros(2)}, held={"w": (None, main)}, optimizer=optimizer)
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}
    put_back(own, [{"weights": {"w": torch.ones(2)}, "state": {"w": state}, "groups": [{}]}], tmp_path)
    loaded = optimizer.state[main]
    assert loaded["step"].device.type == ("meta" if fused else "cpu") and loaded["exp_avg"].is_meta


def test_param_groups_that_differ_in_their_rates_only_come_back_in_their_order() -> None:
    """``--decoupled-lr``: Megatron marks the group of the output layer by nothing but its rates."""
    same = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    saved = [{**same, "max_lr": 1e-3}, {**same, "wd_mult": 0.0, "max_lr": 1e-3}, {**same, "max_lr": 5e-5}]
    live: list[dict[str, Any]] = [{**group, "max_lr": 0.0, "params": []} for group in saved]
    _install_groups(live, saved)
    assert [group["max_lr"] for group in live] == [1e-3, 1e-3, 5e-5]
    more: list[dict[str, Any]] = [{**same, "max_lr": 0.0} for _ in range(3)]
    _install_groups(more, saved)
    assert [group["max_lr"] for group in more] == [1e-3, 5e-5, 5e-5]


def test_what_no_optimizer_updates_is_written_once_also_if_the_program_switches_its_gradient() -> None:
    """A program may freeze parameters, or unfreeze others, after it has made the optimizer."""
    mine, other, lost = (torch.zeros(2, requires_grad=trained) for trained in (False, False, True))
    geometry = Geometry({id(t): Described("", t, (), first=True) for t in (mine, other, lost)})
    megatron = SimpleNamespace(buffers=[SimpleNamespace(params=[mine, other])])
    inners = [
        Inner(megatron, torch.optim.SGD([torch.zeros(2)]), "dense", "param", (holding,), part, 2)
        for part, updated in enumerate((mine, other))
        for holding in [Holding(geometry.tensors[id(updated)], updated, 0, 2, ())]
    ]
    assert [[d.tensor is lost for d in _fixed([inner], geometry)] for inner in inners] == [[True], []]


@pytest.mark.filterwarnings("ignore")  # of Megatron, which is imported here
def test_frozen_experts_are_divided_among_the_ranks_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With expert parallelism, the other data parallel ranks have other experts."""
    from megatron.core import parallel_state

    for name, value in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(parallel_state, f"get_expert_data_parallel_{name}", lambda *, value=value, **_: value)
    expert, dense = torch.zeros(2), torch.zeros(2)
    vars(expert)["allreduce"] = False
    geometry = Geometry({id(t): Described("", t, (), first=True) for t in (expert, dense)})
    places = [(0, 2), (1, 2), (0, 1)]
    inners = [Inner(None, torch.optim.SGD([torch.zeros(2)]), "dense", "param", (), *place) for place in places]
    found = [[d.tensor is expert for d in _fixed([inner], geometry)] for inner in inners]
    assert found == [[True], [True, False], [True, False]]


def test_a_parameter_without_a_place_in_checkpoints_is_refused() -> None:
    from ttp.adapters.megatron.optimizers import _holding

    lost = torch.zeros(3)
    with pytest.raises(ConfigError, match="model chunks"):
        _holding(Geometry(), lost, lost, 0, 3)


def test_what_the_adapter_for_torch_asks_has_an_answer() -> None:
    """A setting for devices (``TTP_STREAM_BARRIER``) and the removal of hooks are inherited, most objects are not."""
    adapter: Any = object.__new__(MegatronAdapter)
    adapter._processor = SimpleNamespace(survivor=None)
    adapter.source = SimpleNamespace(runtimes=(None,), has_state_on_host=lambda: False)
    assert "exchanges weights" in adapter._why_wait()
    adapter._hooks, adapter._barrier = contextlib.ExitStack(), None
    adapter.detach()


def test_a_larger_padding_of_the_vocabulary_begins_with_moments_of_zero(tmp_path: Path) -> None:
    """Its rows are in no checkpoint. Logits of padding have gradients, so a NaN there would reach the loss."""
    view = TensorView("w", (6, 2), (0, 0), (6, 2), (2, 1), 0, flexible=True)
    described = Described("w", torch.zeros(6, 2), (view,), True)
    holding = Holding(described, torch.full((6, 2), 3.0), 0, 12, described.whole)
    state: dict[str, Any] = {"optimizer.state.param.w": torch.ones(4, 2), "optimizer.state.exp_avg.w": torch.ones(4, 2)}
    saved = {
        item.key: [item] for item in items_of([write_shard(tmp_path, "f", state, shard=Shard("s"), writer=Rank(0))])
    }
    wants = Wants()
    torch.use_deterministic_algorithms(True)  # fills memory that is not initialised with NaN
    try:
        ((main, moments),) = _moments(cast("Any", SimpleNamespace(holdings=[holding])), saved, {}, wants).items()
    finally:
        torch.use_deterministic_algorithms(False)
    load_chunks(
        tmp_path, [item for items in saved.values() for item in items], wants.chunks.items(), padded=wants.padded
    )
    assert moments["exp_avg"].tolist() == [[1.0, 1.0]] * 4 + [[0.0, 0.0]] * 2
    assert main.tolist() == [[1.0, 1.0]] * 4 + [[3.0, 3.0]] * 2, "the weights of padding are those of this job's seed"


def test_boxes_that_do_not_make_up_a_tensor_are_refused_before_anything_is_modified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they have as many elements as the tensor, but two of its rows twice and two of them not at all."""
    view = TensorView("w", (8, 2), (0, 0), (8, 2), (2, 1), 0, flexible=False)
    described = Described("w", torch.zeros(8, 2), (view,), True)
    boxes = tuple(Chunk(torch.ones(4, 2), (8, 2), (row, 0)) for row in (0, 2))
    piece = write_shard(tmp_path, "f", {"w": boxes}, shard=Shard("s"), writer=Rank(0))
    held: Any = SimpleNamespace(geometry=SimpleNamespace(tensors={"w": described}), inners=[])
    manifest: Any = SimpleNamespace(version=1, pieces=[piece])
    monkeypatch.setattr(restore, "read_megatron_job", lambda *_: JobState(1, extra={JOB_KEY: {}}))
    with pytest.raises(CheckpointError, match="w has chunks that overlap"):
        restore.restore_into(tmp_path, manifest, held)
    assert not described.tensor.any()
