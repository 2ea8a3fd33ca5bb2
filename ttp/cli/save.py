"""``ttp save``: makes a running job write a checkpoint now."""

from __future__ import annotations

from typing import Annotated

import typer

from ttp.cli.connection import Address, Port, Token, connected, find
from ttp.cli.output import Json, aside, complain, print_json, say, seconds
from ttp.config import Config

Reason = Annotated[str, typer.Option("--reason", help="Why, for the manifest and the incident's file.")]
Timeout = Annotated[
    float | None, seconds("--timeout", about="Seconds to wait for the answer. Default: TTP_OT, else 360.")
]


Again = Annotated[
    bool,
    typer.Option(
        "--again",
        help="Test --continuity keep: then let all ranks go on from it in their processes, as after a death.",
    ),
]


def save(
    *,
    reason: Reason = "requested with `ttp save`",
    again: Again = False,
    timeout: Timeout = None,
    address: Address = None,
    port: Port = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Write a checkpoint of a running job now, at the next step boundary. Training stands still until it is there.

    Returns when the checkpoint is committed, or says why there is none and exits with 1.

    JSON keys: saved, version (finished updates), path, text (what happened, in words).
    """
    where = find(address, port, token)
    patience_s = timeout if timeout is not None else Config.from_env().rescue_patience_s
    with connected(where) as client, aside().status("saving ..."):
        answer = client.save(reason, patience_s, again=again)
    if json:
        print_json({"saved": answer.saved, "version": answer.version, "path": answer.path, "text": answer.text})
    elif answer.saved:
        say(f"{answer.text}: {answer.path}" if answer.path else answer.text)
    else:
        complain(f"nothing was saved: {answer.text}")
    if not answer.saved:
        raise typer.Exit(1)
