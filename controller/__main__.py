"""``python -m ttp.controller``: run one controller process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ttp._version import __version__
from ttp.config import Config, seconds
from ttp.controller.driver import Driver
from ttp.controller.journal import Journal
from ttp.controller.log_output import written_aside
from ttp.controller.service import start_server, stop_server
from ttp.controller.spans import SpanSender, wanted
from ttp.core.controller.events import ControllerTimeouts, LedElsewhere
from ttp.errors import EXIT_BAD_CONFIG, EXIT_PORT_TAKEN, EXIT_TRAINED, ConfigError
from ttp.launch.leases import exists
from ttp.launch.presence import may_be_bound, port_owner
from ttp.launch.proc_files import has_ended, identity
from ttp.launch.ring import read_ring
from ttp.launch.run_dir import make_private
from ttp.mindio.protocol.handler_recovery import HandlerRecovery
from ttp.wire.access import EVERYWHERE, is_loopback, listening_address
from ttp.wire.address import target

log = logging.getLogger("ttp.controller")

COLLECT_AFTER = 50_000, 20, 20
"""Thresholds of the garbage collector. With Python's defaults it runs several times during ten thousand answers."""

OWNER_CHECK_S = 1.0
"""Seconds between two checks whether the owner's process exists."""
RING_CHECK_S = 1.0
"""Seconds between two looks at the ring while no rank is connected; ranks that are all lost have more to come back."""
IDLE_CHECK_S = 0.1
"""Seconds between two checks whether ranks are still connected, after a SIGTERM."""

QUIET_BEATS, DOUBT_BEATS, DOUBT_MIN_S = 1.25, 2.0, 1.0
"""Number of heartbeats that a silent host misses before it is probed, and before it is in doubt. Doubt begins after
``DOUBT_MIN_S`` seconds at the earliest.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of a controller's command line."""
    p = argparse.ArgumentParser(
        prog="ttp controller",
        description="Run one controller. Ranks find it at MASTER_ADDR:TTP_PORT. It ends when the job is over, or when "
        "no rank has been connected for a while (--abandoned-s). Settings come from TTP_* variables, the shared secret "
        "from TTP_TOKEN_FILE or TTP_TOKEN. Without a secret it serves this user on loopback only.",
    )
    p.add_argument("--port", type=int, default=None, help="port to listen on (default: TTP_PORT)")
    p.add_argument(
        "--bind", default=None, help="address to bind (default: TTP_BIND, else every address; loopback without a token)"
    )
    p.add_argument("--run-dir", type=Path, default=None, help="where logs go (default: TTP_RUN_DIR)")
    p.add_argument(
        "--owner-pid",
        type=int,
        default=None,
        help="end when the process with this pid has ended and no rank is connected",
    )
    p.add_argument(
        "--orphan-s",
        type=seconds,
        default=0.0,
        help="seconds that the controller runs on without that process and without any rank",
    )
    p.add_argument("--abandoned-s", type=seconds, default=None, help="end after this many seconds without any rank")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run a controller until its job is over.

    Returns:
        The exit code: 0, 64 if a setting is wrong, or 98 if the port is in use.
    """
    args = parser().parse_args(argv)
    try:
        config = Config.from_env()
        if args.bind is not None:
            config = dataclasses.replace(config, bind=args.bind.strip("[]"))
        port = args.port if args.port is not None else config.port
        if port is None:
            raise ConfigError("no port: give --port or set TTP_PORT")
        if not 1 <= port <= 65535:
            raise ConfigError(f"--port {port} is not a port: give a number from 1 to 65535")
        if args.run_dir is not None:
            make_private(args.run_dir)
    except (ConfigError, OSError) as problem:
        _say(f"{problem}")
        return EXIT_BAD_CONFIG
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid either, as systemd's filter @resources does
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # each stream of a rank takes a descriptor
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    with written_aside(config.log_level.upper(), kind=config.log_format):
        return asyncio.run(serve(config, args, port))


def patience_of(config: Config, args: argparse.Namespace) -> ControllerTimeouts:
    """Return the state machine's timeouts from the settings and the command line.

    ``--abandoned-s`` may let a standby wait for weeks. It does not change ``forming_s``, the time in which the ranks of
    a job must join.
    """
    return ControllerTimeouts(
        answer_s=config.answer_patience_s,
        freeze_s=config.freeze_patience_s,
        grace_s=config.reconnect_grace_s,
        rescue_s=config.rescue_patience_s,
        abandoned_s=args.abandoned_s or config.abandoned_s,
        forming_s=config.abandoned_s,
        stall_s=max(config.stall_s, 3 * config.heartbeat_s),  # a saver's heartbeats tell whether it still writes
        hang_s=config.hang_s,
        heartbeat_s=config.heartbeat_s,
        silent_s=3 * config.heartbeat_s,
        quiet_s=QUIET_BEATS * config.heartbeat_s,
        doubt_s=max(DOUBT_MIN_S, DOUBT_BEATS * config.heartbeat_s),
        standbys=config.standbys,
    )


def _say(text: str) -> None:
    """Print why no controller runs here. Its launcher goes by the exit code, also if the disk of the log is full."""
    with contextlib.suppress(OSError):
        print(f"ttp controller: {text}", file=sys.stderr)


def _why_not(bind: str, port: int) -> str:
    """Return why the port cannot be bound, and what to do."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET) as probe:
            probe.bind((bind.strip("[]"), 0))
    except (OSError, UnicodeError) as problem:
        return f"TTP_BIND={bind} is not an address of this host ({problem})."
    owner = port_owner(port)
    try:
        with socket.socket() as probe:
            probe.bind(("", port))
    except PermissionError:
        return "this user may not listen there: ports below 1024 are usually for root. Choose another TTP_PORT."
    except OSError:
        pass  # in use
    held = f"it is in use by {owner}" if owner else "it is in use by a process that this user cannot see"
    return f"{held}. Choose another TTP_PORT."


