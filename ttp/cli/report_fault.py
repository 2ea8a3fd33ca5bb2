"""``ttp report-fault``: tells a job that some of its ranks are broken."""

from __future__ import annotations

from typing import Annotated

import typer

from ttp.cli.connection import Address, Client, Port, Token, connected, find
from ttp.cli.output import Json, complain, print_json, say
from ttp.core.layout import WORLD_SIZE_MAX
from ttp.errors import UsageError

Ranks = Annotated[
    list[int] | None, typer.Option("--rank", min=0, max=WORLD_SIZE_MAX - 1, help="An accused rank; may be repeated.")
]
Host = Annotated[
    str,
    typer.Option(
        "--host",
        help="Accuse every rank of this host: its name as `ttp status` spells it, its short name, or its address.",
    ),
]
Drain = Annotated[
    bool,
    typer.Option(
        "--drain",
        help="Do not start ranks on the host again: a standby host (`ttp run --stand-by`) takes its place.",
    ),
]
Recovered = Annotated[
    bool, typer.Option("--recovered", help="Undo --drain: the host is healthy and may start ranks again.")
]
Reason = Annotated[str, typer.Option("--reason", help="What is wrong, for the incident's file.")]


def report_fault(
    *,
    rank: Ranks = None,
    host: Host = "",
    drain: Drain = False,
    recovered: Recovered = False,
    reason: Reason = "reported with `ttp report-fault`",
    address: Address = None,
    port: Port = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Report ranks or a host as broken, for a node monitor or an operator.

    The whole job then saves its newest step and exits with 75, so that its launcher starts it again. With --drain the
    accused host is left out of later launches, until --recovered. If another host stands by, a program written for
    MindIO (ARF) is not ended: the ranks of the host are moved while all train. For a checkpoint without a restart see
    `ttp save`. Exits with 1 if nothing was done, because no such rank or drained host is known.

    JSON keys: accused (ranks; none where they are moved), text (what happened, in words).
    """
    if not rank and not host:
        raise UsageError("report-fault needs --rank N or --host NAME")
    if drain and not host:
        raise UsageError("--drain takes a whole host: give --host NAME")
    if recovered and (rank or drain or not host):
        raise UsageError("--recovered takes a whole host: give --host NAME, and neither --rank nor --drain")
    accused: list[int] = []
    with connected(find(address, port, token)) as client:
        if recovered:
            answer = client.report_fault([], host, reason, recovered=True)
            done, text = answer.recovered, answer.text
        else:
            done, accused, text = accuse(client, rank or [], host, reason, drain=drain)
    if json:
        print_json({"accused": accused, "text": text})
    else:
        (say if done else complain)(text)
    if not done:
        raise typer.Exit(1)


def accuse(client: Client, ranks: list[int], host: str, reason: str, *, drain: bool) -> tuple[bool, list[int], str]:
    """Report ranks or a host; or have the ranks of a drained host moved, if they can be while all train.

    Returns:
        Whether the job acts on it, the accused ranks (none if they are moved), and what happened, in words.
    """
    if drain and client.move(host):
        return True, [], f"the ranks of {host} are moved to a host that stands by, while all train"
    answer = client.report_fault(ranks, host, reason, drain=drain)
    return bool(answer.accused), list(answer.accused), answer.text
