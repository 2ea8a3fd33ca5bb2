"""A training program written for ``mindio_ttp``, without any code of ttp. State and collectives are files of
``JOB_DIR``.

``JOB`` holds its options as JSON: ``faults`` (``[{"rank": 1, "step": 4, "what": "memory"}]``, with ``after``: the files
whose writers come first), ``copies``, ``sets``, ``steps``, ``step_s``, ``tls``, ``manage`` (rank 0 answers as the
cluster's manager would, with ``fail`` it raises; rank -1, if there is one, is a process of the manager's own, which
follows the files ``ask0``, ``ask1``: a function and its arguments), ``hostile`` (``{"save": {"1": "raise"}}``: wrong
behaviour of handlers, by rank), ``delay_s`` by rank, ``starts`` of the controller. Each rank writes its actions as
lines of JSON to ``rank{r}.jsonl``. With ``MINDIO_FOR_MINDSPORE=1`` it is a program of that dialect.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

DIR = Path(os.environ["JOB_DIR"])
RANK, WORLD, PORT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["TTP_PORT"])
JOB: dict[str, Any] = json.loads(os.environ["JOB"])
PORT = JOB.get("port", PORT)
MINDSPORE = os.environ.get("MINDIO_FOR_MINDSPORE") == "1"
PATIENCE_S = 200.0

tft: Any = importlib.import_module("mindio_ttp.framework_ttp")
controller: Any = importlib.import_module("mindio_ttp.controller_ttp")
utils: Any = importlib.import_module("mindio_ttp.utils")

stopped, lock = threading.Event(), threading.Lock()
fired: set[int] = set()


def say(what: str, **facts: Any) -> None:
    with lock, (DIR / f"rank{RANK}.jsonl").open("a") as out:
        out.write(json.dumps({"what": what, **facts}) + "\n")


def put(name: str, value: Any) -> None:
    draft = DIR / f".{name}.{RANK}.{threading.get_ident()}"
    draft.write_text(json.dumps(value))
    draft.rename(DIR / name)


def wait_for(*names: str) -> None:
    """Wait like a collective: until all ranks are there, or the device is stopped."""
    deadline = time.monotonic() + PATIENCE_S
    while not all((DIR / name).exists() for name in names):
        if stopped.is_set():
            raise RuntimeError("ForceStopError" if MINDSPORE else "FORCE STOP")
        assert time.monotonic() < deadline, f"this job hangs in {names}"
        time.sleep(0.002)


class State:
    step, value, life, cursor, first, joins = 0, 1, 0, 0, 0, False


def after(value: int, step: int) -> int:
    return (value * 31 + step) % 1_000_003


def hurt(state: State, step: int, place: str) -> None:
    for number, fault in enumerate(JOB.get("faults", ())):
        if (fault["rank"], fault["step"], fault.get("at", "before")) != (RANK, step, place) or number in fired:
            continue
        if place == "before" and step - 1 > state.first:  # who is left behind by one step is another story
            wait_for(*(f"made-{state.life}-{step - 1}-{r}" for r in range(WORLD)))
        fired.add(number)
        wait_for(*fault.get("after", "").split())
        match fault["what"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory" | "memory_low":
                if fault["what"] == "memory":
                    state.value = -1
                raise RuntimeError(fault.get("text", "UCE ERROR, device error type 12ab"))
            case "slow":
                put("slow", 1)
                time.sleep(fault["seconds"])
            case "raise":
                raise ValueError(fault["text"])
            case "error":
                raise RuntimeError(fault["text"])
            case "dump":
                for _ in range(fault.get("times", 1)):
                    say("dumped", result=controller.tft_notify_controller_dump())
            case "pause":
                say("asked", result=controller.tft_notify_controller_stop_train({}, "pause", 30))
            case "controller":
                os.kill(int((DIR / "controller.pid").read_text()), signal.SIGKILL)


def train(state: State, other: str = "kept") -> str:
    if state.joins:
        state.joins = False
        say("begin", type=tft.tft_get_reboot_type())
        raise RuntimeError("ARF FINISH")
    if state.life == 0:
        say("begin", args=[type(state).__name__, other])
    state.cursor = state.first = state.step
    while state.step < JOB["steps"]:
        step = state.step + 1
        hurt(state, step, "before")
        put(f"meet-{state.life}-{step}-{RANK}", 1)
        wait_for(*(f"meet-{state.life}-{step}-{r}" for r in range(WORLD)))
        hurt(state, step, "late")
        if MINDSPORE:
            tft.tft_set_step_args("step args")
        tft.tft_start_updating_os()
        utils.tft_set_update_start_time(1000 * step)
        hurt(state, step, "inside")
        assert state.cursor == state.step
        state.value, state.step, state.cursor = after(state.value, step), step, step
        utils.tft_set_update_end_time(1000 * step + 500)
        tft.tft_end_updating_os(step)
        put(f"made-{state.life}-{step}-{RANK}", 1)
        try:
            tft.tft_pause_train(step)
        except RuntimeError as problem:
            if "STEP FINISH" in str(problem):
                say("step finish", step=step)
            raise
        time.sleep(JOB.get("step_s", 0))
    return "trained"


# ------------------------------------------------------------------------------------------------------------ handlers

state = State()


def _shown(args: Any) -> Any:
    return [type(args[0]).__name__, *args[1:]] if isinstance(args, list) else args


def save(step: int, save_info: list[dict[str, Any]], args: Any, ctx: Any) -> None:
    say("save", step=step, info=save_info, args=_shown(args), ctx=ctx, type=tft.tft_get_repair_type())
    hurt(state, step, "save")
    put(f"part-{step}-{RANK}.tmp", {"value": state.value, "step": state.step})


def rename(step: int, given: Any) -> None:
    say("rename", step=step, given=_shown(given))
    put(f"checkpoint-{step}", sorted(p.name for p in DIR.glob(f"part-{step}-*.tmp")))


def stop(args: Any, ctx: Any) -> None:
    say("stop", args=_shown(args), ctx=ctx)
    stopped.set()


def clean(is_uce_error: bool, args: Any, ctx: Any) -> int:
    say("clean", uce=is_uce_error, args=_shown(args), ctx=ctx, type=tft.tft_get_repair_type())
    stopped.clear()
    low = any(f["what"] == "memory_low" and f["rank"] == RANK for f in JOB.get("faults", ()))
    return 2 if is_uce_error and low else 0


def repair(step: int, need_rebuild: bool, error_ranks: list[int], info: dict[str, Any], args: Any, ctx: Any) -> None:
    say("repair", step=step, rebuild=need_rebuild, errors=error_ranks, info=info, args=_shown(args), ctx=ctx)
    if info["repair_type"] in (tft.RepairType.RT_LOAD_CKPT.value, tft.RepairType.RT_LOAD_REBUILD.value):
        state.step, state.value = 1, after(1, 1)
        tft.tft_report_load_ckpt_step(1)
        return
    for kind, src, dst in zip(info["type"], info["src"], info["dst"], strict=True):
        name = f"sent-{state.life}-{kind}-{src}-{dst}"
        if src == RANK:
            assert info["repair_type"] == tft.RepairType.RT_SEND.value
            put(name, state.value)
        else:
            wait_for(name)
            state.value, state.step = json.loads((DIR / name).read_text()), step


def rollback(step: int, args: Any, ctx: Any) -> None:
    say("rollback", step=step, args=_shown(args), ctx=ctx)
    state.step = state.cursor = step
    state.life += 1


def leave(ctx: Any) -> None:
    say("exit", ctx=ctx)
    os._exit(1)


WAITS: dict[str, Any] = {
    "update": tft.tft_start_updating_os,
    "step": lambda: tft.tft_pause_train(99),
    "report": lambda: tft.tft_report_error(tft.ReportState.RS_UNKNOWN.value),
    "await": tft.tft_wait_repair_action,
    "leave": tft.tft_destroy_processor,
}
"""Calls of the training thread's that a handler has no business to make."""