async def serve(config: Config, args: argparse.Namespace, port: int) -> int:
    """Start the controller, serve until it is stopped, and stop it. Return the exit code, as ``main`` does."""
    run_dir = args.run_dir or config.resolved_run_dir()
    host = config.host or socket.gethostname()
    try:
        bind = listening_address(config)
        address = target(host if bind == EVERYWHERE or is_loopback(bind) else bind, port)
        journal = Journal(run_dir, (config.save_dir, config.fallback_dir), config.fallback_dir, address)
        driver = Driver(patience_of(config, args), journal, host, port, HandlerRecovery)
        server = await start_server(driver, config, port)
    except ConfigError as problem:
        _say(f"{problem}")
        return EXIT_BAD_CONFIG
    except RuntimeError:
        _say(f"port {port} on {bind} cannot be used: {_why_not(bind, port)}")
        return EXIT_PORT_TAKEN if may_be_bound(bind, port) else EXIT_BAD_CONFIG
    log.info("ttp %s controller, pid %s, listens on %s:%s", __version__, os.getpid(), bind, port)
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, driver.stopped.set)
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    tasks = [asyncio.create_task(_end_when_idle(driver, asked)), asyncio.create_task(_watch_ring(driver, run_dir))]
    if args.owner_pid:
        owner = identity(args.owner_pid)
        if not args.orphan_s:  # else it is a rank
            driver.launcher_lives = lambda: _lives(owner)
        tasks.append(asyncio.create_task(_watch_owner(driver, owner, args.orphan_s)))
    if config.metrics_port:
        from ttp.controller.metrics import serve_metrics

        tasks.append(asyncio.create_task(serve_metrics(driver, config)))
    spans = SpanSender(driver.history) if wanted(os.environ) else None
    if spans is not None:
        driver.observers.append(spans.take)
    await driver.stopped.wait()
    for task in tasks:
        task.cancel()
    await stop_server(server, driver)
    journal.close(timeout_s=5.0)
    if spans is not None:
        spans.close()
    return EXIT_TRAINED


async def _end_when_idle(driver: Driver, asked: asyncio.Event) -> None:
    """Wait for a SIGTERM (``asked``), then stop the controller once its ranks have left.

    A scheduler that preempts a job sends SIGTERM to all its processes at once (SLURM to a step, systemd to a unit). The
    controller must outlive its ranks then, because it leads their save.
    """
    await asked.wait()
    if driver.machine.job.live:
        log.info("SIGTERM: this controller ends when its ranks have left")
    while driver.machine.job.live:
        await asyncio.sleep(IDLE_CHECK_S)
    driver.stopped.set()


def _lives(owner: list[object]) -> bool:
    """Return whether a process (see ``identity``) lives. One that was killed, and not waited for, keeps its pid."""
    return exists(int(str(owner[0]))) and not has_ended(owner)


async def _watch_owner(driver: Driver, owner: list[object], orphan_s: float) -> None:
    """Stop the controller when for ``orphan_s`` seconds ``owner`` was gone and no rank was connected."""
    needed_at = time.monotonic()

    def look() -> None:
        nonlocal needed_at
        if driver.machine.job.live or _lives(owner):
            needed_at = time.monotonic()
        elif time.monotonic() - needed_at >= orphan_s:
            log.info("the process that started this controller (pid %s) has ended and no rank is connected", owner[0])
            driver.stopped.set()

    await _again_and_again(look, OWNER_CHECK_S)


async def _watch_ring(driver: Driver, run_dir: Path) -> None:
    """Tell the machine, once it has lost all ranks, which controller the ranks of this host say they have."""
    before = read_ring(run_dir)  # may be of another job

    def look() -> None:
        job = driver.machine.job
        ring = read_ring(run_dir) if job.suspects and not job.live else None
        if ring is not None and ring != before:
            driver.feed(LedElsewhere(ring.run_id, ring.incarnation, ring.term))

    await _again_and_again(look, RING_CHECK_S)


async def _again_and_again(look: Callable[[], None], every_s: float) -> None:
    """Call ``look`` each ``every_s`` seconds until cancelled. An error of it is logged, and ends nothing.

    One that comes again and again is logged once: it may last for days.
    """
    told = ""
    while True:
        await asyncio.sleep(every_s)
        try:
            look()
        except Exception as problem:
            if repr(problem) != told:
                log.exception("an error in a watch of this controller; it goes on")
            told = repr(problem)


if __name__ == "__main__":
    sys.exit(main())
