"""A torch program written for ``mindio_ttp`` with ARF, over gloo: ZeRO-1 with two pieces, each on every other rank.

It does what the original's adapter does: survivors stop, clean, make their groups anew with the newcomer, send it the
piece that they hold, roll back, and train on. ``JOB_FAULTS``: ``[{"rank": 1, "step": 5, "at": "data"}]``. ``at`` may be
a handler's name; ``what`` may be ``raise``, ``hang`` or ``nothing`` (when a file ``after`` exists) instead of ``kill``.
Each fault happens once in a job. ``warm``: not before a rank can be started alone; ``with``: ranks that die at the same
moment, because a later death would be another fault. ``JOB_KEPT=1``: as in MindSpeed-LLM, the default group and its
store are kept, and only the groups inside of it are made anew, in ``rebuild`` and, for a transfer, in ``repair``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DIR = Path(os.environ.get("JOB_DIR", "."))
STEPS = int(os.environ.get("JOB_STEPS", "0"))
FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("JOB_FAULTS", "[]"))
SIZE, PIECES, LR = 32, 2, 0.05
KEPT = os.environ.get("JOB_KEPT") == "1"


class State:
    """The weights, which every rank has, and the optimizer's state of one piece."""

    def __init__(self, piece: int) -> None:
        self.piece, self.step, self.joining = piece, 0, False
        self.weights = torch.linspace(-1, 1, SIZE, dtype=torch.float32)
        self.main = self.weights.chunk(PIECES)[piece].clone()
        self.first, self.second = torch.zeros_like(self.main), torch.zeros_like(self.main)

    @property
    def owned(self) -> list[torch.Tensor]:
        return [self.main, self.first, self.second]


def gradient(weights: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """Return the gradient of this rank's batch of the step."""
    data = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (torch.tanh(data @ weights)[:, None] * data).mean(0)


def update(state: State, gradients: list[torch.Tensor]) -> None:
    mean = sum(gradients[1:], gradients[0]) / len(gradients)
    mine = mean.chunk(PIECES)[state.piece]
    state.first.mul_(0.9).add_(mine, alpha=0.1)
    state.second.mul_(0.99).addcmul_(mine, mine, value=0.01)
    state.main.sub_(LR * state.first / (state.second.sqrt() + 1e-6))


def digest(state: State) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in (state.weights, *state.owned))).hexdigest()


def unbroken(*phases: tuple[int, int]) -> list[str]:
    """Return the final digests of all ranks without a fault. A phase is its last step and its number of ranks."""
    states, before = [State(piece) for piece in range(PIECES)], 0
    for last, world in phases:
        for step in range(before + 1, last + 1):
            gradients = [gradient(states[0].weights, step, rank) for rank in range(world)]
            for state in states:
                update(state, gradients)
            whole = torch.cat([state.main for state in states])
            for state in states:
                state.weights = whole.clone()
        before = last
    return [digest(states[rank % PIECES]) for rank in range(phases[-1][1])]


# ---------------------------------------------------------------------------------------------------------- one process


def die(rank: int, ranks: list[int]) -> None:
    """Wait for the other ranks that die; the first of them kills all."""
    own = DIR / f"dies{rank}"
    own.with_suffix(".draft").write_text(str(os.getpid()))
    own.with_suffix(".draft").replace(own)
    dying = [DIR / f"dies{other}" for other in ranks]
    while rank != ranks[0] or not all(path.exists() for path in dying):
        time.sleep(0.01)
    for path in reversed(dying):
        os.kill(int(path.read_text()), signal.SIGKILL)


