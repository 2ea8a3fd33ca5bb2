"""``ttp watch-node``: watches the health of a host, and tells the job that trains there."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Annotated

import typer

from ttp.cli.connection import Address, Port, Token, connected, find
from ttp.cli.output import Complaints, seconds
from ttp.cli.report_fault import accuse
from ttp.config import Config
from ttp.errors import TtpError, UsageError
from ttp.launch.node_check import Finding, Health, ReportPolicy, read_reset, run_check

EXIT_UNKNOWN = 3
"""Exit code of ``--once`` when no check has found out the health of the host; monitors such as Nagios use it, too."""

Check = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND ...",
        help="The check: exits with 0 healthy, 1 sub-healthy, 2 faulty; its last line is the reason.",
    ),
]
ResetJson = Annotated[
    Path | None, typer.Option("--reset-json", help="MindCluster's reset.json: broken devices by rank.")
]
Host = Annotated[
    str, typer.Option("--host", help="This host's name as `ttp status` spells it. Default: TTP_HOST, or its own name.")
]
Every = Annotated[float, seconds("--every", about="Seconds between two checks.")]
Timeout = Annotated[
    float, seconds("--timeout", about="Seconds that a check may take; after that the host counts as faulty.")
]
Strikes = Annotated[int, typer.Option("--strikes", min=1, help="Report after so many failed checks in a row.")]
SubHealthy = Annotated[
    bool, typer.Option("--report-sub-healthy", help="Report a sub-healthy host too; else it is only logged.")
]
Drain = Annotated[
    bool, typer.Option("--drain", help="Like `ttp report-fault --drain`: another host takes the place of this one.")
]
Once = Annotated[
    bool, typer.Option("--once", help="Check once, report at once, and exit as the check did, or with 3: unknown.")
]


def watch_node(
    check: Check = None,
    *,
    reset_json: ResetJson = None,
    host: Host = "",
    every: Every = 30.0,
    timeout: Timeout = 60.0,
    strikes: Strikes = 2,
    report_sub_healthy: SubHealthy = False,
    drain: Drain = False,
    once: Once = False,
    address: Address = None,
    port: Port = None,
    token: Token = None,
) -> None:
    """Watch the health of this host with a check of your own, and report faults to the job that trains here.

    A faulty host is reported like `ttp report-fault --host`: the job saves its newest step and is started again, with
    --drain on another host. It is reported once, until it gets worse, or the check has called it healthy again; then a
    --drain is taken back, too. If a check cannot be run, or reset.json is half written, the health is unknown: the
    reason is printed, nothing is reported or taken back, and --once exits with 3. If no job runs, this is printed, and
    the next check tries again. The command runs until it is stopped.
    """
    if not check and reset_json is None:
        raise UsageError("watch-node needs a check (ttp watch-node -- COMMAND ...) or --reset-json FILE")
    name = host or Config.from_env().host or socket.gethostname()
    policy = ReportPolicy(1 if once else strikes, report_sub_healthy=report_sub_healthy)
    tell, tell_unknown = Complaints(), Complaints()
    while True:
        worst = _look(check, timeout, reset_json, tell_unknown)
        try:
            if worst is None:
                pass  # unknown: the host may be as before
            elif policy.report(worst):
                with connected(find(address, port, token)) as client:
                    ranks, whole = list(worst.ranks), "" if worst.ranks else name
                    done, _, text = accuse(client, ranks, whole, worst.text, drain=drain and bool(whole))
                tell(f"{name} is {worst}. {text}")
                policy.told(worst if done else None)
            elif policy.take_back(worst):
                with connected(find(address, port, token)) as client:
                    client.report_fault([], name, "it is healthy again", recovered=True)
                tell(f"{name} is healthy again")
                policy.told(None)
            elif worst.health is not Health.HEALTHY:
                tell(f"{name} is {worst}")
        except TtpError as problem:  # no job runs (yet): the next round tries again
            tell(str(problem))
        if once:
            raise typer.Exit(EXIT_UNKNOWN if worst is None else worst.health.value)
        time.sleep(every)


def _look(check: list[str] | None, timeout_s: float, reset_json: Path | None, tell: Complaints) -> Finding | None:
    """Return the worst finding of all checks; print why a check has found nothing.

    None: the health is unknown, as a check has found nothing, and no other one has found the host unhealthy.
    """
    found = [run_check(check, timeout_s)] if check else []
    found += [read_reset(reset_json)] if reset_json is not None else []
    reasons = [each for each in found if isinstance(each, str)]
    tell("; ".join(reasons))
    worst = max((each for each in found if isinstance(each, Finding)), key=lambda each: each.health.value, default=None)
    return None if reasons and (worst is None or worst.health is Health.HEALTHY) else worst
