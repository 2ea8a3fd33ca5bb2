"""A small, deterministic DDP job with faults at any point. Run by the tests through real launchers.

Environment: ``JOB_DIR`` (outputs), ``JOB_STEPS``, ``JOB_FAULTS`` (JSON list, each fault happens once per directory:
``{"id", "rank" or "ranks", "step", "phase", "action"}``; ``"when"``: not before this file exists; ``"launch"``: in this
launch only, as torchelastic counts them, as a string). ``JOB_AGAIN``: see ``misbehave``. ``JOB_DIES_SAVING``: a rank
that dies, and ``JOB_WAITS_SAVING``: a file for which each rank waits, in the middle of a save; see ``halt_saving``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ttp
import ttp.session
from ttp.adapters.torch.restoring import registered, transfer
from ttp.chaos.job import Losses, Schedule, TwoHalves, Watched
from ttp.store.digest import HashingFile

JOB_DIR = Path(os.environ["JOB_DIR"])
STEPS = int(os.environ["JOB_STEPS"])
FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("JOB_FAULTS", "[]"))
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
ACCUMULATION = 2


class Injector:
    """Injects the planned faults into this process."""

    def __init__(self) -> None:
        self.step = 0
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def at(self, phase: str) -> None:
        for fault in FAULTS:
            if fault.get("abreast") and (fault["step"], fault["phase"]) == (self.step, phase):
                (JOB_DIR / f"{fault['id']}.{RANK} is here").touch()
            launch = os.environ.get("TORCHELASTIC_RESTART_COUNT")
            mine = RANK in fault.get("ranks", [fault.get("rank")]) and fault.get("launch", launch) == launch
            if mine and fault["step"] == self.step and fault["phase"] == phase:
                marker = JOB_DIR / "done" / f"{fault['id']}.{RANK}"
                if marker.exists():
                    continue
                if "when" in fault:
                    wait_for(fault["when"])
                while fault.get("abreast") and len(list(JOB_DIR.glob(f"{fault['id']}.* is here"))) < WORLD:
                    time.sleep(0.001)
                marker.parent.mkdir(exist_ok=True)
                marker.write_text(str(time.monotonic()))
                while fault.get("together") and len(list(marker.parent.glob(f"{fault['id']}.*"))) < len(fault["ranks"]):
                    time.sleep(0.001)
                self.act(fault["action"])

    def act(self, action: str) -> None:
        if action == "raise":
            raise ValueError("a wrong turn in the training loop")
        if action == "odd":
            assert self.optimizer is not None
            next(iter(self.optimizer.state.values()))["odd"] = object()  # no save could write that
        elif action == "collective":
            raise RuntimeError("gloo: Connection closed by peer")  # as a rank sees it whose neighbour has died
        elif action == "pause":
            with ttp.paused("evaluation"):
                time.sleep(6)
        else:
            DEEDS[action]()


def lose_host() -> None:
    """Remove the pages of this host, and end its launcher and this rank, as when the host loses power."""
    processor = ttp.session.current().processor
    assert processor is not None and processor.host.pages is not None
    shutil.rmtree(processor.host.pages.path, ignore_errors=True)
    with contextlib.suppress(KeyError, ProcessLookupError):
        os.kill(int(os.environ["JOB_LAUNCHER_PID"]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def flip_a_bit() -> None:
    """Flip a bit in the middle of a weight, as a broken memory cell would."""
    assert injector.model is not None
    word = next(injector.model.parameters()).detach().view(torch.int32).view(-1)[7:8]
    word ^= 1


def half_a_message() -> None:
    """Rank 0 sends rank 1 a message; rank 1 ends when it has received a part of it."""
    data = torch.full((1 << 26,), 1.0 - RANK)
    work: Any = dist.irecv(data, 0) if RANK else dist.isend(data, 1)
    while RANK and not data[0]:
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL) if RANK else work.wait()


def halt_saving(halt: Callable[[], None]) -> None:
    """Call ``halt`` once, in the middle of the first shard that this rank writes. A file ``saving.RANK`` names it."""
    stock, marker = HashingFile.write, JOB_DIR / f"saving.{RANK}"

    def write(self: HashingFile, data: Any, /) -> int:
        if self.path.suffix != ".distcp" or marker.exists():
            return stock(self, data)
        view = memoryview(data).cast("B")
        done = stock(self, view[: len(view) // 2])
        self.flush()
        marker.write_text(self.path.name)
        halt()
        return done + stock(self, view[done:])

    HashingFile.write = write  # type: ignore[method-assign] # in this process only


def wait_for(file: str) -> None:
    while not (JOB_DIR / file).exists():
        time.sleep(0.01)


def wait_for_ever() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def leave() -> None:
    """Leave train() in good order, while others train."""
    sys.exit(0)


def interrupt() -> None:
    raise KeyboardInterrupt


DEEDS: Any = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "term-all": lambda: os.kill(int(os.environ["JOB_LAUNCHER_PID"]), signal.SIGTERM),
    "lose host": lose_host,
    "misuse": lambda: ttp.wrap_optimizer(object()),
    "hold-gil": lambda: re.match("(a+)+b", "a" * 64),  # never ends, and keeps the interpreter lock
    "leave": leave,
    "interrupt": interrupt,
    "flip": flip_a_bit,
    "half": half_a_message,
    "deadlock": wait_for_ever,
    "hold": lambda: None,
}
injector = TwoHalves.here = Losses.here = Injector()
calls = itertools.count()


def send_all() -> None:
    """Make ranks send state of any size instead of reading the checkpoint, with a point for faults before each pack."""
    stock = transfer._packs

    def packs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        for pack in stock(tensors):
            yield pack
            injector.at("transfer")

    registered.TRANSFER_BYTES, transfer._packs = 0, packs


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), Watched(injector), nn.Dropout(0.2),
        nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4),
    )  # fmt: skip


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    if os.environ.get("JOB_OPTIMIZER") == "lbfgs":
        return torch.optim.LBFGS(
            model.parameters(), lr=0.1, max_iter=3, history_size=3, tolerance_grad=0, tolerance_change=0
        )
    return TwoHalves(model.parameters(), lr=1e-2)


def make_schedule(optimizer: torch.optim.Optimizer) -> Schedule:
    """Return a schedule. Faults can hit in its steps once the program has set ``Schedule.here``."""
    Schedule.here = None  # its constructor makes a step
    return Schedule(optimizer, lambda s: min(1.0, (s + 1) / 5) * 0.97**s)


def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + RANK)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def misbehave() -> bool:
    """Do what ``JOB_AGAIN`` says when train() is called again in this process; return whether train() returns then."""
    again, what = next(calls) > 0, os.environ.get("JOB_AGAIN", "")
    if what == "thread" and not again:
        threading.Thread(target=wait_for_ever, daemon=True).start()
    if again and what == "raise":
        raise ValueError("train() can be called once only")
    if again and what == "exit":
        sys.exit(0)
    if again and what == "hang":
        wait_for_ever()
    return again and what == "end"


@contextlib.contextmanager
def swallowed() -> Iterator[None]:
    """With ``JOB_AGAIN=swallow`` the loop catches errors of collectives and is not left."""
    try:
        yield
    except RuntimeError:
        if os.environ.get("JOB_AGAIN") != "swallow":
            raise
        while True:
            with contextlib.suppress(RuntimeError):
                dist.barrier()
            time.sleep(0.01)


@ttp.ttp_to_persist
def train() -> None:
    if misbehave():
        return
    if "JOB_COUNT" in os.environ:
        gc.collect()
        note("objects", len(gc.get_objects()))
        note("threads", threading.active_count())
    if "JOB_ASKS" in os.environ:
        dist.all_reduce(torch.ones(1))
    model = DistributedDataParallel(build())
    optimizer: Any = make_optimizer(model)
    scheduler = make_schedule(optimizer)
    losses = Losses()
    torch.manual_seed(100 + dist.get_rank())  # every rank has its own dropout stream
    random.seed(200 + RANK)
    np.random.seed(300 + RANK)
    optimizer = ttp.wrap_optimizer(
        optimizer,
        model=model,
        scheduler=scheduler,
        save_dir=JOB_DIR / "checkpoints",
        extra_state=losses,
    )
    injector.model, injector.optimizer = model, optimizer
    note("start", start := ttp.restore())
    Schedule.here = injector
    batches = (batch(step, micro) for step in range(start, STEPS) for micro in range(ACCUMULATION))
    for step in range(start, STEPS):
        injector.step = step
        if os.environ.get("JOB_AGAIN") == "group":
            dist.all_reduce(torch.ones(1), group=dist.new_group())
        injector.at("data")
        with swallowed():
            one_step(model, optimizer, scheduler, losses, step, batches)
        time.sleep(float(os.environ.get("JOB_STEP_S", "0")))
    finish(model, optimizer, scheduler, losses)


def one_step(model: Any, optimizer: Any, scheduler: Any, losses: Losses, step: int, batches: Iterator[Any]) -> None:
    injector.at("called")
    if isinstance(optimizer, torch.optim.LBFGS):
        step_with_closure(model, optimizer, losses, step)
    else:
        plain_step(model, optimizer, losses, batches)
    injector.at("stepped")
    note("version", step + 1)
    scheduler.step()
    injector.at("scheduled")


if "JOB_ONE_STEP" in os.environ:
    one_step = ttp.one_step(one_step)


def step_with_closure(model: Any, optimizer: Any, losses: Losses, step: int) -> None:
    """Make a step whose closure the optimizer evaluates several times, before and after its first write."""
    evaluations = 0

    def closure() -> Any:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        data, target = batch(step, 0)
        loss = nn.functional.cross_entropy(model(data), target)
        if evaluations == 1:
            losses.values.append(float(loss.detach()))
        if evaluations == 2:
            injector.at("again")
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)


def plain_step(model: Any, optimizer: Any, losses: Losses, batches: Iterator[Any]) -> None:
    total = 0.0
    optimizer.zero_grad()
    for micro in range(ACCUMULATION):
        data, target = next(batches)
        data = data + 0.01 * random.random() + 0.01 * float(np.random.rand())
        last = micro == ACCUMULATION - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(data), target) / ACCUMULATION
            total += float(loss.detach())
            if last:
                injector.at("loss")
                losses.values.append(total)  # before the gradients leave this rank: it may die right after
            loss.backward()  # type: ignore[no-untyped-call]
    injector.at("allreduced")
    optimizer.step()


def note(kind: str, value: int) -> None:
    """Append a line to this rank's log in one write, which survives a SIGKILL."""
    with (JOB_DIR / f"rank{RANK}.log").open("a") as log:
        log.write(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {kind} {value}\n")


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def raw(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    return b"".join(map(raw, value)) if isinstance(value, list) else repr(value).encode()


def finish(model: Any, optimizer: Any, scheduler: Any, losses: Losses) -> None:
    state = optimizer.state
    numbered = enumerate(p for group in optimizer.param_groups for p in group["params"])
    result = {
        "weights": digest(*(t.detach().numpy().tobytes() for t in model.module.state_dict().values())),
        "optimizer": {
            str(number): digest(*(raw(state[p][key]) for key in sorted(state[p])))
            for number, p in numbered
            if p in state
        },
        "losses": digest(repr(losses.values).encode()),
        "count": len(losses.values),
        "rng": digest(torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()),
        "numpy": digest(repr(np.random.get_state()).encode()),
        "schedule": repr(scheduler.get_last_lr()),
    }
    (JOB_DIR / f"result{RANK}.json").write_text(json.dumps(result, sort_keys=True))


def main() -> None:
    """Run the job on this rank. Without a launcher ranks meet at ``JOB_STORE``."""
    if "JOB_TRANSFER" in os.environ:
        send_all()
    if os.environ.get("JOB_DIES_SAVING") == str(RANK):
        halt_saving(DEEDS["kill"])
    if "JOB_WAITS_SAVING" in os.environ:
        halt_saving(lambda: wait_for(os.environ["JOB_WAITS_SAVING"]))
    dist.init_process_group("gloo", init_method=os.environ.get("JOB_STORE"), rank=RANK, world_size=WORLD)
    train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.exit(0)