class Program:
    def __init__(self) -> None:
        self.tft: Any = importlib.import_module("mindio_ttp.framework_ttp")
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.state = State(self.rank % PIECES)
        self.sockets: set[int] = set()
        self.group: Any = None

    def say(self, what: str, **facts: Any) -> None:
        with (DIR / f"rank{self.rank}.jsonl").open("a") as out:
            out.write(json.dumps({"what": what, "pid": os.getpid(), **facts}) + "\n")

    def hurt(self, step: int, at: str) -> None:
        for number, fault in enumerate(FAULTS):
            if (fault["rank"], fault.get("step", step), fault["at"]) != (self.rank, step, at):
                continue
            if (DIR / f"fired{number}").exists():
                continue  # the step is made again: do not wait below
            if at in ("data", "backward", "inside", "updated") and fault.get("warm", True):
                await_ready()
            while at == "backward" and len([*DIR.glob(f"gathered{step}-*")]) < self.world:
                time.sleep(0.01)  # else a reset of its connections may drop what others have yet to read
            while "after" in fault and not (DIR / fault["after"]).exists():
                time.sleep(0.01)
            try:
                (DIR / f"fired{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            match fault.get("what", "kill"):
                case "kill":
                    die(self.rank, fault.get("with", [self.rank]))
                case "raise":
                    raise ValueError("out of luck")
                case "hang":
                    time.sleep(1000)

    def connect(self) -> None:
        if KEPT and not dist.is_initialized():
            dist.init_process_group("gloo")
        before = connected()
        if KEPT:
            self.group = dist.new_group(list(range(self.world)), use_local_synchronization=True)
            self.gather(torch.zeros(1))  # gloo connects only now, see ``main``
        else:
            dist.init_process_group("gloo")
        self.sockets = connected() - before

    def disconnect(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
        elif not KEPT and dist.is_initialized():
            dist.destroy_process_group()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(found, tensor, group=self.group)
        return found

    # ------------------------------------------------------------------------------------------------------- training

    def train(self, state: State) -> None:
        if state.joining:
            state.joining = False
            raise RuntimeError("ARF FINISH")
        self.say("train", step=state.step)
        while state.step < STEPS:
            step = state.step + 1
            self.hurt(step, "data")
            gradients = self.gather(gradient(state.weights, step, self.rank))
            if any(fault["at"] == "backward" for fault in FAULTS):
                (DIR / f"gathered{step}-{self.rank}").touch()
            self.hurt(step, "backward")
            self.tft.tft_start_updating_os()
            self.hurt(step, "inside")
            update(state, gradients)
            state.step = step
            self.tft.tft_end_updating_os(step)
            self.hurt(step, "updated")
            state.weights = torch.cat(self.gather(state.main)[:PIECES])
            self.tft.tft_pause_train(step)

    # ------------------------------------------------------------------------------------------------------- handlers

    def save(self, step: int, save_info: list[dict[str, Any]], args: Any, ctx: Any) -> None:
        self.say("save", step=step, ranks=save_info[0]["ranks"])
        self.hurt(step, "save")
        assert self.state.step == step
        torch.save([step, *self.state.owned], DIR / f"part-{step}-{self.state.piece}.pt")

    def rename(self, step: int, args: Any) -> None:
        self.say("rename", step=step)
        (DIR / ".checkpoint").write_text(str(step))
        (DIR / ".checkpoint").rename(DIR / "checkpoint")

    def stop(self, args: Any, ctx: Any) -> None:
        """Stop the device: ranks that wait in a collective get an error."""
        self.say("stop")
        self.hurt(self.state.step, "stop")
        for descriptor in self.sockets:
            try:
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    found.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def clean(self, is_uce_error: bool, args: Any, ctx: Any) -> int:
        self.say("clean")
        self.hurt(self.state.step, "clean")
        return 0

    def rebuild(self, fault_ranks: list[int], args: Any, ctx: Any) -> None:
        self.say("rebuild", ranks=fault_ranks, type=self.tft.tft_get_repair_type())
        self.hurt(self.state.step, "rebuild")
        self.disconnect()
        self.connect()

    def repair(self, step: int, rebuild: bool, errors: list[int], info: dict[str, Any], args: Any, ctx: Any) -> None:
        self.say("repair", step=step, kind=info["repair_type"], src=info["src"], dst=info["dst"])
        self.hurt(step, "repair")
        group = dist.new_group(info["rank_list"], use_local_synchronization=True) if KEPT else None
        for src, dst in zip(info["src"], info["dst"], strict=True):
            for tensor in self.state.owned:
                if src == self.rank:
                    dist.send(tensor, dst, group=group)
                else:
                    dist.recv(tensor, src, group=group)

    def rollback(self, step: int, args: Any, ctx: Any) -> None:
        self.say("rollback", step=step)
        self.hurt(step, "rollback")
        self.state.step = step
        self.state.weights = torch.cat(self.gather(self.state.main)[:PIECES])

    # ----------------------------------------------------------------------------------------------------------- main

    def load(self) -> None:
        if (DIR / "checkpoint").exists():
            step = int((DIR / "checkpoint").read_text())
            state = self.state
            state.step, state.main, state.first, state.second = torch.load(DIR / f"part-{step}-{state.piece}.pt")
            state.weights = torch.cat(self.gather(state.main)[:PIECES])

    def main(self) -> None:
        os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(KEPT))  # as on a device, where a group connects when it is used
        tft, port = self.tft, int(os.environ["TTP_PORT"])
        if self.rank == 0:
            tft.tft_init_controller(self.rank, self.world, False, enable_arf=True)
            tft.tft_start_controller("127.0.0.1", port, False)
        arf = os.environ.get("JOB_ARF") != "0"
        tft.tft_init_processor(
            self.rank, self.world, False, False, enable_arf=arf, enable_zit=os.environ.get("JOB_ZIT") == "1"
        )
        tft.tft_start_processor("127.0.0.1", port)
        copies = self.world // PIECES
        info = {"rank_list": list(range(self.world)), "replica_cnt": copies, "replica_shift": 0}
        tft.tft_set_optimizer_replica(self.rank, [info])
        tft.tft_register_save_ckpt_handler(self.save)
        tft.tft_register_rename_handler(self.rename)
        tft.tft_register_stop_handler(self.stop)
        tft.tft_register_clean_handler(self.clean)
        tft.tft_register_rebuild_group_handler(self.rebuild)
        tft.tft_register_repair_handler(self.repair)
        tft.tft_register_rollback_handler(self.rollback)
        self.state.joining = tft.tft_is_reboot_node()
        self.say("begin", reboot=self.state.joining, type=tft.tft_get_reboot_type())
        if not self.state.joining:
            self.connect()
            self.load()
        elif KEPT:
            dist.init_process_group("gloo")
        tft.tft_exception_handler(self.train)(self.state)
        self.say("done", digest=digest(self.state), step=self.state.step)


def await_ready() -> None:
    """Wait until the launcher has a process to fork from, without which it starts no rank alone."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and '"ready"' not in _warm():
        time.sleep(0.01)


def _warm() -> str:
    try:
        return (DIR / "run" / "warm.json").read_text()
    except OSError:
        return ""


def connected() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.type == socket.SOCK_STREAM and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.getpeername()
                    found.add(int(entry.name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    Program().main()
