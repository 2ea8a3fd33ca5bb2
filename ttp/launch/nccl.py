"""Keeps NCCL from ending a rank whose collective hangs before its state is on disk.

Torch watches NCCL's collectives from a thread, the watchdog. After an error or a time-out it does what
``TORCH_NCCL_ASYNC_ERROR_HANDLING`` says: 0 nothing, 1 abort and end the process, 2 abort, 3 end the process. Unset it
is 3, and torchrun exports 1. An abort lets the stuck kernel return, and the optimizer's kernels that are queued behind
it then run on whatever the collective has left. Both defeat the save, so it has to be 0.

With 0 one more thread can end the process: the monitor, ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`` (480) after the watchdog
of any rank has seen a failure, and when the watchdog itself hangs. It is the last resort for a job that hangs when no
controller is left to notice, so it is not switched off: it is told to wait for longer than a rescue takes.

``TORCH_NCCL_DESYNC_DEBUG`` and ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` turn a 0 back into 3. With
``TORCH_NCCL_BLOCKING_WAIT`` there is neither watchdog nor monitor: the host waits for each collective, so nothing is
queued behind one that fails.

Where survivors are to go on in their processes (``TTP_CONTINUITY=keep`` with ``TTP_KEEP_CUDA=1``) ttp itself aborts the
communicators, once the state is saved. Then nothing else may react to that, and NVLink SHARP has to be off, with which
an abort is not supported. What a user has set otherwise is respected: such a job is started anew after a failure.

A process group reads all this when it is made. Launchers export it to the workers; under a foreign launcher
``import ttp`` does, which comes first in almost every program. ``wrap_optimizer`` can only look.
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

log = logging.getLogger("ttp")

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
HANDLING_BEFORE = "NCCL_ASYNC_ERROR_HANDLING"
"""The name that it had; torch reads it where the new one is not set."""
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
DESYNC = ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG")
DEBUG = "TORCH_DISTRIBUTED_DEBUG"
TO_GO_ON = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "an error of the device ends the process from NCCL's watchdog",
    "TORCH_NCCL_PROPAGATE_ERROR": "an abort of one rank is taken for a failure by the others",
    "NCCL_NVLS_ENABLE": "communicators that use NVLink SHARP cannot be aborted",
}
"""Settings that have to be 0 where survivors go on, and why."""
_OFF_BY_DEFAULT = ("TORCH_NCCL_PROPAGATE_ERROR",)

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
    """One way in which NCCL would end or spoil a rank before its save is durable.

    Args:
        text: the setting, what it does, what to do instead.
        on_purpose: somebody has set it; else it is a default of torch or torchrun.
    """

    text: str
    on_purpose: bool


def settings(environ: Mapping[str, str], config: Config, launcher: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables to export before a process group is made; none that the user has set.

    Args:
        environ: of the process, or of the launcher that hands it on.
        config: settings of the job; how long a rescue may take is among them.
        launcher: what the process that launched this one was started with, if it is known.
    """
    wanted = {}
    if HANDLING_BEFORE not in environ and (HANDLING not in environ or _of_torchrun(environ, launcher)):
        wanted[HANDLING] = "0"
    if HEARTBEAT not in environ:
        wanted[HEARTBEAT] = str(heartbeat_s(config))
    return wanted | {name: "0" for name in TO_GO_ON if goes_on(config) and name not in environ}


def goes_on(config: Config) -> bool:
    """Whether survivors whose state is on a device are to go on in their processes."""
    return config.continuity == KEEP and config.keep_cuda


def why_not_go_on(environ: Mapping[str, str], config: Config, launcher: Mapping[str, str] | None = None) -> list[str]:
    """Why the survivors of a death could not go on with process groups that were made with this environment."""
    found = [objection.text for objection in objections(environ, config, launcher)]
    for name, why in TO_GO_ON.items():
        if environ.get(name, "0" if name in _OFF_BY_DEFAULT else "").strip().lower() not in (
            "0",
            "f",
            "false",
            "n",
            "no",
        ):
            found.append(f"{f'with {name}={environ[name]}' if name in environ else f'without {name}=0'} {why}")
    if _first_switch(environ, BLOCKING):
        name = next(name for name in BLOCKING if name in environ)
        found.append(f"with {name}={environ[name]} the host waits in each collective, and does not come out of it")
    needed_s = config.rescue_patience_s + config.continue_s
    heartbeat = _number(environ.get(HEARTBEAT), _HEARTBEAT_OF_TORCH_S)
    if not _monitor_is_off(environ) and heartbeat < needed_s:
        found.append(f"{HEARTBEAT}={heartbeat} lets NCCL's monitor end a rank within the {needed_s:g} s of going on")
    return found


