"""Lets the launchers of a job agree on its token: the first node makes one and passes it on through the rendezvous.

Launchers meet in a key-value store before they start workers. The first node writes the token there. A node that was
given a token (``TTP_TOKEN_FILE``, ``TTP_TOKEN``) keeps that one. A token given by the user is never put into the store,
because the store authenticates no client (docs/security.md).
"""

from __future__ import annotations

import dataclasses
import secrets
from datetime import timedelta
from typing import Any

from ttp.config import Config
from ttp.errors import ConfigError

KEY = "ttp/token"
MADE = "made:"
GIVEN = "given"
INSECURE = "insecure"
WAIT_S = 60.0
"""Seconds to wait for the token: the first node's launcher writes it as soon as the nodes have met."""


def new_token() -> str:
    """Return a random secret: 32 hexadecimal digits."""
    return secrets.token_hex(16)


class SharedToken:
    """The token on which the nodes of a job agree.

    Args:
        config: settings as they were given to this node.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._given = INSECURE if not config.token and config.insecure else GIVEN if config.token else ""

    @property
    def made_here(self) -> bool:
        """True if the launchers make the token; False if the user gave one, or chose to have none."""
        return not self._given

    def agree(self, store: Any, *, first: bool) -> Config:
        """Return the settings with the job's token. Call it on all nodes each time they have met.

        Args:
            store: torch's store, which the launchers share.
            first: True on the first node.

        Raises:
            ConfigError: this node has no token, and the first node passes none on.
        """
        if first:
            if not self._given and not self._config.token:
                self._config = dataclasses.replace(self._config, token=new_token())
            store.set(KEY, self._given or MADE + self._config.token)
        elif not self._given:
            self._config = dataclasses.replace(self._config, token=self._hear(store))
        return self._config

    @staticmethod
    def _hear(store: Any) -> str:
        """Return the token that the first node wrote to the store."""
        try:
            store.wait([KEY], timedelta(seconds=WAIT_S))
        except (RuntimeError, OSError, LookupError) as problem:  # what torch raises; not its SignalException
            raise ConfigError(
                f"the first node has not passed on the job's token within {WAIT_S:g} s: does it run this version of "
                "ttp? Else set TTP_TOKEN_FILE on every node to a file of mode 0600 with the same secret"
            ) from problem
        value = store.get(KEY).decode()
        if value == INSECURE:
            raise ConfigError("TTP_INSECURE=1 is set on the first node and not on this one: set it on all, or on none")
        if not value.startswith(MADE):
            raise ConfigError(
                "the first node was given a token, and this one was not: set TTP_TOKEN_FILE (or TTP_TOKEN) to the same "
                "secret on every node"
            )
        return value.removeprefix(MADE)
