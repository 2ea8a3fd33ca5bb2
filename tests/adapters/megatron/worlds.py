"""The programs of the ranks of a test world; ``nursery.py`` runs them."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import ttp
from tests.adapters.megatron import shims
from tests.adapters.megatron.gpt import Shape, Training
from tests.adapters.megatron.hurting import Hurt
from tests.adapters.torch.stub_processor import Stateful
from ttp.adapters.torch.local_state.extra_state import ExtraState


def _directory() -> Path:
    return Path(os.environ["JOB_DIR"])


def _rank() -> int:
    return int(os.environ["RANK"])


def _join(name: str, shape: Shape) -> None:
    """Join the job's process group; without a name, the one that the launcher has made possible."""
    collectives: Any = dist
    if name:
        store = collectives.FileStore(str(_directory() / f"store.{name}"), int(os.environ["WORLD_SIZE"]))
        dist.init_process_group("gloo", store=store, rank=_rank(), world_size=int(os.environ["WORLD_SIZE"]))
    else:
        dist.init_process_group("gloo")
    shims.apply(torch_adam=shape.torch_adam)


def job(
    shape: dict[str, Any],
    steps: int,
    life: int = 0,
    fault: dict[str, Any] | None = None,
    undo: str | None = None,
    through: str = "protect",
    hosts: str = "",
    launched: bool = False,
) -> None:
    """Train under ttp until ``steps`` updates are made.

    Args:
        shape: see ``Shape``.
        steps: number of updates of the job.
        life: how often it was started before.
        fault: see ``Hurt``.
        undo: see ``protect``.
        through: ``protect``; ``install`` into something like Megatron-LM's training module; or ``plain``, with torch's
            Adam.
        hosts: for each rank the letter of its supposed host; then with ``buddy=True``.
        launched: there is a launcher, which has made a process group possible.
    """
    if hosts:
        os.environ |= {"TTP_HOST": hosts[_rank()], "TTP_RUN_DIR": str(_directory() / "run" / hosts[_rank()])}
    _join("" if launched else f"job{life}", Shape(**shape))
    training = Training(Shape(**shape), seed=123 + life)  # nothing may be right by chance
    hurt = Hurt(fault or {}, life)
    hurt.watch(training)
    run = partial(_iterate, training, steps, life, hurt)
    if through == "install":
        _pretrain(training, run)
    elif through == "plain":
        _with_torchs_adam(training, run)
    else:
        _protected(training, run, undo, buddy=bool(hosts))
    dist.barrier()


@ttp.ttp_to_persist
def _protected(training: Training, run: Callable[[int], None], undo: str | None, *, buddy: bool) -> None:
    from ttp.adapters.megatron import protect

    protect(
        training.chunks,
        training.optimizer,
        training.scheduler,
        training.args,
        save_dir=_directory() / "checkpoints",
        undo=undo,
        buddy=buddy,
    )
    run(ttp.restore())


@ttp.ttp_to_persist
def _with_torchs_adam(training: Training, run: Callable[[int], None]) -> None:
    """Do what Megatron-LM's ``run_simple_mcore_train_loop.py`` does: torch's Adam updates Megatron's model."""
    (model,) = training.chunks
    plain = torch.optim.Adam(model.parameters(), 1e-2)

    def step() -> tuple[bool, None, None]:
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        plain.step()
        return True, None, None

    inner = [Namespace(optimizer=plain)]
    training.optimizer = Namespace(step=step, zero_grad=plain.zero_grad, chained_optimizers=inner)
    training.scheduler = Namespace(step=lambda increment: None, state_dict=dict)
    ttp.wrap_optimizer(plain, model=model, save_dir=_directory() / "checkpoints")
    training.args.iteration = start = ttp.restore()
    training.args.consumed_train_samples = start * training.batch
    run(start)


