"""A good manifest, and malformed ones."""

from __future__ import annotations

import json
from typing import Any

from tests.store import test_manifest

TABLE = {
    "format": 1,
    "items": [
        {"path": ["model", "w"], "at": [0, 500], "dtype": "float32", "shape": [3, 4]},
        {
            "path": ["model", "c"],
            "at": [500, 90],
            "dtype": "int64",
            "shape": [4],
            "chunk": [[0], [2]],
            "device": "x",
        },
        {"path": ["optim", "param_groups", 0, "lr"], "at": [590, 60], "int_keys": [1]},
    ],
    "left_out": ["a"],
}
LOCAL = {"ranks": [0, 1], "provisional": [1], "missing": {"2": "gone"}}


def _good() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(test_manifest.EXAMPLE.to_json())
    piece = document["pieces"][0]
    document["pieces"] += [
        {**piece, "file": "__0_0.distcp", "contents": TABLE},
        {**piece, "file": "local", "kind": "rank_local", "contents": LOCAL},
    ]
    return {**document, "extra": {"disputed": ["model"]}, "missing_pages": [3]}


GOOD = _good()


def sealed(document: Any) -> bytes:
    """Return a manifest with a correct digest and any content."""
    return json.dumps(test_manifest.sealed(document) if isinstance(document, dict) else document).encode()
