"""Reads the two environment variables of MindSpore's documentation that switch the power-off checkpoint on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ttp.errors import ConfigError

TFT = "MS_ENABLE_TFT"
MINDIO = "MINDIO_FOR_MINDSPORE"

_TTP_ON = re.compile(r"(^|[{,\s])TTP:1($|[},\s])")


def require_switched_on(environ: Mapping[str, str] | None = None) -> None:
    """Check that both variables are set, as ``TFTRegister`` and ``TrainFaultTolerance`` need them.

    Raises:
        ConfigError: one is missing or says something else; the text says what to set.
    """
    environ = os.environ if environ is None else environ
    wrong = []
    if not _TTP_ON.search(environ.get(TFT, "")):
        wrong.append(f"{TFT}='{{TTP:1}}' ({_said(environ, TFT)})")
    if environ.get(MINDIO, "") != "1":
        wrong.append(f"{MINDIO}=1 ({_said(environ, MINDIO)})")
    if wrong:
        raise ConfigError(
            f"the power-off checkpoint is switched on by two environment variables: set {' and '.join(wrong)} in the "
            "environment of every worker, or take the callback out of Model.train"
        )


def may_be_protected(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ttp may be switched on, so that an optimizer that is wrapped now has to report updates."""
    environ = os.environ if environ is None else environ
    return bool(environ.get("TTP_PORT")) or bool(_TTP_ON.search(environ.get(TFT, "")))


def _said(environ: Mapping[str, str], name: str) -> str:
    return f"it is {environ[name]!r:.60}" if name in environ else "it is not set"
