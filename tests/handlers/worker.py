"""One rank of a job whose handlers save, send and receive; state and collectives are files of ``JOB_DIR``.

``JOB_FAULTS`` lists its faults: ``[{"rank": 1, "step": 4, "what": "memory"}]``. It writes each of its actions as a line
of JSON to ``rank{r}.jsonl``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttp.config import Config, RankEnv
from ttp.mindio.handlers import Ailment, Call, ForcedStop, HandlerKind, NextAction, Participant, RepairWay, ReplicaSet

DIR = Path(os.environ["JOB_DIR"])
ENV = RankEnv.from_env()
STEPS = int(os.environ["JOB_STEPS"])
FAULTS: list[dict[str, Any]] = json.loads(os.environ["JOB_FAULTS"])
OPTIONS: dict[str, Any] = json.loads(os.environ["JOB_OPTIONS"])
RANK = ENV.rank
PATIENCE_S = 60.0

stopped = threading.Event()
log_lock = threading.Lock()


def say(what: str, **facts: Any) -> None:
    with log_lock, (DIR / f"rank{RANK}.jsonl").open("a") as out:
        out.write(json.dumps({"what": what, "at": time.monotonic(), **facts}) + "\n")


def put(name: str, value: Any) -> None:
    draft = DIR / f".{name}.{RANK}.{threading.get_ident()}"
    draft.write_text(json.dumps(value))
    draft.rename(DIR / name)


def until(condition: Callable[[], bool]) -> None:
    """Wait like a collective: for ever, or until the device is stopped."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if stopped.is_set():
            raise RuntimeError("FORCE STOP: the device was stopped")
        assert time.monotonic() < deadline, "this job hangs"
        time.sleep(0.002)


class State:
    step = 0
    value: int | None = 1
    first = 0
    """Where the loop was entered."""
    life = 0
    """How often the loop was entered; equal on all ranks."""
    cursor = 0
    """Where the data are; follows the step."""


state = State()
fired: set[int] = set()


def after(value: int, step: int) -> int:
    return (value * 31 + step) % 1_000_003


def meet(step: int) -> None:
    put(f"meet-{state.life}-{step}-{RANK}", 1)
    until(lambda: all((DIR / f"meet-{state.life}-{step}-{r}").exists() for r in range(ENV.world_size)))


def hurt(step: int, place: str) -> None:
    for number, fault in enumerate(FAULTS):
        if (fault["rank"], fault["step"], fault.get("at", "before")) != (RANK, step, place) or number in fired:
            continue
        if place == "before" and step - 1 > state.first:  # who is left behind by one step is another story
            until(lambda: all((DIR / f"made-{state.life}-{step - 1}-{r}").exists() for r in range(ENV.world_size)))
        fired.add(number)
        say("fault", kind=fault["what"], step=step)
        match fault["what"]:
            case "kill":
                put(f"dead-{RANK}", 1)
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory" | "memory_low":
                if fault["what"] == "memory":
                    state.value = None
                raise RuntimeError("UCE ERROR")
            case "network":
                raise RuntimeError("HCCL OP RETRY FAILED")
            case "precision":
                raise RuntimeError("PRECISION ERROR")
            case "raise":
                raise ValueError("out of luck")
            case "slow":
                time.sleep(fault["seconds"])


def train() -> None:
    state.cursor = state.first = state.step
    while state.step < STEPS:
        step = state.step + 1
        hurt(step, "before")
        meet(step)
        hurt(step, "late")
        part.begin_update()
        hurt(step, "inside")
        assert state.value is not None and state.cursor == state.step
        state.value, state.step, state.cursor = after(state.value, step), step, step
        part.end_update(step)
        put(f"made-{state.life}-{step}-{RANK}", 1)
        say("step", step=step)
        part.pause_train(step)
        if "step_s" in OPTIONS:
            time.sleep(OPTIONS["step_s"])


# ------------------------------------------------------------------------------------------------------------ handlers