def _pretrain(training: Training, run: Callable[[int], None]) -> None:
    """Do what ``pretrain`` of Megatron-LM does, as far as ttp hooks it."""
    from ttp.adapters.megatron import install

    def train(_forward_step: Any, model: Any, _optimizer: Any, _scheduler: Any) -> None:
        assert model is training.chunks
        run(training.args.iteration)

    module: Any = ModuleType("training")
    module.get_args, module.train, module.train_step = lambda: training.args, train, training.step
    module.setup_model_and_optimizer = lambda: (training.chunks, training.optimizer, training.scheduler)
    install(save_dir=_directory() / "checkpoints", training=module)
    made = module.setup_model_and_optimizer()
    vars(training)["step"] = module.train_step
    torch.empty((), dtype=torch.int64).random_()  # as a DataLoader does when an iterator is made
    module.train(None, *made)


def _iterate(training: Training, steps: int, life: int, hurt: Hurt, start: int) -> None:
    _note(f"{life} start {start}")
    assert training.args.iteration >= start, (training.args, start)
    hurt.watch_behind(training)
    while start < steps:
        hurt.step = start
        hurt.at("begin")
        start += training.step()
        hurt.at("stepped")
        _note(f"{life} version {start} {bits(training)}")
    (_directory() / f"result{_rank()}.json").write_text(json.dumps(summary(training), sort_keys=True))


def _note(text: str) -> None:
    with (_directory() / f"rank{_rank()}.log").open("a") as log:
        log.write(text + "\n")


def bits(training: Training) -> str:
    """Return a digest of this rank's weights, moments and schedule."""
    found = summary(training)
    return digest(
        *(found[name].encode() for name in ("weights", "buffers", "main", "moments", "groups", "scalers", "schedule"))
    )


