"""Checkpoints of torch with changed tables and pieces and matching digests: refused, or loaded as their tables say.

Digests find accidental damage before any of this is read. These tests show that nothing bad follows when they do not.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from tests.adapters.torch.checkpoints import Net, adamw, digest, train, write_checkpoint
from tests.fuzz.files import changed_bytes, changed_json
from tests.fuzz.places import place
from tests.fuzz.profile import at_most, fuzz
from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.image import decode, read_local_state
from ttp.adapters.torch.restoring.reader import load_chunks, read_values
from ttp.adapters.torch.restoring.restore import restore_into
from ttp.adapters.torch.saving.checkpoint import Chunk
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.saving.piece_index import items_of, left_out_of
from ttp.core.layout import Rank
from ttp.core.messages import Piece
from ttp.errors import CheckpointError
from ttp.processor.local_state.local_piece import LOCAL_KIND, UpdateChanges, not_kept, why_lost
from ttp.processor.local_state.page_reader import Page, read_page
from ttp.processor.local_state.pages import PageWriter
from ttp.store.encoding import encode
from ttp.store.manifest import Manifest
from ttp.store.verify import verify_checkpoint


class Job:
    """A model with optimizer, schedule and everything else that a job registers."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.optimizer = adamw(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def digest(self) -> str:
        return digest(self.model.state_dict(), self.optimizer)

    def restore(self, path: Path, manifest: Manifest) -> bool:
        """Return whether the checkpoint was loaded. If it was not, check that nothing was changed."""
        before = self.digest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on odd pickles
            try:
                restore_into(path, manifest, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
            except CheckpointError as problem:
                if not str(problem).startswith(("model.", "optim.state.")):  # tensors are read into place
                    assert self.digest() == before
                return False
        return True


@cache
def good() -> tuple[Path, Manifest]:
    job = Job()
    train(job.model, job.optimizer, job.scheduler, 3)
    path = place("torch") / "good"
    state = JobState(3, scheduler=job.scheduler.state_dict())
    return path, write_checkpoint(path, job.model, job.optimizer, state)


def shard(manifest: Manifest) -> Piece:
    return next(piece for piece in manifest.pieces if piece.kind == "shard")


def with_table(table: str) -> Manifest:
    manifest = good()[1]
    pieces = tuple(replace(p, table=table) if p.kind == "shard" else p for p in manifest.pieces)
    return replace(manifest, pieces=pieces)


def test_the_good_one_is_loaded() -> None:
    assert Job().restore(*good())


@fuzz(st.data(), examples=60, campaign=30)
def test_a_table_that_says_something_else(data: Any) -> None:
    path, manifest = good()
    table = data.draw(changed_json(json.loads(shard(manifest).table)))
    Job().restore(path, with_table(json.dumps(table)))


@fuzz(st.data(), examples=40, campaign=30)
def test_pieces_of_changed_bytes(data: Any) -> None:
    path, manifest = good()
    hurt = place("torch") / "hurt"
    shutil.rmtree(hurt, ignore_errors=True)
    shutil.copytree(path, hurt)
    piece = data.draw(st.sampled_from([p for p in manifest.pieces if p.kind != "metadata"]))
    (hurt / piece.file).write_bytes(data.draw(changed_bytes((path / piece.file).read_bytes())))
    if (hurt / piece.file).read_bytes() != (path / piece.file).read_bytes():
        assert piece.file in " ".join(verify_checkpoint(hurt))  # so nobody gets further; but if:
    Job().restore(hurt, manifest)


TABLES: dict[str, Any] = {
    "a tensor larger than its bytes": {"path": ["model", "x"], "at": [0, 500], "dtype": "float32", "shape": [10**12]},
    "a million dimensions": {"path": ["model", "x"], "at": [0, 500], "dtype": "float32", "shape": [0] * 10**5},
    "a list with a billion places": {"path": ["optim", "param_groups", 10**9, "lr"], "at": [0, 500]},
    "a place before the first": {"path": ["optim", "param_groups", -1, "lr"], "at": [0, 500]},
    "a piece that ends far away": {"path": ["ttp", "x"], "at": [0, 10**15]},
    "a piece that begins far away": {"path": ["ttp", "x"], "at": [2**61, 5]},
    "a name of nothing": {"path": [], "at": [0, 500]},
    "a model without parameters": {"path": ["model"], "at": [0, 500]},
    "a state without a parameter": {"path": ["optim", "state", "x"], "at": [0, 500]},
    "a value that holds others": {"path": ["optim"], "at": [0, 500]},
    "a number that is none": {"path": ["optim", "state", "a", "b"], "at": [0, 5], "int_keys": [2]},
    "infinity": {"path": ["model", "x"], "at": [float("inf"), 5]},
    "a dtype that is none": {"path": ["model", "x"], "at": [0, 5], "dtype": "load", "shape": [1]},
    "lists in lists": json.loads("[" * 500 + "]" * 500),
}


@pytest.mark.parametrize("what", list(TABLES))
def test_a_table_that_promises_too_much(what: str) -> None:
    path, manifest = good()
    table = json.loads(shard(manifest).table)
    table["items"].append(TABLES[what])
    with at_most(64):
        assert not Job().restore(path, with_table(json.dumps(table)))


KEYS = st.sampled_from(["format", "items", "left_out", "path", "at", "ranks", "missing", "0"])
JSON = st.recursive(
    st.none() | st.integers(0, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)


@fuzz(JSON, examples=50)
def test_any_json_as_a_table(table: Any) -> None:
    pieces = [Piece("f", 1, "d", kind, "", Rank(0), json.dumps(table)) for kind in ("shard", LOCAL_KIND)]
    for ask in (lambda: items_of(pieces), lambda: left_out_of(pieces)):
        try:
            ask()
        except CheckpointError as problem:
            assert "f" in str(problem)
    assert len(not_kept(pieces, 2)) <= 2 and why_lost(pieces, 0)
    changes = UpdateChanges(pieces)
    for name in changes.names:
        changes.lender(name, 0, (0, 1))


def test_a_reason_that_is_empty_is_none() -> None:
    assert "was left" in why_lost([Piece("f", 1, "d", LOCAL_KIND, "", Rank(0), '{"missing": {"0": ""}}')], 0)


def test_values_and_tensors_are_read_from_files_only(tmp_path: Path) -> None:
    path, manifest = good()
    shutil.copytree(path, tmp_path / "c")
    file = tmp_path / "c" / shard(manifest).file
    file.unlink()
    items = items_of(manifest.pieces)
    makers: list[Callable[[], object]] = [lambda: file.symlink_to("/dev/zero"), file.mkdir]
    for make in makers:
        make()
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_values(tmp_path / "c", items[:1])
        file.rmdir() if file.is_dir() else file.unlink()
    chunk = Chunk(torch.zeros(8, 4), (8, 4), (0, 0))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_chunks(tmp_path / "c", items, [(("model", "first.weight"), [chunk])])


# ---------------------------------------------------------------------------------------------------- rank-local state


@cache
def image() -> bytes:
    """Return the content of a rank's page."""
    pages = place("torch") / "pages"
    writer = PageWriter(pages, 0, incarnation=1)
    LocalCapture(Net(), ExtraState({"cursor": Cursor()}), page=writer).capture(3, final=True)
    found = read_page(pages, 0, 3, 1)
    writer.close()
    assert isinstance(found, Page), found
    return found.data


def put_back(data: bytes) -> bool:
    """Return whether the page was accepted. This process's random streams are restored afterwards."""
    python, torches = random.getstate(), torch.get_rng_state()
    try:
        LocalCapture(Net(), ExtraState({"cursor": Cursor()})).restore(decode(data))
    except CheckpointError:
        return False
    finally:
        random.setstate(python)
        torch.set_rng_state(torches)
    return True


def test_the_good_one_is_put_back() -> None:
    assert put_back(image())


@fuzz(st.data(), examples=60, campaign=30)
def test_rank_local_state_of_changed_bytes(data: Any) -> None:
    put_back(data.draw(changed_bytes(image())))


@fuzz(st.binary(max_size=60), examples=40, campaign=50)
def test_noise_is_no_rank_local_state(data: bytes) -> None:
    assert not put_back(data)
    assert not put_back(image()[:12] + data)


IMAGES: list[Any] = [5, [], {}, {0: "text"}, {0: [1]}, {0: b""}, {"0": b"x"}, {0: {}}]


@pytest.mark.parametrize("images", IMAGES, ids=range(len(IMAGES)))
def test_a_piece_that_is_not_what_it_says(images: Any, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(encode(images))
    piece = Piece("local", 1, "d", LOCAL_KIND, "", Rank(0), json.dumps({"ranks": [0]}))
    try:
        assert read_local_state(tmp_path, [piece], 0) is None
    except CheckpointError as problem:
        assert "rank-local state cannot be read" in str(problem)


JOBS: list[dict[str, Any]] = [
    {"version": "3"},
    {"version": 3, "scheduler": [1]},
    {"version": 3, "extra": None},
    {"version": 3, "ddp_buckets": 5},
    {"version": 3, "scaler_pending": "no"},
]


@pytest.mark.parametrize("job", JOBS, ids=range(len(JOBS)))
def test_a_job_state_that_is_not_one(job: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="job state"):
        JobState.decode(encode(job))


class Cursor:
    def state_dict(self) -> dict[str, Any]:
        return {"at": 5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept any state."""