def as_wished(kind: str, func: Any) -> Any:
    """Return the handler, or one that does what the test says instead."""
    wrong = JOB.get("hostile", {}).get(kind, {}).get(str(RANK))

    def hostile(*given: Any) -> Any:
        say(kind, hostile=wrong)
        match wrong:
            case "raise":
                raise OSError("no space left on device")
            case "hang":
                time.sleep(10 * PATIENCE_S)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                raise RuntimeError("UCE ERROR, once more")
            case "wait":
                while not (DIR / "go").exists():
                    time.sleep(0.002)
            case "nonsense":
                return "nonsense"
            case "dump":
                say("dumped", result=controller.tft_notify_controller_dump())
            case _:
                WAITS[wrong]()
        return func(*given)

    if wrong is None:
        return func
    return (lambda: None) if wrong == "arguments" else hostile


def register() -> None:
    tft.tft_register_save_ckpt_handler(as_wished("save", save), "ctx")
    tft.tft_register_rename_handler(as_wished("rename", rename), "ctx")
    tft.tft_register_stop_handler(as_wished("stop", stop), "ctx")
    tft.tft_register_clean_handler(as_wished("clean", clean), "ctx")
    tft.tft_register_repair_handler(as_wished("repair", repair), "ctx")
    tft.tft_register_rollback_handler(as_wished("rollback", rollback), "ctx")
    tft.tft_register_exit_handler(as_wished("exit", leave), "ctx")
    tft.tft_register_rebuild_group_handler(lambda ranks, args, ctx: say("rebuild", ranks=ranks), "ctx")
    tft.tft_register_stream_sync_handler(lambda: say("sync"))
    tft.tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", lambda text: "PRECISION ERROR")


