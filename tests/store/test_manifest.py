"""Manifests come back as they were written; damaged and malformed ones are refused with the reason."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Piece
from ttp.errors import CheckpointError
from ttp.store.digest import digest_bytes
from ttp.store.encoding import encode
from ttp.store.manifest import MANIFEST, ForeignCheckpointError, Manifest, load_with_digest, manifest_digest, safe_path

DIGEST = digest_bytes(b"")
EXAMPLE = Manifest(
    version=Version(12),
    run_id="job",
    incarnation=1,
    incident="x",
    cause="rank 0 died",
    reason="all at it",
    world_size=2,
    groups={Shard("model"): (Rank(0), Rank(1))},
    framework="torch",
    created_unix_s=1.5,
    pieces=(Piece("a/b", 5, DIGEST, "shard", "model", Rank(1), '{"w":[1,2]}'),),
)

RANKS = st.integers(0, 10**6).map(Rank)
TEXT = st.text(max_size=20)
PARTS = st.text(min_size=1, max_size=8).filter(lambda part: part not in (".", "..") and not set("/\0") & set(part))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3),
    max_leaves=5,
)
PIECES = st.builds(
    Piece,
    file=st.lists(PARTS, min_size=1, max_size=3).map("/".join).filter(safe_path),
    size=st.integers(0, 2**60),
    digest=st.binary().map(digest_bytes),
    kind=TEXT,
    shard=TEXT,
    writer=RANKS,
    table=st.one_of(
        st.just(""),
        JSON.filter(lambda v: v is not None).map(lambda v: json.dumps(v, sort_keys=True, separators=(",", ":"))),
    ),
)
MANIFESTS = st.builds(
    Manifest,
    version=st.integers(0, 2**60).map(Version),
    run_id=TEXT,
    incarnation=st.integers(0, 10**6),
    incident=TEXT,
    cause=st.text(st.characters(), max_size=20),
    reason=TEXT,
    world_size=st.integers(1, 10**6),
    groups=st.dictionaries(TEXT.map(Shard), st.lists(RANKS, max_size=4).map(tuple), max_size=3),
    framework=TEXT,
    created_unix_s=st.floats(0, 1e12),
    pieces=st.lists(PIECES, max_size=3, unique_by=lambda piece: piece.file).map(tuple),
    missing_pages=st.lists(RANKS, max_size=3).map(tuple),
    extra=st.dictionaries(TEXT, JSON, max_size=3),
)


def write(directory: Path, document: Any) -> Path:
    text = document if isinstance(document, str) else json.dumps(document)
    (directory / MANIFEST).write_text(text)
    return directory


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with any content and a correct digest."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return {**rest, "digest": digest_bytes(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())}


def changed(**changes: Any) -> dict[str, Any]:
    return sealed({**json.loads(EXAMPLE.to_json()), **changes})


def without(name: str) -> dict[str, Any]:
    document = json.loads(EXAMPLE.to_json())
    del document[name]
    return sealed(document)


def with_piece(**changes: Any) -> dict[str, Any]:
    document = json.loads(EXAMPLE.to_json())
    document["pieces"][0].update(changes)
    return sealed(document)


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(MANIFESTS)
def test_what_is_read_is_what_was_written(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path, manifest.to_json())
    assert Manifest.load(tmp_path) == manifest


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    write(tmp_path, EXAMPLE.to_json())
    assert load_with_digest(tmp_path) == (EXAMPLE, manifest_digest(tmp_path))
    assert manifest_digest(tmp_path) == digest_bytes((tmp_path / MANIFEST).read_bytes())


def test_others_can_read_what_the_page_of_the_format_describes(tmp_path: Path) -> None:
    """docs/checkpoint-format.md, "Verified" and "Never unpickled"."""
    write(tmp_path, EXAMPLE.to_json())
    other = json.loads((tmp_path / MANIFEST).read_text())
    seal = other.pop("digest")
    text = json.dumps(other, sort_keys=True, separators=(",", ":"))
    assert seal == f"xxh3_128:{xxhash.xxh3_128_hexdigest(text.encode())}"
    state = {"version": 31, "scheduler": {"last_epoch": 31, "rates": [0.5, None]}}
    data = encode(state)
    assert (data[:4], data[4:12]) == (b"ttp\x01", xxhash.xxh3_64_digest(data[12:]))
    assert msgpack.unpackb(data[12:], strict_map_key=False) == state


def test_the_size_is_that_of_all_pieces() -> None:
    more = replace(EXAMPLE, pieces=(*EXAMPLE.pieces, replace(EXAMPLE.pieces[0], file="c", size=7)))
    assert more.size == 12


@pytest.mark.parametrize("table", ["{", "NaN", "[Infinity]"])
def test_a_table_that_is_no_json_is_refused(table: str) -> None:
    bad = replace(EXAMPLE, pieces=(replace(EXAMPLE.pieces[0], table=table),))
    with pytest.raises(CheckpointError, match="manifest of version 12 cannot be written"):
        bad.to_json()


BAD = {
    "no json": ("{", CheckpointError, "is damaged"),
    "nothing": ("", CheckpointError, "is damaged"),
    "zeros, as a crash of the machine leaves": ("\0" * 500, CheckpointError, "is damaged"),
    "not utf-8": ("\udcff", CheckpointError, "is damaged"),
    "deep": ("[" * 100_000, CheckpointError, "is damaged"),
    "another program's": ('{"name": "app"}', ForeignCheckpointError, "not written by ttp"),
    "a list": ("[]", ForeignCheckpointError, "not written by ttp"),
    "newer": (
        changed(format_version=2, ttp_version="9.1", pieces="another thing"),
        CheckpointError,
        r"has format 2, written by ttp 9.1; this is ttp .* reads up to format 1: upgrade ttp",
    ),
    "newer, by a flipped bit": (
        json.dumps(changed()).replace('"format_version": 1', '"format_version": 3'),
        CheckpointError,
        "has format 3, written by ttp .*: upgrade ttp, unless it is damaged: it does not have the digest",
    ),
    "no digest": ({**without("digest"), "digest": None}, CheckpointError, "damaged: it does not have the digest"),
    "no version": (without("version"), CheckpointError, "damaged: KeyError: 'version'"),
    "no pieces": (without("pieces"), CheckpointError, "damaged: KeyError: 'pieces'"),
    "version a text": (changed(version="12"), CheckpointError, "version is '12', not a whole number"),
    "version true": (changed(version=True), CheckpointError, "version is True, not a whole number"),
    "version negative": (changed(version=-1), CheckpointError, "version is -1, less than 0"),
    "time too large": (changed(created_unix_s=10**400), CheckpointError, "too large"),
    "cause a number": (changed(cause=1), CheckpointError, "cause is 1, not a text"),
    "groups a list": (changed(groups=[1]), CheckpointError, "damaged"),
    "ranks a text": (changed(groups={"a": "01"}), CheckpointError, "not a list"),
    "pieces a map": (changed(pieces={}), CheckpointError, "pieces is {}, not a list"),
    "a piece a text": (changed(pieces=["a"]), CheckpointError, "damaged"),
    "a piece twice": (changed(pieces=changed()["pieces"] * 2), CheckpointError, "listed twice"),
    "outside": (with_piece(file="../../etc/passwd"), CheckpointError, "not a path inside"),
    "absolute": (with_piece(file="/etc/passwd"), CheckpointError, "not a path inside"),
    "itself": (with_piece(file=MANIFEST), CheckpointError, "not a path inside"),
    "another digest": (with_piece(digest="md5:00"), CheckpointError, "'md5:00' is not a digest"),
    "a negative size": (with_piece(size=-1), CheckpointError, "size is -1, less than 0"),
}


@pytest.mark.parametrize(("document", "error", "text"), BAD.values(), ids=BAD.keys())
def test_bad_manifests_say_what_is_wrong(
    tmp_path: Path, document: Any, error: type[CheckpointError], text: str
) -> None:
    if isinstance(document, str):
        (tmp_path / MANIFEST).write_bytes(document.encode("utf-8", "surrogateescape"))
    else:
        write(tmp_path, document)
    with pytest.raises(error, match=text) as caught:
        Manifest.load(tmp_path)
    assert str(tmp_path / MANIFEST) in str(caught.value)
    assert isinstance(caught.value, ForeignCheckpointError) == (error is ForeignCheckpointError)


def test_an_absent_manifest_is_somebody_elses_directory(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ForeignCheckpointError, match=r"has no manifest\.json"):
            Manifest.load(path)
        with pytest.raises(ForeignCheckpointError, match=r"has no manifest\.json"):
            manifest_digest(path)


def test_a_manifest_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        Manifest.load(tmp_path)


def test_an_endless_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    with pytest.raises(ForeignCheckpointError, match="longer than"):
        Manifest.load(tmp_path)


def test_a_manifest_that_is_cut_or_has_a_flipped_bit_is_damaged_or_says_the_same(tmp_path: Path) -> None:
    """Only white space may differ."""
    whole = EXAMPLE.to_json().encode()
    for at in range(len(whole)):
        flipped = whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        for damaged in (flipped, whole[:at]):
            (tmp_path / MANIFEST).write_bytes(damaged)
            with contextlib.suppress(CheckpointError):
                assert Manifest.load(tmp_path) == EXAMPLE


def test_the_cost_of_writing_does_not_grow_with_each_tensor_of_a_table() -> None:
    """The commit waits for it, and an encoder in Python takes long for the tables of ten thousand pieces."""

    def calls(tensors: int) -> int:
        table = json.dumps({f"weight {i}": [0, i, {"dtype": "float32"}] for i in range(tensors)})
        manifest = replace(
            EXAMPLE, pieces=tuple(replace(EXAMPLE.pieces[0], file=f"{i}", table=table) for i in range(9))
        )
        found = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal found
            found += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            text = manifest.to_json()
        finally:
            sys.setprofile(before)
        assert text.count("\n") < 9 + 30, "a line for each piece, which people read"
        return found

    assert calls(tensors=100) == calls(tensors=10)
