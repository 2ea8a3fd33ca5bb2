"""What the controller looks at again and again: its launcher, and the ring that the ranks of its host have written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import Mock

import pytest

from ttp.controller import __main__ as own


@pytest.mark.parametrize(("watch", "looks_by"), [("_watch_owner", "_lives"), ("_watch_ring", "read_ring")])
def test_no_error_ends_a_watch_of_the_controller(
    watch: str, looks_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def watched() -> None:
        again, driver = asyncio.Event(), Mock(**{"machine.job.live": {}})
        problems: list[Exception | None] = [ZeroDivisionError("any"), *[OSError("out of descriptors")] * 3]
        problems += [None] * (watch == "_watch_ring")  # which looks once before

        def look(_: object) -> None:
            if not problems:
                again.set()
            elif (problem := problems.pop()) is not None:
                raise problem

        monkeypatch.setattr(own, looks_by, look)
        task = asyncio.create_task(getattr(own, watch)(driver, *{"_watch_owner": ([1], 60.0)}.get(watch, (tmp_path,))))
        await asyncio.wait([task, asyncio.create_task(again.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert task.cancel(), "it goes on"

    monkeypatch.setattr(own, "OWNER_CHECK_S", 0.0)
    monkeypatch.setattr(own, "RING_CHECK_S", 0.0)
    asyncio.run(watched())
    assert caplog.text.count("an error in a watch of this controller") == 2, "each error once"