def manage() -> None:
    """Act as MindX: record every answer, and give the next order."""

    def fault_ranks(faults: dict[int, int], codes: dict[int, str]) -> None:
        say("report_fault_ranks", faults=sorted(faults.items()), codes=sorted(codes.items()))
        if JOB["manage"] == "fail":
            raise ValueError("this manager is broken")
        if not asked:
            asked.append(1)
            controller.tft_notify_controller_stop_train(faults)

    def stop_complete(code: int, text: str, faults: dict[int, int]) -> None:
        say("report_stop_complete", code=code, faults=sorted(faults.items()))
        if JOB.get("stand") and not stood:
            stood.append(1)
            return
        if JOB["manage"] == "pause":
            say("continue", result=controller.tft_notify_controller_change_strategy("continue"))
        else:
            controller.tft_notify_controller_on_global_rank(faults)

    def strategies(faults: dict[int, int], offered: list[str]) -> None:
        say("report_strategies", faults=sorted(faults.items()), offered=offered)
        if JOB["manage"] == "nothing":
            return
        if JOB["manage"] not in offered:
            say("refused", result=controller.tft_notify_controller_change_strategy(JOB["manage"]))
        chosen = JOB["manage"] if JOB["manage"] in offered else offered[-1]
        say("chosen", strategy=chosen, result=controller.tft_notify_controller_change_strategy(chosen))

    def result(code: int, text: str, faults: dict[int, int], strategy: str) -> None:
        say("report_result", code=code, strategy=strategy)
        if strategy == "dump":
            controller.tft_notify_controller_change_strategy("exit")

    asked: list[int] = []
    stood: list[int] = []
    for name, func in {
        "report_fault_ranks": fault_ranks,
        "report_stop_complete": stop_complete,
        "report_strategies": strategies,
        "report_result": result,
    }.items():
        assert controller.tft_register_mindx_callback(name, func) == 0


def mindspore_train() -> str:
    """Train like MindSpore's client: without the original's decorator and repair action, and with other error texts."""
    while True:
        try:
            return train(state)
        except RuntimeError as problem:
            states = {"UCE": tft.ReportState.RS_UCE, "ForceStop": tft.ReportState.RS_NORMAL}
            states |= {"ARF FINISH": tft.ReportState.RS_PREREPAIR_FINISH, "STEP FINISH": tft.ReportState.RS_STEP_FINISH}
            found = next((s for word, s in states.items() if word in str(problem)), tft.ReportState.RS_UNKNOWN)
            tft.tft_report_error(found.value)
            if found is tft.ReportState.RS_UNKNOWN or tft.tft_wait_next_action() == tft.Action.EXIT.value:
                raise
            state.step, state.life = tft.tft_get_repair_step(), state.life + 1
        except BaseException:
            tft.tft_report_error(tft.ReportState.RS_UNKNOWN.value)
            raise


def start_controller(*tls: Any) -> None:
    if "manage" in JOB:
        manage()
    for number in range(JOB.get("starts", 1)):
        if number:
            controller.tft_destroy_controller()
        tft.tft_init_controller(RANK, WORLD, False)
        tft.tft_start_controller("127.0.0.1", PORT, *tls)


def manager_alone() -> None:
    """Act as taskd: a process that is not a rank, and lives until it is killed."""
    start_controller(False)
    say("serves", all=controller.tft_query_high_availability_switch())
    for number in itertools.count():
        while not (DIR / f"ask{number}").exists():
            time.sleep(0.005)
        name, given = json.loads((DIR / f"ask{number}").read_text())
        say("answered", result=getattr(controller, name)(*given))


def main() -> None:
    tls: tuple[bool, str] = (True, JOB["tls"]) if "tls" in JOB else (False, "")
    if JOB.get("decrypt"):
        tft.tft_register_decrypt_handler(lambda cipher: cipher[::-1])
    time.sleep(JOB.get("delay_s", {}).get(str(RANK), 0))
    if RANK == -1:
        manager_alone()
    if RANK == 0 and "MINDX_TASK_ID" not in os.environ:
        start_controller(*tls)
    tft.tft_init_processor(RANK, WORLD, False, *tls, JOB.get("enable_uce", True), JOB.get("enable_arf", False),
                           JOB.get("enable_zit", False))  # fmt: skip
    tft.tft_start_processor("127.0.0.1", PORT)
    everybody = {"rank_list": list(range(WORLD)), "replica_cnt": JOB["copies"], "replica_shift": 0}
    tft.tft_set_optimizer_replica(RANK, JOB["sets"][RANK] if "sets" in JOB else [everybody])
    register()
    if JOB.get("version"):
        tft.set_mindio_export_version(JOB["version"])
    state.joins = tft.tft_is_reboot_node()
    if state.joins:
        fired.update(range(len(JOB.get("faults", ()))))  # the process before this one has had them
    result = mindspore_train() if MINDSPORE else tft.tft_exception_handler(train)(state, other="kept")
    say("done", result=result, value=state.value)
    if MINDSPORE:
        tft.tft_destroy_processor()


if __name__ == "__main__":
    main()
