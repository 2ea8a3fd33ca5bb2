"""The rank-local state of a host in a checkpoint: which pages are accepted, and the message for a rank that gets none
back.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.torch.checkpoints import Net
from tests.adapters.torch.stub_processor import INCARNATION, Stateful, StubProcessor, join, registered, save
from tests.damage import flip
from ttp.adapters.torch.local_state.image import read_local_state
from ttp.core.copy_messages import Keep
from ttp.core.layout import Layout, Rank, Version
from ttp.processor.local_state.local_piece import collect, why_lost, write_local_piece
from ttp.processor.local_state.mirror import KeptPages
from ttp.processor.local_state.pages import PageWriter, page_name

SOUND, BAD = Rank(0), Rank(1)


def write(pages: Path, rank: Rank, version: int = 3) -> None:
    writer = PageWriter(pages, rank, incarnation=INCARNATION)
    writer.write(version, True, [b"state of rank %d" % rank])
    writer.close()


def garbled(path: Path) -> None:
    flip(path, path.read_bytes().index(b"state of rank"))


def stale(path: Path) -> None:
    write(path.parent, BAD, version=2)


@pytest.mark.parametrize(
    ("damage", "why"),
    [(garbled, "digest does not match"), (stale, "versions held: 2"), (Path.unlink, "there is no page")],
)
def test_a_page_that_cannot_be_believed_is_left_out_and_said(
    tmp_path: Path, damage: Callable[[Path], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    pages = tmp_path / "pages"
    for rank in (SOUND, BAD):
        write(pages, rank)
    damage(pages / page_name(BAD))
    found = collect(pages, (SOUND, BAD), 3, INCARNATION)
    assert found.data == {SOUND: b"state of rank 0"} and why in found.missing[BAD]
    assert f"the rank-local state of rank {BAD} cannot be saved" in caplog.text
    piece = write_local_piece(tmp_path, "local", found, SOUND)
    assert json.loads(piece.table)["ranks"] == [SOUND] and why in json.loads(piece.table)["missing"][str(BAD)]
    assert read_local_state(tmp_path, [piece], BAD) is None
    assert why in why_lost([piece], BAD) and "no rank of its host was left" in why_lost([piece], 5)


def adapter(extra: Any = None) -> Any:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return registered(model, optimizer, extra_state=extra)


def checkpoint(tmp_path: Path, pages: tuple[Rank, ...], missing: tuple[Rank, ...], extra: Any = None) -> Path:
    """Return a checkpoint of version 0 that rank 0 of two wrote. The page of the other rank is there or missing."""
    processor, writer = StubProcessor(tmp_path / "checkpoints", layout=Layout.data_parallel(2)), adapter(extra)
    join(writer, processor, tmp_path / "pages")
    torch.rand(3)
    writer.capture.capture(0, final=True)
    path = save(writer, processor, 0, pages=pages, missing=missing)
    writer.source.close()
    return path


def said_by_ttp(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("asked", "why"), [(True, "there is no page"), (False, "no rank of its host was left")])
def test_a_rank_that_gets_nothing_back_is_told_why(
    tmp_path: Path, asked: bool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    pages, missing = ((SOUND, BAD), ()) if asked else ((SOUND,), (BAD,))
    path = checkpoint(tmp_path, pages, missing)
    caplog.clear()
    adapter().load(path, BAD, 2, protected=False)
    (said,) = said_by_ttp(caplog)
    assert f"no rank-local state of rank {BAD} was saved (" in said and why in said and "derived from its seed" in said
    caplog.clear()
    adapter().load(path, SOUND, 2, protected=False)
    assert said_by_ttp(caplog) == []


def test_what_another_host_has_kept_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = adapter()
    lost.capture.open_page(PageWriter(tmp_path / "lost host", BAD, incarnation=INCARNATION))
    torch.manual_seed(77)
    lost.capture.capture(0, final=True)
    expected = torch.rand(3)
    data = collect(tmp_path / "lost host", (BAD,), 0, INCARNATION).data[BAD]
    kept = KeptPages(tmp_path / "pages", SOUND, INCARNATION)
    assert kept.store(Keep(SOUND, 1, BAD, Version(0), True, INCARNATION, data)) == ""
    path = checkpoint(tmp_path, (SOUND, BAD), ())
    caplog.clear()
    adapter().load(path, BAD, 2, protected=False)
    assert torch.equal(torch.rand(3), expected) and said_by_ttp(caplog) == []
    kept.close()


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("extra", [None, {"metrics": Stateful(count=5)}])
def test_a_rank_that_died_in_its_update_is_told_that_its_extra_state_is_behind(
    tmp_path: Path, final: bool, extra: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lost = adapter(extra)
    lost.capture.open_page(PageWriter(tmp_path / "pages", BAD, incarnation=INCARNATION))
    lost.capture.capture(0, final=final)
    path = checkpoint(tmp_path, (SOUND, BAD), (), extra)
    caplog.clear()
    adapter(extra).load(path, BAD, 2, protected=False)
    told = [line for line in said_by_ttp(caplog) if "rank 1 died in the update to version 0" in line]
    assert len(told) == (extra is not None and not final) and all("('metrics')" in line for line in told)
