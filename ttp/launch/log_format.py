"""Formats the lines of a log: text for people, or one JSON object per line for log collectors (``TTP_LOG_FORMAT``)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from typing import TYPE_CHECKING

from ttp.errors import ConfigError
from ttp.launch.rank_names import in_torchruns_names

if TYPE_CHECKING:
    from ttp.config import Config

FACTS = "ttp_facts"
"""Name of a record's extra attribute with further fields of the line: an event, its incident, a rank, a version."""
TEXT, JSON = "text", "json"


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line: time (UTC, RFC 3339), level, logger, process, message, facts.

    Args:
        **always: fields that are added to every line.
    """

    def __init__(self, **always: object) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter.format``."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {"time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname}
        line |= {"logger": record.name, "process": record.process, **self._always, "message": record.getMessage()}
        line |= getattr(record, FACTS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def formatter(kind: str, text: str, datefmt: str | None = None, **always: object) -> logging.Formatter:
    """Return the formatter that ``TTP_LOG_FORMAT`` selects.

    Args:
        kind: ``text`` or ``json``.
        text: ``logging`` format string of a text line.
        datefmt: format string of its time.
        **always: fields that are added to every JSON line.
    """
    return JsonFormatter(**always) if kind == JSON else logging.Formatter(text, datefmt)


def configure_logging(config: Config) -> None:
    """Give the ``ttp`` logger a handler on stderr, if ttp is on and the program has not configured logging."""
    logger = logging.getLogger("ttp")
    if config.port is None or logging.getLogger().handlers or logger.handlers:
        return
    handler = logging.StreamHandler()
    tell = handler.handleError

    def told(record: logging.LogRecord) -> None:
        with contextlib.suppress(ValueError):  # the program has closed its stderr, and is saved like any other
            tell(record)

    handler.handleError = told  # type: ignore[method-assign] # a subclass could not be generic in Python 3.10
    rank: int | str = "?"
    with contextlib.suppress(ConfigError, KeyError, ValueError):  # unknown; code that needs the rank raises the error
        rank = int(in_torchruns_names(os.environ)["RANK"])
    handler.setFormatter(
        formatter(config.log_format, f"%(asctime)s %(levelname)s [ttp rank {rank}] %(message)s", rank=rank)
    )
    logger.addHandler(handler)
    logger.setLevel(config.log_level.upper())
