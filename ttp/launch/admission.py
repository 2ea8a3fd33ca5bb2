"""Checks access settings: a job with a token may span hosts; a job without one may only use loopback on one host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch.presence import is_local
from ttp.launch.rank_names import in_torchruns_names
from ttp.wire.address import resolve

GIVE_A_TOKEN = (
    "Give every process of the job the same secret: `(umask 077; openssl rand -hex 16 > FILE)` makes one, "
    "TTP_TOKEN_FILE names the file (TTP_TOKEN is the secret itself). For torch jobs `ttp run`, and torchrun with ttp "
    "installed, make a token by themselves. TTP_INSECURE=1 runs the job without one, and serves anyone who connects"
)


def admitted(config: Config, address: str, *, several: bool = False) -> tuple[Config, str]:
    """Return the settings and the controller's address that a process of the job has to use.

    Without a token (and without ``TTP_INSECURE=1``) the controller listens on loopback only. If ``address`` is another
    name of this host, the loopback address replaces it.

    Args:
        config: settings from the environment.
        address: MASTER_ADDR.
        several: the job has ranks on other hosts.

    Raises:
        ConfigError: the job has several hosts and no token, or ``address`` is not known; the text says what to do.
    """
    from ttp.wire.access import is_loopback, listening_address, warn_if_open

    if config.token:
        return config, address
    if config.insecure:
        warn_if_open(config.insecure)
        return config, address
    bind = listening_address(config)
    if not is_loopback(address) and (several or not is_local(address)):
        if not several and not _numbers(address):
            raise ConfigError(
                f"this host finds no address of {address!r:.200} (MASTER_ADDR), where the first rank is said to be: "
                "correct the name, or set MASTER_ADDR=127.0.0.1 for a job of one host"
            )
        raise ConfigError(
            f"this job runs on several hosts (its first rank is at {address}), and has no token that keeps "
            f"strangers out. {GIVE_A_TOKEN}"
        )
    reached = address if _numbers(bind) & _numbers(address) else bind
    return dataclasses.replace(config, bind=bind), reached


def spans_hosts(environ: Mapping[str, str], world_size: int) -> bool:
    """Return whether the launcher's variables show that the job has ranks on other hosts; False if they do not say."""
    return 0 < ranks_here(environ) < world_size


def ranks_here(environ: Mapping[str, str]) -> int:
    """Return the number of the job's ranks on this host, from the launcher's variables; 0: unknown."""
    try:
        names = in_torchruns_names(environ)
    except ConfigError:
        return 0
    here = names.get("LOCAL_WORLD_SIZE") or names.get("OMPI_COMM_WORLD_LOCAL_SIZE") or ""
    return int(here) if here.isdecimal() else 0


def _numbers(address: str) -> set[str]:
    """Return the IP addresses of a name; none if it cannot be resolved."""
    try:
        return {str(where[0]) for *_, where in resolve(address, None)}
    except OSError:
        return set()