def digest(*parts: Any) -> str:
    """Return a digest of the values of these tensors."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part.detach().float().contiguous().numpy().tobytes() if isinstance(part, torch.Tensor) else part)
    return h.hexdigest()


def summary(training: Training) -> dict[str, str]:
    """Return everything in which a resumed rank has to equal one that never stopped."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    inner = [each.optimizer for each in training.optimizer.chained_optimizers if each.optimizer is not None]
    main = [p for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
    groups = [
        {k: v for k, v in g.items() if k != "params" and (k != "step" or g["params"])}  # not counted in an empty one
        for o in inner
        for g in o.param_groups
    ]
    scalers = [getattr(each, "grad_scaler", None) for each in training.optimizer.chained_optimizers]
    return {
        "weights": digest(*(p for chunk in training.chunks for p in chunk.parameters())),
        "buffers": digest(*(b for chunk in training.chunks for b in torch.nn.Module.buffers(chunk))),
        "main": digest(*main),
        "moments": digest(*(v for s in states for _, v in sorted(s.items()) if isinstance(v, torch.Tensor))),
        "groups": repr([sorted(group.items()) for group in groups]),
        "scalers": repr([scaler.state_dict() for scaler in scalers if scaler is not None]),
        "rng": digest(torch.get_rng_state(), *(s for _, s in sorted(get_cuda_rng_tracker().get_states().items()))),
        "args": repr(training.args),
        "extra_states": digest(
            *(m.history for chunk in training.chunks for m in chunk.modules() if hasattr(m, "history"))
        ),
        "last_losses": repr(training.losses[-2:]),
        "schedule": repr(training.scheduler.state_dict()),
    }


@ttp.ttp_to_persist
def counting(steps: int) -> None:
    """Train with two numbers of the loop: it raises one before each forward pass, and one after each update."""
    from ttp.adapters.megatron import protect

    _join("counting", Shape())
    training, early, late = Training(Shape(instances=2)), Stateful(value=0), Stateful(value=0)
    counts = {"early": early, "late": late}
    states: Any = ExtraState
    states.notes = lambda _: ["a note on them"]  # as for loaders of torchdata, which this environment lacks
    save_dir = _directory() / "checkpoints"
    protect(
        training.chunks, training.optimizer, training.scheduler, training.args, save_dir=save_dir, extra_state=counts
    )
    for _ in range(steps):
        early.state["value"] += 1
        training.step()
        late.state["value"] += 1
    dist.barrier()


@ttp.ttp_to_persist
def refused(what: str, shape: dict[str, Any]) -> None:
    """Protect a training of this shape, whose optimizer or save_dir is wrong on rank 1 only if ``what`` says so."""
    from ttp.adapters.megatron import protect

    _join("refused", Shape())
    training, save_dir = Training(Shape(**shape)), _directory() / "checkpoints"
    if _rank() == 1 and what == "optimizer":
        training.optimizer.chained_optimizers[0].config.optimizer_cpu_offload = True
    if _rank() == 1 and what == "save_dir":
        save_dir = Path(os.devnull) / "checkpoints"
    protect(training.chunks, training.optimizer, training.scheduler, training.args, save_dir=save_dir)


def growing_batches() -> None:
    """Check Megatron's own count, with batches that grow from 5 to 10 samples and cannot always be divided by two."""
    from megatron.core import num_microbatches_calculator as batches

    from ttp.adapters.megatron.rank_state import Progress, samples_after

    batches.init_num_microbatches_calculator(0, [5, 5, 12], 10, 1, 2, decrease_batch_size_if_needed=True)
    args = Namespace(iteration=0, curr_iteration=2, consumed_train_samples=8, skipped_train_samples=2)
    batches.update_num_microbatches(args.consumed_train_samples, consistency_check=False)
    assert batches.get_num_microbatches() == 2, "four samples of five"
    progress = Progress(args, [])
    progress.iteration_begins()
    kept = progress.state_dict()
    assert kept["counters"] == {"iteration": 3, "consumed_train_samples": 12, "skipped_train_samples": 3}, kept
    batches.update_num_microbatches(0, consistency_check=False)
    Progress(args, []).load_state_dict(kept)
    assert (args.iteration, args.consumed_train_samples, args.skipped_train_samples) == (3, 12, 3)
    assert batches.get_num_microbatches() == 5, "all ten"
    assert [samples_after(steps, 10) for steps in range(6)] == [0, 4, 8, 12, 22, 32]
    assert batches.get_num_microbatches() == 5, "the next batch is as large as after five iterations"
    samples_after(1, 10)
    assert batches.get_num_microbatches() == 2, "and here as after one"


# ------------------------------------------------------------------------------------------- states of other layouts


def state(shape: dict[str, Any], name: str, steps: int = 0, ttp_from: str = "", stock_from: str = "") -> None:
    """Write the state of a job to ``<name>.<rank>.pt``, as Megatron describes it, in boxes of global tensors.

    The job has trained ``steps``, or has restored a checkpoint: through ttp, or as Megatron itself does.
    """
    _join(name, Shape(**shape))
    training = Training(Shape(**shape), seed=123 if steps else 77)
    training.train(steps)
    if ttp_from:
        _restore_by_ttp(training, ttp_from)
    if stock_from:
        _restore_by_megatron(training, stock_from)
    torch.save({"boxes": _boxes(training), "summary": summary(training)}, _directory() / f"{name}.{_rank()}.pt")
    training.train(2)
    (_directory() / f"{name}.{_rank()}.json").write_text(json.dumps(summary(training)))
    dist.barrier()


def _restore_by_ttp(training: Training, save_dir: str) -> None:
    from ttp.adapters.megatron import protect

    protect(training.chunks, training.optimizer, training.scheduler, training.args, save_dir=save_dir)
    assert ttp.restore() > 0


def _restore_by_megatron(training: Training, checkpoint: str) -> None:
    """Do what ``load_checkpoint`` of Megatron-LM does with a ``torch_dist`` checkpoint."""
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(checkpoint)
    loaded: Any = dist_checkpointing.load(_described(training, metadata, is_loading=True), checkpoint)
    for number, chunk in enumerate(_plain(training)):
        chunk.load_state_dict(loaded[f"model{number}"])
    with torch.no_grad():
        training.optimizer.load_state_dict(loaded["optimizer"])
    training.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    training.args.iteration = loaded["iteration"]
    training.args.consumed_train_samples = loaded["args"].consumed_train_samples


def _plain(training: Training) -> list[Any]:
    from megatron.core.utils import unwrap_model

    return list(unwrap_model(training.chunks))


def _described(training: Training, metadata: Any, *, is_loading: bool) -> dict[str, Any]:
    described: dict[str, Any] = {f"model{number}": _entries(chunk) for number, chunk in enumerate(_plain(training))}
    model = dict(described)
    described["optimizer"] = training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return described


def _entries(chunk: Any) -> Any:
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    return chunk.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))


