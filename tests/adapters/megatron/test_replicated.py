"""``ReplicatedOptimizer`` and its checkpoints: what is saved comes back, and what cannot be is refused in words."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ttp.errors import CheckpointError, ConfigError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's import has several


class Scaler:
    """A loss scaler."""

    inv_scale = torch.tensor(0.5)

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


class Scheduler:
    """Counts samples, as Megatron's scheduler does."""

    num_steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_steps += state["num_steps"]

    def step(self, increment: int) -> None:
        self.num_steps += increment


class Optimizer:
    """A rank's part of a job with one shard: what checkpoints use of ``ReplicatedOptimizer``."""

    shard = 0
    placement = SimpleNamespace(shards=1)

    def __init__(self, model: nn.Module, *, scaler: Scaler | None = None, step: int = 12) -> None:
        self.trained = {f"0.{name}": p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.SGD(self.trained.values(), lr=0.5, momentum=0.9)
        self.held = {name: (p, p) for name, p in self.trained.items()}
        self.grad_scaler, self.current_step, self.streams = scaler, step, {"tracker": torch.zeros(1)}

    def note_streams(self) -> None:
        """See ``ReplicatedOptimizer.note_streams``."""


def model(*, seed: int) -> nn.Module:
    """Return a model with a frozen layer and a buffer."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    made[1].requires_grad_(False)
    return made


def args(made: nn.Module, own: Optimizer, scheduler: Scheduler | None, iteration: int = 12) -> Any:
    return iteration, [made], own, scheduler


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that makes checkpoints, for a job of one rank."""
    from megatron.core import parallel_state

    from ttp.adapters.megatron import replicated_checkpoint

    found: Any = replicated_checkpoint
    for axis in ("tensor", "pipeline"):
        monkeypatch.setattr(parallel_state, f"get_{axis}_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(parallel_state, f"get_{axis}_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(found, "replicated", lambda each: each)
    monkeypatch.setattr(found, "set_streams", lambda _: ["a stream is not there"])
    monkeypatch.setattr(found, "gather_bytes", lambda mine: [mine])
    monkeypatch.setenv("TTP_SAVE_DIR", str(tmp_path))
    monkeypatch.delenv("TTP_PORT", raising=False)
    found.session.reset()
    yield found
    monkeypatch.undo()
    found.session.reset()


@pytest.fixture
def megatron_args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the arguments of the program, where Megatron-LM keeps them."""
    given = SimpleNamespace(global_batch_size=4, save=None)
    module: Any = ModuleType("megatron.training.global_vars")
    module._GLOBAL_ARGS = given
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return given


def save(files: Any, *, seed: int = 1, step: int = 12, scheduler: Scheduler | None = None) -> nn.Module:
    made = model(seed=seed)
    own = Optimizer(made, scaler=Scaler(64.0), step=step)
    made(torch.ones(3, 2)).square().sum().backward()
    own.optimizer.step()
    assert files.SaveHandler()(0, [0], args(made, own, scheduler)) == 0
    assert files.rename_save_result(args(made, own, scheduler)) == 0
    return made


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_everything_comes_back(files: Any, megatron_args: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Weights, frozen ones too, buffers, momentum, loss scale, schedule and Megatron's count of samples."""
    scheduler = Scheduler()
    scheduler.num_steps = 48
    saved, fresh = save(files, scheduler=scheduler), model(seed=2)
    own, later = Optimizer(fresh, scaler=Scaler(), step=0), Scheduler()
    later.num_steps = 7
    assert files.load_checkpoint([fresh], own, later) == 12
    assert equal(saved, fresh) and own.current_step == 12
    assert all("momentum_buffer" in own.optimizer.state[p] for p in own.trained.values())
    assert (own.grad_scaler and own.grad_scaler.scale, later.num_steps) == (64.0, 48)
    assert megatron_args.consumed_train_samples == 48
    assert "a stream is not there" in caplog.text


def test_a_job_without_scaler_and_schedule_loads_what_has_them(files: Any) -> None:
    saved, fresh = save(files, scheduler=Scheduler()), model(seed=2)
    assert files.load_checkpoint([fresh], Optimizer(fresh, step=0)) == 12 and equal(saved, fresh)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    files: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = save(files, step=11)
    save(files, seed=3)
    file = tmp_path / "iter_0000012" / "mp_rank_00" / "shard_0_of_1.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    fresh = model(seed=2)
    assert files.load_checkpoint([fresh], Optimizer(fresh)) == 11 and equal(older, fresh)
    assert "is damaged: its size or digest is not the one in its .json file" in caplog.text


def test_all_ranks_go_back_to_what_each_of_them_finds_whole(
    files: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older = save(files, step=11)
    save(files, seed=3)
    monkeypatch.setattr(files, "gather_bytes", lambda mine: [mine, b"11"])
    fresh = model(seed=2)
    assert files.load_checkpoint([fresh], Optimizer(fresh)) == 11 and equal(older, fresh)
    assert "ranks do not find the same checkpoints" in caplog.text
    monkeypatch.setattr(files, "gather_bytes", lambda mine: [b"0"])
    assert files.load_checkpoint([fresh], Optimizer(fresh)) == 0, "there is none"


def test_a_checkpoint_of_another_model_is_refused_with_the_names(files: Any) -> None:
    save(files)
    wider: Any = model(seed=2)
    wider[0] = nn.Linear(2, 3)
    for other, named in ((wider, r"shape: 0\.0\.weight, 0\.0\.bias$"), (nn.Linear(2, 2), r"0\.weight")):
        with pytest.raises(CheckpointError, match=f"belongs to another model: .*{named}"):
            files.load_checkpoint([other], Optimizer(other))


def test_a_draft_that_is_not_whole_does_not_become_a_checkpoint(
    files: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a crash of a saver would leave a checkpoint that looks complete."""
    made = model(seed=1)
    own = Optimizer(made)
    own.placement = SimpleNamespace(shards=2)
    files.SaveHandler()(0, [0], args(made, own, None))
    assert files.rename_save_result(12) == 1
    assert "is not complete: it has only the shards ['shard_0_of_2']" in caplog.text
    assert not (tmp_path / "iter_0000012").exists()


def test_a_state_of_another_step_than_the_one_asked_for_is_not_saved(files: Any, tmp_path: Path) -> None:
    made = model(seed=1)
    with pytest.raises(UsageError, match=r"has made 12 updates, but the state after 13 .*call increase_step\(\)"):
        files.SaveHandler()(0, [0], args(made, Optimizer(made), None), step=13)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("noted", "saved"), [((10, 11), 12 * 4), ((11,), 11 * 4)])
def test_a_schedule_that_is_due_is_counted_in_the_save(
    files: Any, noted: tuple[int, ...], saved: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The save may come between the update and the step of the schedule, whose size the calls before have shown."""
    made, scheduler, handler = model(seed=1), Scheduler(), files.SaveHandler()
    own = Optimizer(made)
    handler.note_args(args(made, own, None, 9))
    for iteration in noted:
        scheduler.num_steps = 4 * iteration
        handler.note_args(args(made, own, scheduler, iteration))
    handler(0, [0], args(made, own, scheduler))
    common = files._read(files._place(files._iteration_dir(files.save_directory(), 12, draft=True)) / "common.pt")
    assert common["scheduler"] == {"num_steps": saved}
    assert ("increment is not known yet" in caplog.text) == (saved == 11 * 4)


def test_where_checkpoints_are(
    files: Any, megatron_args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The parts of a pipeline have Megatron's names for their directories."""
    monkeypatch.delenv("TTP_SAVE_DIR")
    files.session.reset()
    with pytest.raises(ConfigError, match="give Megatron --save, or set TTP_SAVE_DIR"):
        files.save_directory()
    megatron_args.save, megatron_args.load = str(tmp_path / "save"), str(tmp_path / "load")
    assert files.save_directory() == tmp_path / "save" and files.save_directory(loading=True) == tmp_path / "load"
    monkeypatch.setattr(files.parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    assert files._place(tmp_path).name == "mp_rank_00_000"


def draft(files: Any, *names: str, value: int = 0) -> Path:
    place: Path = files.save_directory() / "iter_0000012_tmp" / "mp_rank_00"
    place.mkdir(parents=True)
    for name in names or ("common.pt", "shard_0_of_1.pt"):
        files._write(place / name, {"value": value})
    return place


def test_a_step_that_was_saved_before_is_saved_again(files: Any, tmp_path: Path) -> None:
    """A restarted job that loses a rank before its first update saves the step that it has loaded."""
    for value in (1, 2, 3):
        draft(files, value=value)
        assert files.rename_save_result(12) == 0
        assert files._newest_whole(tmp_path, 100) == 12
        assert files._read(tmp_path / "iter_0000012" / "mp_rank_00" / "common.pt") == {"value": value}
    names = ["iter_0000012", "iter_0000012.replaced.1", "iter_0000012.replaced.2", "latest_checkpointed_iteration.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("at", ["between", "after"])
def test_a_crash_in_the_renames_loses_no_checkpoint(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Between them the step's checkpoint has no name of its own; after them Megatron's file names the one before."""

    class Crash(BaseException):
        pass

    def crash(*_: Any) -> None:
        raise Crash

    draft(files)
    assert files.rename_save_result(12) == 0
    draft(files)
    (tmp_path / files.LATEST).unlink()
    set_aside = files._set_aside
    with monkeypatch.context() as broken:
        if at == "between":
            broken.setattr(files, "_set_aside", lambda path: crash(set_aside(path)))
        else:
            broken.setattr(files, "write_durably", crash)
        with pytest.raises(Crash):
            files.rename_save_result(12)
    assert files._newest_whole(tmp_path, 100) == 12 and files._checkpoint(tmp_path, 12).is_dir()
    assert files.rename_save_result(12) == 0  # by another rank, or the same one later
    assert (tmp_path / files.LATEST).read_text() == "12" and files._checkpoint(tmp_path, 12).name == "iter_0000012"


def test_shards_of_a_failed_attempt_with_another_number_of_ranks_are_removed(files: Any) -> None:
    """Else the draft of that step would never become a checkpoint."""
    own = SimpleNamespace(current_step=12, shard=1, placement=SimpleNamespace(shards=3), optimizer=None, held={})
    place = draft(files, "shard_0_of_2.pt", "shard_0_of_3.pt")
    (place / ".shard_1_of_3.pt.77").write_bytes(b"a rank died while it wrote this")
    assert files.SaveHandler()(1, [0, 1, 2], (12, None, own, None)) == 0
    left = {f"shard_{number}_of_3.{kind}" for number in (0, 1) for kind in ("pt", "json")}
    assert {path.name for path in place.iterdir()} == left


# ---------------------------------------------------------------------------------------------------- the optimizer


@pytest.fixture
def kind() -> Any:
    from ttp.adapters.megatron.replicated_optimizer import ReplicatedOptimizer

    return ReplicatedOptimizer


def test_settings_with_which_shards_would_be_wrong_are_refused(kind: Any) -> None:
    def chunk(distributed: bool) -> Any:
        return SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=distributed))

    with pytest.raises(ConfigError, match="set use_distributed_optimizer=False in DistributedDataParallelConfig"):
        kind._refuse(SimpleNamespace(), [chunk(True)])
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_param_gather"):
        with pytest.raises(ConfigError, match=rf"OptimizerConfig\.{name}: set it to False"):
            kind._refuse(SimpleNamespace(**{name: True}), [chunk(False)])
    kind._refuse(SimpleNamespace(overlap_param_gather=False), None)


def test_it_is_not_saved_in_a_format_that_would_lack_the_other_shards(kind: Any) -> None:
    with pytest.raises(ConfigError, match="use ttp_save_checkpoint"):
        kind.sharded_state_dict(None, {})


def test_of_several_optimizers_none_is_chosen(kind: Any) -> None:
    """A model with experts has two, and a checkpoint would lack one of them."""
    from ttp.adapters.megatron.replicated_checkpoint import replicated

    one, other = object.__new__(kind), object.__new__(kind)
    assert replicated(SimpleNamespace(chained_optimizers=[one, SimpleNamespace()])) is one
    for found in ([], [one, other]):
        with pytest.raises(UsageError, match=rf"^{len(found)} ReplicatedOptimizers .* protect it with"):
            replicated(SimpleNamespace(chained_optimizers=found))


def test_the_norm_is_that_of_unscaled_gradients_of_all_shards(kind: Any) -> None:
    """Of its own shard a rank has unscaled them already; those of other shards are still scaled."""
    own = object.__new__(kind)
    mine, other, half, lost = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
    main = torch.zeros(2)
    main.grad, half.grad = torch.ones(2), torch.full((2,), 6.0)
    vars(other)["main_grad"] = torch.full((2,), 4.0)
    own._main, own.grad_scaler = {mine: main}, Scaler()
    assert [own._gradient(p).tolist() for p in (mine, other, half)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert own._gradient(lost) is None
    own.grad_scaler = None
    assert own._gradient(other).tolist() == [4.0, 4.0]


def test_parameters_of_a_shard_are_found_with_their_copies(kind: Any) -> None:
    """Parameters in fp32 are their own copies; a rank without parameters has none."""
    own = object.__new__(kind)
    own.is_stub_optimizer = True
    assert not list(own._pairs())
    half, copy, full = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1), torch.ones(1)
    own.is_stub_optimizer = False
    own.float16_groups, own.fp32_from_float16_groups, own.fp32_from_fp32_groups = [[half]], [[copy]], [[full]]
    (a, b), (c, d) = own._pairs()
    assert a is half and b is copy and c is full and d is full
