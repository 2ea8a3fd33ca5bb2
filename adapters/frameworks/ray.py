"""Ray Train: makes Ray wait until the living ranks have saved, before Ray ends them.

When a worker dies, Ray ends the other workers at once. The callback switches ttp on in each worker, and makes Ray wait
while the job saves. The training function itself calls ``wrap_optimizer`` and ``restore``, as in other jobs.

Ray calls the hooks in the process of Ray's own controller, on the host of the program that called ``fit()``. ttp's
controller is started from that process, so it outlives all workers and their nodes. The hooks are Ray's interface for
developers (``ray.train.v2._internal.execution.callback``), as seen in 2.60.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttp.adapters.versions import names_of, require
from ttp.config import CONTROLLER_ADDR, Config
from ttp.core.controller.job_verdict import FRUITLESS_MAX
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, ConfigError, TtpError
from ttp.launch import presence
from ttp.launch.controller_keeper import ControllerKeeper
from ttp.launch.ports import hold_port
from ttp.launch.ring import ask_everybody, reigning
from ttp.store.history import fruitless, read_launches
from ttp.wire.address import target

TESTED = ("2.60", "2.60")
"""Oldest and newest version of Ray with which ttp was tested."""

ray = require("ray", "ray", TESTED)
with names_of("ray", TESTED):
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupContext

log = logging.getLogger("ttp.adapters.frameworks")

SAVING = {"freezing", "saving", "mending", "committing", "saved"}
"""Stages of a controller (``GetStatusResponse.stage``) in which ranks must not be ended."""
LOOK_S = 0.1
"""Seconds between two requests for the controller's status."""
UNHEARD = 5
"""Number of unanswered requests in a row after which the controllers count as lost."""
ANSWER_S = 5.0
"""Seconds to wait for the answer to a fault report."""


