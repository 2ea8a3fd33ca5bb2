"""Runs cases in this process: ``python -m tests.gpu.run_case DEVICE DEADLINE_S CASE [CASE ...]``.

A case is ``module:function`` of ``tests.gpu.cases``, perhaps with arguments: ``module:function{"lead": 3}``. Prints a
line of JSON with the numbers of each. The process ends at the deadline whatever the device does.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.ports import free_port


def main(device: str, deadline_s: float, cases: list[str]) -> int:
    """Run the cases one after the other; returns 1 if one fails."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some are made to abort, and hold a device's mappings
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    signal.alarm(int(deadline_s) + 10)  # where a driver that hangs keeps even that from its work
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # it would launch kernels that nobody else launches
    for case in cases:
        try:
            run(device, case)
        except BaseException:
            print(f"FAILED {case}", file=sys.stderr, flush=True)
            traceback.print_exc()
            return 1
    return 0


def run(device: str, case: str) -> None:
    """Run one case in a directory of its own."""
    from tests.gpu.stand import Stand

    name, brace, arguments = case.partition("{")
    module, function = name.split(":")
    body = getattr(importlib.import_module(f"tests.gpu.cases.{module}"), function)
    with tempfile.TemporaryDirectory(prefix="ttp-gpu-", ignore_cleanup_errors=True) as directory:
        stand = Stand(device, Path(directory), free_port())
        with stand.watched():
            body(stand, **(json.loads(brace + arguments) if brace else {}))
        print(json.dumps({"case": case, **stand.numbers}), flush=True)


if __name__ == "__main__":
    code = main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
