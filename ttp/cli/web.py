"""``ttp web``: serves a page that shows a job."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from ttp.cli.connection import Address, Port, Token, find
from ttp.config import Config
from ttp.errors import ConfigError, UsageError

Listen = Annotated[str, typer.Option("--listen", help="Where browsers connect: HOST:PORT. Port 0: any that is free.")]
Directory = Annotated[
    Path | None,
    typer.Option("--save-dir", help="Show the incidents of this directory, even if no job runs."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--access-token-file",
        help="File with the page's own token (mode 0600). Default: a new token is made and printed.",
    ),
]
Certificates = Annotated[
    bool,
    typer.Option(
        "--client-certificates/--no-client-certificates",
        help="With TTP_TLS_CERT: whether browsers have to show a certificate of the job's authority too.",
    ),
]


def web(
    *,
    listen: Listen = "127.0.0.1:8780",
    save_dir: Directory = None,
    access_token_file: TokenFile = None,
    client_certificates: Certificates = True,
    address: Address = None,
    port: Port = None,
    token: Token = None,
) -> None:
    """Show a job to browsers: ranks, replica groups, incidents. Prints the address to open; ends with Ctrl-C.

    Read-only, and a process of its own: it puts no load on the job. It asks the controller as `ttp status` does, only
    while a browser is watching, and reads incidents if the save_dir is on this host. Browsers need the token in the
    printed address; with TTP_TLS_CERT they speak HTTPS.

    Needs starlette and uvicorn: pip install 'ttp-ft[web]'.
    """
    try:
        from ttp.web.server import Place, serve
    except ImportError as problem:
        raise ConfigError(f"ttp web needs starlette and uvicorn: pip install 'ttp-ft[web]' ({problem})") from None
    from ttp.web.looks import Asker, Incidents, Looks

    host, _, number = listen.rpartition(":")
    if not host or not number.isdecimal() or int(number) > 65535:
        raise UsageError(f"--listen takes HOST:PORT, such as 127.0.0.1:8780, not {listen!r}")
    if save_dir is not None and not save_dir.is_dir():
        raise UsageError(f"there is no directory {save_dir}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    asker: Asker | None = Asker(address, port, token)
    config = Config.from_env()
    try:
        config = dataclasses.replace(config, token=find(address, port, token).token)
    except ConfigError:
        if save_dir is None:
            raise
        asker = None
    looks = Looks(asker, Incidents(save_dir))
    serve(looks, Place(host.strip("[]"), int(number), access_token_file, client_certificates), config)