def objections(
    environ: Mapping[str, str], config: Config, launcher: Mapping[str, str] | None = None
) -> list[Objection]:
    """Why a process group that was made with this environment may defeat a save; see ``settings`` for the arguments."""
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
        text = f"{debug} turns {HANDLING}=0 back into 3: NCCL's watchdog will {_DOES[3]} before it is saved; unset it"
        found.append(Objection(text, True))
    return [*found, *_impatience(environ, config)]


def heartbeat_s(config: Config) -> int:
    """Seconds after which torch's monitor may end a rank: time to notice a hang, freeze and save, and a minute."""
    noticed_s = 3 * (config.hang_s or 0.0)
    rescued_s = config.freeze_patience_s + config.answer_patience_s + config.rescue_patience_s
    goes_on_s = config.continue_s if goes_on(config) else 0.0
    return max(_HEARTBEAT_OF_TORCH_S, math.ceil(noticed_s + rescued_s + goes_on_s + _MARGIN_S))


def prepare() -> None:
    """Put ``settings`` into this process, if ttp is switched on and no process group has been made yet."""
    if not os.environ.get("TTP_PORT") or _initialized():
        return
    with contextlib.suppress(ConfigError):  # whoever needs the settings says what is wrong with them
        os.environ.update(settings(os.environ, Config.from_env(), launcher_environ()))


def check(config: Config) -> None:
    """See that the NCCL groups of this process leave a save alone; a default that does not is told in the log.

    Raises:
        ConfigError: somebody has set on purpose what defeats a save; the text names it and what to do.
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


def launcher_environ(proc: Path = Path("/proc")) -> dict[str, str] | None:
    """The environment that torchrun itself was started with.

    It is the nearest ancestor of this process that is none of its workers. None: its environment cannot be read.
    """
    pid = os.getppid()
    for _ in range(_ANCESTORS_MAX):
        try:
            raw = (proc / str(pid) / "environ").read_bytes()
            parent = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            return None
        pairs = (entry.partition("=") for entry in os.fsdecode(raw).split("\0"))
        found = {name: value for name, _, value in pairs if name}
        if "TORCHELASTIC_RUN_ID" not in found:
            return found
        pid = int(parent)
    return None


def _of_torchrun(environ: Mapping[str, str], launcher: Mapping[str, str] | None) -> bool:
    """Whether the value of ``HANDLING`` is torchrun's own: it passes on what it was started with, else it says 1."""
    launched = "TORCHELASTIC_RUN_ID" in environ and environ.get(HANDLING) == _HANDLING_OF_TORCHRUN
    return launched and (launcher is None or HANDLING not in launcher)


def _impatience(environ: Mapping[str, str], config: Config) -> list[Objection]:
    """The objection that the monitor may end a rank which still saves."""
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
    """The setting that makes torch look for ranks out of step; empty: none does."""
    if _first_switch(environ, DESYNC):
        return next(f"{name}={environ[name]}" for name in DESYNC if name in environ)
    return f"{DEBUG}={environ[DEBUG]}" if environ.get(DEBUG, "").upper() == "DETAIL" else ""


def _first_switch(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """As torch reads a setting with several names: the first one that is there counts."""
    return next((_switch(environ[name]) for name in names if name in environ), False)


def _switch(text: str) -> bool:
    return text.strip().lower() in ("1", "t", "true", "y", "yes")


def _number(text: str | None, default: int) -> int:
    """A setting as a number; ``default`` where it is none: torch refuses such a setting itself."""
    try:
        return default if text is None else int(text)
    except ValueError:
        return default


def _distributed() -> Any:
    """``torch.distributed``, if this process has it."""
    return sys.modules.get("torch.distributed")


def _initialized() -> bool:
    library = _distributed()
    return library is not None and bool(getattr(library, "is_initialized", lambda: False)())


def _uses_nccl() -> bool:
    """Whether a process group of this process is NCCL's."""
    if not _initialized():
        return False
    library = _distributed()
    groups = getattr(getattr(library.distributed_c10d, "_world", None), "pg_map", None) or [None]
    return any("nccl" in library.get_backend_config(group) for group in groups)
