"""A rank without a framework: asks for time to save, trains until the test says ``rescue``, saves for a while, exits
75.

Usage: fake_worker.py OUT PLAN. PLAN is a JSON object, whose keys are read below.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from ttp.launch.leases import Leases

OUT, PLAN = Path(sys.argv[1]), json.loads(sys.argv[2])
if os.environ.get("MS_ROLE") == "MS_SCHED":  # as MindSpore's scheduler: no rank, waits until all have trained
    (OUT / ".scheduler").write_text(f"{os.getpid()} {os.environ['MS_SCHED_PORT']}")
    (OUT / ".scheduler").replace(OUT / "scheduler")
    while len(list(OUT.glob("trained-*"))) < int(os.environ["MS_WORKER_NUM"]):
        time.sleep(0.01)
    sys.exit()
RANK, ATTEMPT, PID = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.getpid()
LEASES = Leases(Path(os.environ["TTP_RUN_DIR"])) if "TTP_RUN_DIR" in os.environ else None


def put(name: str, text: str = "") -> None:
    draft = OUT / f".{name}.{PID}"
    draft.write_text(text)
    draft.replace(OUT / name)


def save() -> NoReturn:
    if LEASES is not None and PLAN.get("armed", True):
        LEASES.grant(PID, time.monotonic() + PLAN.get("lease_s", 60))
    put(f"saving-{RANK}-{ATTEMPT}")
    time.sleep(PLAN.get("save_s", 2))
    put(f"saved-{RANK}-{ATTEMPT}")
    os._exit(PLAN.get("exit", 75))


def die_slowly() -> None:
    while not (OUT / "freed").exists():
        time.sleep(0.01)
    os.kill(PID, signal.SIGKILL)


def on_sigterm(*_: object) -> None:
    put(f"sigterm-{RANK}-{ATTEMPT}")
    if PLAN.get("on_sigterm") == "save":
        save()
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGTERM, on_sigterm)
    # whatever the shell of these tests has said: what a script starts in the background ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_IGN if PLAN.get("deaf") else signal.default_int_handler)
    if LEASES is not None and PLAN.get("armed", True):
        LEASES.arm(PID)
    if PLAN.get("dying"):  # as a large process, whose memory the kernel frees for seconds: only another thread lives
        threading.Thread(target=die_slowly, daemon=True).start()
        put(f"pid-{RANK}-{ATTEMPT}", str(PID))
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread alone
    put(f"device-{RANK}-{ATTEMPT}", os.environ.get("DEVICE_ID", ""))
    put(f"pid-{RANK}-{ATTEMPT}", str(PID))
    if PLAN.get("attempts", 1) <= ATTEMPT:
        put(f"trained-{RANK}-{ATTEMPT}")
        return
    if "reply" in PLAN:
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(PLAN["reply"])
    if "crash" in PLAN:
        if PLAN["crash"] == "ended" and LEASES is not None:
            LEASES.disarm(PID)
            LEASES.end(PID)
            put(f"trained-{RANK}-{ATTEMPT}")
        os.kill(PID, signal.SIGSEGV)
    while not (OUT / "rescue").exists():
        time.sleep(0.01)
    save()


main()
