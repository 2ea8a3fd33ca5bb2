"""``ttp version``: prints the versions of ttp, its protocol and its formats."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from ttp._version import __version__
from ttp.cli.output import Json, print_json, say

COMPANIONS = ("torch", "grpcio", "protobuf")


def version(json: Json = False) -> None:
    """Print the version of ttp, and the versions that it speaks, writes and works with.

    JSON keys: ttp, protocol (of the wire; ranks and controller must agree on the number before the dot),
    checkpoint_format, python, and the installed torch, grpcio, protobuf (null: not installed).
    """
    from ttp.core.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR
    from ttp.store.manifest import FORMAT_VERSION

    known = {name: _installed(name) for name in COMPANIONS}
    if json:
        print_json(
            {
                "ttp": __version__,
                "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
                "checkpoint_format": FORMAT_VERSION,
                "python": platform.python_version(),
                **known,
            }
        )
        return
    companions = ", ".join(f"{name} {found or 'not installed'}" for name, found in known.items())
    say(f"ttp {__version__} (protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}, checkpoint format {FORMAT_VERSION})")
    say(f"python {platform.python_version()}, {companions}")


def _installed(name: str) -> str | None:
    try:
        return installed(name)
    except PackageNotFoundError:
        return None