Boxes = list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]


def _boxes(training: Training) -> Boxes:
    """Return key, global shape, offset and elements of all weights and moments, gathered without ttp.

    Megatron's own ``fully_reshardable`` state is not used: it leaves out elements of a model with several buckets.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    model = {f"model{number}": _entries(chunk) for number, chunk in enumerate(_plain(training))}
    by_parameter = {id(one.data): one for one in nested_values(model)}
    described: dict[str, Any] = dict(model)
    for number, optimizer in enumerate(training.optimizer.chained_optimizers):
        found = _states(optimizer)
        described[f"optimizer{number}"] = [
            replace(of, key=f"optimizer.state.{name}.{of.key}", data=value, **_dtype_of(of, value))
            for parameter, values in found
            for name, value in values.items()
            for of in [by_parameter[id(parameter)]]
        ]
    apply_factories(described)
    return [
        (one.key, tuple(one.global_shape), tuple(one.global_offset), one.data.detach().clone())
        for one in nested_values(described)
        if isinstance(one, ShardedTensor)
    ]


def _dtype_of(entry: Any, value: torch.Tensor) -> dict[str, Any]:
    return {"dtype": value.dtype} if hasattr(entry, "dtype") else {}


def _states(optimizer: Any) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """Return each parameter with its fp32 copy and moments, whole."""
    if hasattr(optimizer, "_get_model_param_range_map"):
        return [(parameter, _gathered(optimizer, parameter)) for parameter in _buffered(optimizer)]
    plain = optimizer.optimizer
    pairs = [(p, p) for group in plain.param_groups for p in group["params"]]
    if hasattr(optimizer, "float16_groups"):
        halves = chain(*optimizer.float16_groups), chain(*optimizer.fp32_from_float16_groups)
        pairs = [*zip(*halves, strict=True), *((p, p) for p in chain(*optimizer.fp32_from_fp32_groups))]
    moments = ("exp_avg", "exp_avg_sq")
    return [
        (parameter, {"param": main.detach().clone(), **{name: plain.state[main][name] for name in moments}})
        for parameter, main in pairs
    ]


def _buffered(optimizer: Any) -> list[Any]:
    return [parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map]


def _gathered(optimizer: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """Return copy and moments of a parameter, from the stretches of all ranks of one instance."""
    whole = {name: torch.zeros(parameter.numel()) for name in ("param", "exp_avg", "exp_avg_sq")}
    if parameter in optimizer.model_param_gbuf_map:
        stretch = optimizer._get_model_param_range_map(parameter)["param"]
        mine = optimizer._get_main_param_and_optimizer_states(parameter)
        for name, target in whole.items():
            target[stretch.start : stretch.end] = mine[name].detach()
    for target in whole.values():
        dist.all_reduce(target, group=optimizer.data_parallel_group)
    return {name: target.view(parameter.shape) for name, target in whole.items()}


def example(arguments: list[str]) -> None:
    """Run ``examples/megatron_gpt`` as a launcher would start it."""
    script = Path(__file__).parents[3] / "examples" / "megatron_gpt" / "pretrain.py"
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