def save(call: Call) -> None:
    say("save", step=call.step, info=call.as_save_info())
    hurt(call.step, "save")
    put(f"part-{call.step}-{RANK}.tmp", {"value": state.value, "step": state.step})
    if OPTIONS.get("collective_save"):
        for rank in {rank for entry in call.lists for rank in entry.ranks}:
            receive(f"part-{call.step}-{rank}.tmp", rank)


def receive(name: str, rank: int) -> Any:
    """Return what another rank has sent; fails like a connection when that rank has died."""
    deadline = time.monotonic() + PATIENCE_S
    while not (DIR / name).exists():
        if (DIR / f"dead-{rank}").exists():
            raise ConnectionError(f"connection closed by rank {rank}")
        assert time.monotonic() < deadline, f"rank {rank} does not send"
        time.sleep(0.002)
    return json.loads((DIR / name).read_text())


def rename(call: Call) -> None:
    say("rename", step=call.step)
    hurt(call.step, "rename")
    put(f"checkpoint-{call.step}", sorted(p.name for p in DIR.glob(f"part-{call.step}-*.tmp")))


def stop(call: Call) -> None:
    say("stop")
    stopped.set()


def clean(call: Call) -> int:
    say("clean", memory_error=call.memory_error)
    hurt(0, "clean")
    stopped.clear()
    low = any(f["what"] == "memory_low" and f["rank"] == RANK for f in FAULTS)
    return 2 if call.memory_error and low else 0


def repair(call: Call) -> None:
    say("repair", step=call.step, info=call.as_repair_info(), rebuild=call.rebuild, errors=list(call.error_ranks))
    hurt(call.step, "repair")
    if call.way in (RepairWay.LOAD, RepairWay.LOAD_REBUILD):
        state.step, state.value = 1, after(1, 1)
        part.report_loaded_step(1)
        return
    for kind, src, dst in zip(call.types, call.src, call.dst, strict=True):
        name = f"sent-{state.life}-{kind}-{src}-{dst}"
        if src == RANK:
            put(name, state.value)
        else:
            state.value, state.step = receive(name, src), call.step


def rollback(call: Call) -> None:
    say("rollback", step=call.step)
    hurt(call.step, "rollback")
    state.step, state.cursor = call.step, call.step


def leave(call: Call) -> None:
    say("exit")


def ailment_of(problem: RuntimeError) -> Ailment:
    text = str(problem)
    if isinstance(problem, ForcedStop) or "FORCE STOP" in text:
        return Ailment.STOPPED
    table = {"UCE": Ailment.MEMORY, "HCCL": Ailment.NETWORK, "PRECISION": Ailment.RETRY}
    return next((ailment for word, ailment in table.items() if word in text), Ailment.FATAL)


def main() -> None:
    while True:
        try:
            train()
            break
        except RuntimeError as problem:
            say("raised", text=str(problem))
            part.report_error(ailment_of(problem), "1234", str(problem))
        except Exception as problem:
            part.report_error(Ailment.FATAL, text=repr(problem))
            raise
        say("next", action=part.wait_next_action().name)
        if part.wait_repair_action() is NextAction.EXIT:
            time.sleep(PATIENCE_S)
            sys.exit(9)
        state.life += 1
        say("again", step=part.repair_step(), kind=part.repair_type())
    say("done", value=state.value)
    part.leave()


part = Participant(ENV, Config.from_env(), **OPTIONS.get("participant", {}))
if __name__ == "__main__":
    for kind, func in {
        HandlerKind.SAVE: save,
        HandlerKind.RENAME: rename,
        HandlerKind.STOP: stop,
        HandlerKind.CLEAN: clean,
        HandlerKind.REPAIR: repair,
        HandlerKind.ROLLBACK: rollback,
        HandlerKind.EXIT: leave,
        HandlerKind.STREAM_SYNC: lambda call: say("sync", step=call.step),
    }.items():
        part.register(kind, func)
    part.start()
    part.set_replicas([ReplicaSet(tuple(s["ranks"]), s["copies"]) for s in OPTIONS["sets"][RANK]])
    main()
