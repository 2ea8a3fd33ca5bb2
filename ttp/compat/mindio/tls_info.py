"""Translate ``enable_tls`` and ``tls_info`` of the original to ttp's settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from ttp.config import Config
from ttp.errors import ConfigError, ToldAs
from ttp.launch.run_dir import prepare_run_dir
from ttp.store.durable import replace_file
from ttp.wire import tls

log = logging.getLogger("ttp.compat.mindio")

KEYS = ("tlsCert", "tlsCrlPath", "tlsCrlFile", "tlsCaPath", "tlsCaFile", "tlsPk", "tlsPkPwd", "packagePath")

Decrypt = Callable[[str], str]


def use(enable_tls: bool, tls_info: str, run_dir: Path, decrypt: Decrypt | None) -> None:
    """Set up TLS for this process and its children, through environment variables.

    Args:
        enable_tls: whether to use TLS; if not, the environment is not changed.
        tls_info: ``"tlsCert: a.pem; tlsPk: a.key; tlsPkPwd: a.pwd; tlsCaPath: dir; tlsCaFile: x.pem, y.pem;
            tlsCrlPath: dir; tlsCrlFile: z.pem"``.
        run_dir: directory, private to the user, for files that are made from ``tls_info``.
        decrypt: function that returns the password for the content of ``tlsPkPwd``; None if the content is the
            password.

    Raises:
        ConfigError: ``tls_info`` cannot be used; the text says what to do.
    """
    if not enable_tls:
        return
    if not isinstance(tls_info, str):
        raise ConfigError(f"tls_info {tls_info!r} is not text")
    if tls_info.strip():
        os.environ.update(_settings(parse(tls_info), run_dir, decrypt))
    if tls.identity() is None:
        raise ConfigError(
            "enable_tls is set but tls_info is empty: give certificate, key and authority in it (tlsCert, tlsPk, "
            "tlsCaFile), or set TTP_TLS_CERT, TTP_TLS_KEY and TTP_TLS_CA, or pass enable_tls=False"
        )


def parse(text: str) -> dict[str, str]:
    """Parse ``tls_info`` to a dict.

    Raises:
        ConfigError: a part does not begin with a known key.
    """
    found: dict[str, str] = {}
    for part in text.split(";"):
        key, colon, value = part.partition(":")
        if not part.strip():
            continue
        if not colon or key.strip() not in KEYS:
            raise ConfigError(f"tls_info: {part.strip()!r} is not 'key: value' with one of the keys {', '.join(KEYS)}")
        found[key.strip()] = value.strip()
    return found


def _settings(given: dict[str, str], run_dir: Path, decrypt: Decrypt | None) -> dict[str, str]:
    missing = [key for key in ("tlsCert", "tlsPk", "tlsCaFile") if not given.get(key)]
    if missing:
        raise ConfigError(f"tls_info lacks {', '.join(missing)}")
    settings = {"TTP_TLS_CERT": given["tlsCert"], "TTP_TLS_KEY": given["tlsPk"]}
    private = prepare_run_dir(run_dir)
    settings["TTP_TLS_CA"] = _one(given, "tlsCaPath", "tlsCaFile", private / "authorities.pem")
    if given.get("tlsCrlFile"):
        settings["TTP_TLS_CRL"] = _one(given, "tlsCrlPath", "tlsCrlFile", private / "revoked.pem")
    if given.get("tlsPkPwd"):
        settings["TTP_TLS_KEY_PASSWORD"] = str(_password(Path(given["tlsPkPwd"]), private, decrypt))
    return settings


def _one(given: dict[str, str], folder: str, files: str, bundle: Path) -> str:
    """Return the path of the named file, or of a new file ``bundle`` with the contents of several named files."""
    where = Path(given.get(folder) or ".")
    named = [where / name.strip() for name in given[files].split(",") if name.strip()]
    return str(named[0] if len(named) == 1 else _keep(bundle, "\n".join(_text(path) for path in named)))


def _password(path: Path, private: Path, decrypt: Decrypt | None) -> Path:
    """Return the path of the file with the password, which is a decrypted copy if there is a decrypt handler."""
    if decrypt is None:
        return path
    with ToldAs(ConfigError, f"the decrypt handler cannot read tlsPkPwd={path}", Exception):
        return _keep(private / "key-password", decrypt(_text(path).strip()))


def _text(path: Path) -> str:
    with ToldAs(ConfigError, f"tls_info: {path} cannot be read", OSError, UnicodeDecodeError):
        return path.read_text()


def _keep(path: Path, text: str) -> Path:
    replace_file(path, text.encode(), mode=0o600)
    return path


def run_dir_of(port: int) -> Path:
    """Return the run directory of the job on this port."""
    from dataclasses import replace

    return replace(Config.from_env(), port=port).resolved_run_dir()
