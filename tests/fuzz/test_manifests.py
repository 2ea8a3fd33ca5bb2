"""Manifests that are damaged or not of ttp: every reader reports what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from tests.fuzz.files import changed_bytes, changed_json, ttp
from tests.fuzz.manifests import GOOD, sealed
from tests.fuzz.places import place
from tests.fuzz.profile import at_most, fuzz
from ttp.errors import CheckpointError
from ttp.store.catalog import scan
from ttp.store.choice import look_back
from ttp.store.manifest import MANIFEST, Manifest
from ttp.store.verify import verify_checkpoint

NAME = "tft_saved_checkpoints-step_12"


def look_at(data: bytes) -> str:
    """Return why a checkpoint with this manifest, and without any piece, is not whole."""
    save_dir, checkpoint = place("manifests"), place(f"manifests/{NAME}")
    (checkpoint / MANIFEST).write_bytes(data)
    try:
        Manifest.load(checkpoint).to_json()
    except CheckpointError as problem:
        assert str(checkpoint) in str(problem)
    (entry,) = scan(save_dir)
    assert entry.problem
    assert verify_checkpoint(checkpoint)
    found = look_back(save_dir)
    assert not found.candidates and found.skipped
    return entry.problem


def test_the_good_one_lacks_its_pieces_only() -> None:
    assert look_at(sealed(GOOD)).startswith("piece a/b is missing; piece __0_0.distcp is missing")


@fuzz(changed_bytes(sealed(GOOD)) | st.binary(max_size=50), examples=50)
def test_changed_bytes(data: bytes) -> None:
    look_at(data)


@fuzz(changed_json(GOOD), examples=100)
def test_nonsense_that_is_sealed(document: Any) -> None:
    if isinstance(document, dict) and document.get("pieces") == []:
        return  # whole, as it has no pieces
    look_at(sealed(document))


@fuzz(changed_json(GOOD), examples=12, campaign=50)
def test_nonsense_on_the_command_line(document: Any) -> None:
    checkpoint = place(f"shown/{NAME}")
    (checkpoint / MANIFEST).write_bytes(sealed(document))
    for command, path in (("inspect", checkpoint), ("verify", checkpoint), ("list", checkpoint.parent)):
        for flags in ((), ("--json",)):
            assert ttp(command, str(path), *flags)[0] in (0, 1)


@pytest.mark.parametrize("depth", [10, 60, 64, 65, 300, 900, 990, 2000, 100_000])
def test_nested_lists(depth: int) -> None:
    text = sealed({**GOOD, "extra": {"deep": "HERE"}}).decode()
    look_at(text.replace('"HERE"', "[" * depth + "]" * depth).encode())


def test_a_gigantic_world_is_not_counted() -> None:
    with at_most(4):
        assert "world_size is 1099511627776, more than" in look_at(sealed({**GOOD, "world_size": 2**40}))


@pytest.mark.parametrize("number", [2**63, 10**4000])
def test_numbers_that_nothing_can_have(number: int) -> None:
    assert "bits" in look_at(sealed({**GOOD, "version": number}))
