"""Keeps NCCL's watchdog and monitor from ending a rank with a hung collective before its state is on disk.

Torch watches NCCL's collectives from a thread, the watchdog. After an error or a time-out the watchdog does what
``TORCH_NCCL_ASYNC_ERROR_HANDLING`` says: 0: nothing; 1: abort the communicators and end the process; 2: abort; 3: end
the process. Torch's default is 3, and torchrun exports 1. After an abort the stuck kernel returns, and the optimizer's
kernels that are queued behind it run on whatever data the collective has left. Both an abort and the end of the process
defeat the save, so the value has to be 0.

With 0, one more thread can end the process: the monitor. It does so ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`` (480 s) after
the watchdog of any rank has seen a failure, and if the watchdog itself hangs. The monitor is the last resort for a job
that hangs when no controller is left to notice. So it stays on, but has to wait longer than a rescue takes.

``TORCH_NCCL_DESYNC_DEBUG`` and ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` turn a 0 back into 3. With
``TORCH_NCCL_BLOCKING_WAIT`` there is neither watchdog nor monitor: the host waits for each collective, so nothing is
queued behind one that fails.

If survivors are to go on in their processes (``TTP_CONTINUITY=keep`` with ``TTP_KEEP_CUDA=1``), ttp itself aborts the
communicators once the state is saved. No other code may react to such an abort, and NVLink SHARP has to be off, because
NCCL cannot abort communicators that use it. Values that a user has set are kept; the job is then started anew after a
failure.

Torch 2.15 has two backends of NCCL. Its new one, the default, acts on ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` in the same
way and has no monitor (``torch/csrc/distributed/c10d/nccl2``). ttp can exchange only the former one, for which
survivors that go on need ``TORCH_DIST_USE_NCCL2=0``; older versions of torch ignore that.

A process group reads these variables when it is made. Launchers of ttp export them to the workers. Under another
launcher ``import ttp`` sets them, early enough in almost every program. ``wrap_optimizer`` can only check them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.config import KEEP, Config
from ttp.errors import ConfigError
from ttp.launch.proc_files import PROC, stat_of

log = logging.getLogger("ttp")

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
HANDLING_BEFORE = "NCCL_ASYNC_ERROR_HANDLING"
"""The old name of ``HANDLING``. Torch reads it if the new one is not set."""
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
DESYNC = ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG")
DEBUG = "TORCH_DISTRIBUTED_DEBUG"
TO_GO_ON = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "NCCL's watchdog ends the process at an error of the device",
    "TORCH_NCCL_PROPAGATE_ERROR": "other ranks treat the abort of one rank as a failure",
    "NCCL_NVLS_ENABLE": "communicators that use NVLink SHARP cannot be aborted",
    "TORCH_DIST_USE_NCCL2": "torch uses a backend of NCCL that ttp cannot exchange",
}
"""Names of settings that have to be 0 if survivors go on in their processes, each with the reason."""
_OFF = ("0", "f", "false", "n", "no")
_OFF_BY_DEFAULT = ("TORCH_NCCL_PROPAGATE_ERROR", "TORCH_DIST_USE_NCCL2")

_HANDLING_OF_TORCH = 3
_HANDLING_OF_TORCHRUN = "1"
_HEARTBEAT_OF_TORCH_S = 480
_MARGIN_S = 60.0
_ANCESTORS_MAX = 16
_DOES = {
    1: "abort the communicators, so that queued kernels run on garbage, and end this process",
    2: "abort the communicators, so that queued kernels run on garbage,",
    3: "end this process",
}


@dataclass(frozen=True, slots=True)
class Objection:
    """A setting with which NCCL would end a rank, or corrupt its state, before its save is durable.

    Args:
        text: the setting, what it does, and what to do instead.
        on_purpose: True: a user has set it; False: it is a default of torch or torchrun.
    """

    text: str
    on_purpose: bool


def settings(environ: Mapping[str, str], config: Config, launcher: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables to export before a process group is made, without those that the user has set.

    Args:
        environ: environment of the process, or of the launcher that passes it on.
        config: the job's settings, among them how long a rescue may take.
        launcher: environment that the launcher of this process was started with; None: not known.
    """
    wanted = {}
    if HANDLING_BEFORE not in environ and (HANDLING not in environ or _of_torchrun(environ, launcher)):
        wanted[HANDLING] = "0"
    if HEARTBEAT not in environ:
        wanted[HEARTBEAT] = str(heartbeat_s(config))
    return wanted | {name: "0" for name in TO_GO_ON if goes_on(config) and name not in environ}