class TtpCallback(WorkerGroupCallback, ControllerCallback):
    """Protects a training of Ray Train, for ``RunConfig(callbacks=[TtpCallback()], failure_config=...)``.

    No finished step is lost when a worker dies, raises or is drained. A healthy worker group that Ray ends, to start it
    with another number of workers, saves first.

    Args:
        settings: environment variables of ttp for every worker, such as ``{"TTP_OT": "600"}``.

    Raises:
        ConfigError: a setting is not a variable of ttp, or has a wrong value.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = dict(settings or {})
        if foreign := sorted(name for name in self._settings if not name.startswith("TTP_")):
            raise ConfigError(f"settings of ttp begin with TTP_: {', '.join(foreign)} cannot be given here")
        self._settings.setdefault("TTP_TOKEN", secrets.token_hex(16))
        self._patience_s = Config.from_env(self._settings).rescue_patience_s
        self._keeper: ControllerKeeper | None = None
        self._held: socket.socket | None = None  # keeps the port until the training is over
        self._around: tuple[str, ...] = ()
        self._launch = -1
        self._save_dir = ""
        self._run = f"ray-{secrets.token_hex(4)}"
        self._before: dict[str, str | None] = {}  # variables of this process before the training

    # ------------------------------------------------------------------------------------------------- called by Ray

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        """Switch ttp on in all workers. Ray's torch backend has already set their ranks."""
        self._launch += 1
        self._keep_controller()
        words = {"TORCHELASTIC_RUN_ID": self._run, "TORCHELASTIC_RESTART_COUNT": str(self._launch)}
        worker_group.execute(_switch_on, self._settings | words)
        self._around = (target(self._settings[CONTROLLER_ADDR], int(self._settings["TTP_PORT"])),)

    @contextlib.contextmanager
    def on_worker_group_shutdown(self) -> Iterator[None]:
        """Wait while the job saves. Ray calls this first when it ends workers, before it ends their process group."""
        self._hold()
        yield

    def before_worker_group_abort(self, worker_group_context: WorkerGroupContext) -> None:
        """Do not wait for a save, because the user aborts the training."""
        self._around = ()

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Wait while the job saves, and refuse a new launch that would fail again, whatever ``max_failures`` allows.

        Raises:
            TtpError: the program or its configuration is wrong (64), or several launches in a row have made no new
                version (70).
        """
        self._hold()
        self._around = ()
        if self._save_dir and (reason := hopeless(Path(self._save_dir), self._run)):
            raise TtpError(f"ttp: no further launch: {reason}")

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Report the ranks on a node that Ray drains as preempted, so that the job saves while they are alive."""
        info = getattr(current_state, "preemption_info", None)
        if info is None or getattr(previous_state, "preemption_info", None) is not None:
            return
        ranks = sorted({rank for ranks in info.preempted_node_to_ranks.values() for rank in ranks})
        self._tell(ranks, "Ray drains its node")

    def after_controller_finish(self, result: Any) -> None:
        """Stop ttp's controller after the training, so that nothing of its settings is left for the next one."""
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None
        if self._held is not None:
            self._held.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}

    # ------------------------------------------------------------------------------------------------------- private

    def _keep_controller(self) -> None:
        """Start ttp's controller on this host with the workers' settings; if it dies, it is started again."""
        if self._keeper is None:
            self._settings.setdefault(CONTROLLER_ADDR, str(ray.util.get_node_ip_address()))
            self._held = hold_port()
            self._settings.setdefault("TTP_PORT", str(self._held.getsockname()[1]))
            config = Config.from_env(self._settings)
            ours = {name: value for name, value in self._settings.items() if name != "TTP_PORT"}
            self._before = {name: os.environ.get(name) for name in ours}
            os.environ.update(ours)
            self._keeper = ControllerKeeper(config, config.resolved_run_dir())
        self._keeper.start(self._settings[CONTROLLER_ADDR])  # the controller may have ended after a finished launch

    def _hold(self) -> None:
        """Ask a healthy job to save. Return when no rank saves any more, at the latest after ``TTP_OT``."""
        ends, unheard = time.monotonic() + self._patience_s, 0
        while self._around and unheard < UNHEARD:
            found = reigning(self._around, self._token)
            if found is None:
                unheard += 1
            else:
                unheard, (place, status) = 0, found
                self._around = tuple(dict.fromkeys((place, *self._around, *status.standbys)))
                self._save_dir = status.save_dir or self._save_dir
                if status.stage == "training":
                    self._save(place)
                    return
                if status.stage not in SAVING:
                    return
            if time.monotonic() > ends:
                log.error("the job still saves after TTP_OT=%.0f s: Ray now ends its workers", self._patience_s)
                return
            time.sleep(LOOK_S)

    @property
    def _token(self) -> str:
        return self._settings["TTP_TOKEN"]

    def _save(self, place: str) -> None:
        from ttp.wire.v1 import controller_pb2 as pb

        request = pb.SaveNowRequest(reason="Ray ends the workers")
        for _, answer in self._ask((place,), "SaveNow", request, self._patience_s):
            log.info("%s", answer.text)

    def _tell(self, ranks: list[int], reason: str) -> None:
        from ttp.core.messages import FaultKind
        from ttp.wire.convert import enum_to_wire
        from ttp.wire.v1 import controller_pb2 as pb

        kind: Any = enum_to_wire(FaultKind.PREEMPTED)
        request = pb.ReportFaultRequest(ranks=ranks, reason=reason, kind=kind)
        for _, answer in self._ask(self._around, "ReportFault", request, ANSWER_S):
            log.info("%s", answer.text)

    def _ask(self, around: tuple[str, ...], method: str, request: Any, timeout_s: float) -> Iterator[tuple[str, Any]]:
        import grpc

        def ask(address: str, port: int) -> Any:
            try:
                return presence.ask(address, port, self._token, method, request, timeout_s)
            except grpc.RpcError as problem:
                log.warning("the controller at %s:%s did not answer %s: %s", address, port, method, problem)
                return None

        ends = time.monotonic() + timeout_s
        return ask_everybody(around, ask, lambda: ends)


def hopeless(save_dir: Path, run_id: str) -> str:
    """Return why the job should not be started again, from the records of its launches; empty: no reason is known.

    Args:
        save_dir: the job's ``save_dir``. If this process cannot read it, no reason is known.
        run_id: the job's run id.
    """
    launches = [launch for launch in read_launches(save_dir) if launch.run_id == run_id]
    if not launches:
        return ""
    last, in_vain = launches[-1], fruitless(launches) >= FRUITLESS_MAX
    return last.text if last.code == EXIT_BAD_CONFIG or (last.code == EXIT_NOT_SAVED and in_vain) else ""


def _switch_on(words: dict[str, str]) -> None:
    """Set the environment variables ``words``. Runs in a worker."""
    os.environ.update(words)
