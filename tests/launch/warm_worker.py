"""A rank that reports everything a program can see of its process, and its imports, and waits to be killed.

Usage: warm_worker.py OUT END. In the first attempt rank 1 waits until ``OUT/go`` exists and kills itself; END is its
end in the next attempt: nothing, ``exit 7``, ``raise``, ``draw``, ``interrupt``, ``main``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

OUT, END = Path(sys.argv[1]), sys.argv[2]
CHANGES = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT", "MS_SCHED_PORT")
if os.environ.get("MS_ROLE") == "MS_SCHED":  # as MindSpore's scheduler: no rank, there until all have trained
    while len(list(OUT.glob("facts-*-1"))) < int(os.environ["MS_WORKER_NUM"]):
        time.sleep(0.01)
    sys.exit()
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


os.environ["SET_BY_PROGRAM"] = "1"


class Pickled:
    """A class of ``__main__``, to be pickled."""


def facts() -> dict[str, Any]:
    main: Any = sys.modules["__main__"]
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    out: Any = sys.stdout
    descriptors = list(Path("/proc/self/fd").iterdir())
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "comm": Path("/proc/self/comm").read_text(),
        "path": sys.path,
        "cwd": str(Path.cwd()),
        "main": [main.__name__, main.__file__, main.__package__, type(main.__loader__).__name__],
        "origin": getattr(main.__spec__, "origin", None),
        "names": sorted(name for name in vars(main) if name.startswith("__")),
        "flags": str(sys.flags),
        "environ": {k: v for k, v in sorted(os.environ.items()) if k not in CHANGES},
        "session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "parent": os.getppid(),
        "signals": {k: status[k].strip() for k in ("SigBlk", "SigIgn", "SigCgt", "Threads", "Groups", "NoNewPrivs")},
        "handlers": {str(n): str(signal.getsignal(n)) for n in (1, 2, 3, 13, 15)},
        "limits": [resource.getrlimit(which) for which in range(16)],
        "umask": os.umask(0o22),
        "nice": os.nice(0),
        "out of memory": Path("/proc/self/oom_score_adj").read_text(),
        "cores": sorted(os.sched_getaffinity(0)),
        "policy": os.sched_getscheduler(0),
        "outputs": [str(Path(f"/proc/self/fd/{number}").readlink()) for number in (1, 2)],
        "descriptors": len(descriptors),
        "stdout": [out.line_buffering, out.write_through, out.encoding, out.errors],
        "native": threading.main_thread().native_id == os.getpid(),
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "all names": sorted(vars(main).keys() - {"main"}),
        "threads": [thread.name for thread in threading.enumerate()],
        "start": multiprocessing.get_start_method(),
        "module": Pickled.__module__,
    }  # fmt: skip


def put(name: str, text: str = "") -> None:
    draft = OUT / f".{name}.{os.getpid()}"
    draft.write_text(text)
    draft.replace(OUT / name)


def main() -> None:
    warm = "ttp.launch.warm.template" in sys.modules
    put(f"facts-{RANK}-{ATTEMPT}", json.dumps(facts() | {"warm": warm, "random": random.random()}))
    if ATTEMPT == 0:
        put(f"pid-{RANK}-0", str(os.getpid()))
        while not (OUT / "go").exists() or RANK != 1:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {RANK} prints in attempt {ATTEMPT}")
    while len(list(OUT.glob(f"facts-*-{ATTEMPT}"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)  # whoever ends first has its launcher end the other one
    if END == "draw":
        import numpy
        import torch

        put(f"drawn-{RANK}", json.dumps([torch.rand(3).tolist(), numpy.random.rand(3).tolist()]))
    if END == "raise":
        raise ValueError("a wrong turn")
    if END == "interrupt":
        raise KeyboardInterrupt
    if END == "exit 7":
        sys.exit(7)


if __name__ == "__main__":
    main()