def goes_on(config: Config) -> bool:
    """Return whether survivors that hold their state on a GPU are to go on in their processes."""
    return config.continuity == KEEP and config.keep_cuda


def why_not_go_on(environ: Mapping[str, str], config: Config, launcher: Mapping[str, str] | None = None) -> list[str]:
    """Return why survivors could not go on with process groups made with this environment.

    Arguments are those of ``settings``.
    """
    found = [objection.text for objection in objections(environ, config, launcher)]
    for name, why in TO_GO_ON.items():
        if environ.get(name, "0" if name in _OFF_BY_DEFAULT else "").strip().lower() not in _OFF:
            found.append(f"{f'with {name}={environ[name]}' if name in environ else f'without {name}=0'} {why}")
    if _first_switch(environ, BLOCKING):
        name = next(name for name in BLOCKING if name in environ)
        found.append(f"with {name}={environ[name]} the host waits in each collective, and cannot be freed")
    needed_s = config.rescue_patience_s + config.continue_s
    heartbeat = _number(environ.get(HEARTBEAT), _HEARTBEAT_OF_TORCH_S)
    if not _monitor_is_off(environ) and heartbeat < needed_s:
        found.append(f"{HEARTBEAT}={heartbeat} lets NCCL's monitor end a rank within the {needed_s:g} s of going on")
    return found


def objections(
    environ: Mapping[str, str], config: Config, launcher: Mapping[str, str] | None = None
) -> list[Objection]:
    """Return why a process group made with this environment may defeat a save. Arguments are those of ``settings``."""
    if _first_switch(environ, BLOCKING):
        return []
    found = []
    mode = _number(environ.get(HANDLING, environ.get(HANDLING_BEFORE)), _HANDLING_OF_TORCH)
    if mode in _DOES:
        name = HANDLING if HANDLING in environ or HANDLING_BEFORE not in environ else HANDLING_BEFORE
        set_to = f"with {name}={environ[name]}" if name in environ else f"without {name}=0"
        text = (
            f"{set_to} NCCL's watchdog will {_DOES[mode]} when a collective fails or times out, before the state is "
            f"saved: export {HANDLING}=0 (ttp notices failures and hangs, and ends the ranks when they are saved)"
        )
        found.append(Objection(text, name in environ and not _of_torchrun(environ, launcher)))
    elif mode == 0 and (debug := _debugging(environ)):
        text = f"{debug} turns {HANDLING}=0 into 3: NCCL's watchdog will {_DOES[3]} before it has saved; unset it"
        found.append(Objection(text, True))
    return [*found, *_impatience(environ, config)]


def heartbeat_s(config: Config) -> int:
    """Return the seconds after which the monitor may end a rank: to notice a hang, freeze and save, plus a minute."""
    noticed_s = 3 * (config.hang_s or 0.0)
    rescued_s = config.freeze_patience_s + config.answer_patience_s + config.rescue_patience_s
    goes_on_s = config.continue_s if goes_on(config) else 0.0
    return max(_HEARTBEAT_OF_TORCH_S, math.ceil(noticed_s + rescued_s + goes_on_s + _MARGIN_S))


def prepare() -> None:
    """Put ``settings`` into this process's environment, if ttp is on and no process group has been made yet.

    Never raises for wrong settings: they are reported where they are used.
    """
    if not os.environ.get("TTP_PORT") or _initialized():
        return
    with contextlib.suppress(ConfigError):
        os.environ.update(settings(os.environ, Config.from_env(), launcher_environ()))


