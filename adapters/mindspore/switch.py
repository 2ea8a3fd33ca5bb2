"""Reads the two environment variables that switch the power-off checkpoint on, as in MindSpore's documentation."""

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

    Args:
        environ: the environment; None: that of this process.

    Raises:
        ConfigError: a variable is missing or has another value; the message says what to set.
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
            "environment of every worker, or remove the callback from Model.train"
        )


def may_be_protected() -> bool:
    """Return whether ttp may be on in this job: then an optimizer that is wrapped now must report its updates."""
    return bool(os.environ.get("TTP_PORT")) or bool(_TTP_ON.search(os.environ.get(TFT, "")))


def _said(environ: Mapping[str, str], name: str) -> str:
    return f"it is {environ[name]!r:.60}" if name in environ else "it is not set"
