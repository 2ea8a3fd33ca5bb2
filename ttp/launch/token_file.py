"""The job's token in a file: the one that ``TTP_TOKEN_FILE`` names, or the one that a launcher writes for its host."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ttp.errors import ConfigError, ToldAs, strerror_of
from ttp.store.durable import replace_file

TOKEN_FILE = "token"
TOKEN_MAX = 4000
"""Maximum length of a token in bytes; a little less than a message takes."""


def write_token(run_dir: Path, token: str) -> None:
    """Write the job's token (mode 0600) where ``ttp status`` and other commands on this host find it.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = run_dir / TOKEN_FILE
    try:
        replace_file(path, f"{token}\n".encode(), mode=0o600)
    except OSError as problem:
        raise ConfigError(f"cannot write {path}: {problem}. Set TTP_RUN_DIR to a writable local directory") from None


def read_token(run_dir: Path) -> str | None:
    """Return the token that ``write_token`` left; None: there is none.

    Raises:
        ConfigError: the file is not private; the text says what to do.
    """
    path = run_dir / TOKEN_FILE
    return secret_in(path, str(path)) if os.path.lexists(path) else None


def forget_token(run_dir: Path, token: str) -> None:
    """Remove the token file of a job that is over. The token of another job stays. Never raises."""
    with contextlib.suppress(ConfigError, OSError):  # such as of a disk that has become read-only meanwhile
        if read_token(run_dir) == token:
            (run_dir / TOKEN_FILE).unlink(missing_ok=True)


def secret_in(path: Path, named: str) -> str:
    """Return the content of a secret file, without white space at both ends.

    Args:
        path: a plain file of this user or of root that no other user may read.
        named: how error messages call the file.

    Raises:
        ConfigError: it cannot be read, is empty or no token, or is not private; the text says what to do.
    """
    with ToldAs(ConfigError, f"{named} cannot be read", OSError, reason=strerror_of):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            _check_private(os.fstat(descriptor), named)
            data = file.read(TOKEN_MAX + 100)
    text = data.decode(errors="replace").strip()
    if not text:
        raise ConfigError(f"{named} is empty: `openssl rand -hex 16` makes a token")
    with ToldAs(ConfigError, f"{named} does not contain a valid token", ValueError):
        return token_text(text)


def token_text(text: str) -> str:
    """Return ``text`` after checking that it can be a token: it is sent in the headers of gRPC and HTTP.

    Raises:
        ValueError: it is too long, is not printable ASCII, or has blanks at the ends.
    """
    if not (text.isascii() and text.isprintable() and text == text.strip() and len(text) <= TOKEN_MAX):
        raise ValueError(f"expected at most {TOKEN_MAX} printable ASCII characters, without spaces at the ends")
    return text


def _check_private(found: os.stat_result, named: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{named} is not a regular file")
    if found.st_uid not in (0, os.getuid()):
        raise ConfigError(
            f"{named} belongs to uid {found.st_uid}, who can read it: use a file of your own, or run this as that user"
        )
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{named} has mode {stat.S_IMODE(found.st_mode):04o}, and others than its owner may read or write it: "
            "chmod 600 it (where that cannot be, as in some containers, give the token in TTP_TOKEN)"
        )