def check(config: Config) -> None:
    """Check that no NCCL process group of this process can defeat a save. Warn if a default value can.

    Raises:
        ConfigError: a setting that a user made on purpose defeats a save. The text names it and says what to do.
    """
    if not _uses_nccl():
        return
    found = objections(os.environ, config, launcher_environ())
    on_purpose = [objection.text for objection in found if objection.on_purpose]
    if on_purpose:
        raise ConfigError("; ".join(on_purpose))
    for objection in found:
        log.warning(
            "NCCL's process groups were made before ttp was imported. %s. Or start the job with `ttp run`, or import "
            "ttp before init_process_group()",
            objection.text,
        )


def launcher_environ(proc: Path = PROC) -> dict[str, str] | None:
    """Return the environment that torchrun itself was started with; None: it cannot be read.

    The nearest ancestor of this process without ``TORCHELASTIC_RUN_ID`` is taken for torchrun.
    """
    pid = os.getppid()
    for _ in range(_ANCESTORS_MAX):
        try:
            raw = (proc / str(pid) / "environ").read_bytes()
            parent = stat_of(pid, proc)[1]
        except (OSError, IndexError):
            return None
        pairs = (entry.partition("=") for entry in os.fsdecode(raw).split("\0"))
        found = {name: value for name, _, value in pairs if name}
        if "TORCHELASTIC_RUN_ID" not in found:
            return found
        pid = int(parent)
    return None


def _of_torchrun(environ: Mapping[str, str], launcher: Mapping[str, str] | None) -> bool:
    """Return whether torchrun set ``HANDLING``: it exports 1 to its workers, unless it was started with a value."""
    launched = "TORCHELASTIC_RUN_ID" in environ and environ.get(HANDLING) == _HANDLING_OF_TORCHRUN
    return launched and (launcher is None or HANDLING not in launcher)


def _impatience(environ: Mapping[str, str], config: Config) -> list[Objection]:
    """Return an objection if the monitor may end a rank that still saves, else none."""
    heartbeat = _number(environ.get(HEARTBEAT), _HEARTBEAT_OF_TORCH_S)
    if _monitor_is_off(environ) or heartbeat >= config.rescue_patience_s:
        return []
    text = (
        f"{HEARTBEAT}={heartbeat} lets NCCL's monitor end a rank {heartbeat} s after a failure, but a save may take "
        f"TTP_OT={config.rescue_patience_s:g} s: export {HEARTBEAT}={heartbeat_s(config)}, or {MONITORING}=0"
    )
    return [Objection(text, HEARTBEAT in environ)]


def _monitor_is_off(environ: Mapping[str, str]) -> bool:
    return MONITORING in environ and not _switch(environ[MONITORING])


def _debugging(environ: Mapping[str, str]) -> str:
    """Return the setting that turns on torch's debugging of desynchronised ranks; empty: it is off."""
    if _first_switch(environ, DESYNC):
        return next(f"{name}={environ[name]}" for name in DESYNC if name in environ)
    return f"{DEBUG}={environ[DEBUG]}" if environ.get(DEBUG, "").upper() == "DETAIL" else ""


def _first_switch(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Read a switch that has several names as torch does: the first one that is set counts."""
    return next((_switch(environ[name]) for name in names if name in environ), False)


def _switch(text: str) -> bool:
    return text.strip().lower() in ("1", "t", "true", "y", "yes")


def _number(text: str | None, default: int) -> int:
    """Return a setting as a number, or ``default`` if it is not a number: torch itself refuses such a setting."""
    try:
        return default if text is None else int(text)
    except ValueError:
        return default


def _distributed() -> Any:
    """Return ``torch.distributed``, if this process has imported it."""
    return sys.modules.get("torch.distributed")


def _initialized() -> bool:
    library = _distributed()
    return library is not None and bool(getattr(library, "is_initialized", lambda: False)())


def _uses_nccl() -> bool:
    """Return whether this process has a process group that uses NCCL."""
    if not _initialized():
        return False
    library = _distributed()
    groups = getattr(getattr(library.distributed_c10d, "_world", None), "pg_map", None) or [None]
    return any("nccl" in library.get_backend_config(group) for group in groups)
