"""A rank that was released to go on in its process, on its way out of the loop and into it again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.config import Config
from ttp.launch.again import Again
from ttp.processor.continuing import Continuing
from ttp.processor.gate.gate import Gate, Halted
from ttp.processor.processor import Processor


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Continuing]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    found = Continuing(Config(run_dir=str(tmp_path)), None, None)
    yield found
    found.over()


def test_it_is_on_its_way_until_an_update_has_passed_the_gate(goes_on: Continuing, tmp_path: Path) -> None:
    """Its training thread may come to the old gate only after it was released."""
    old, new = Gate(), Gate()
    old.close()
    of_old: Any = SimpleNamespace(goes_on=goes_on, copying=None, gate=old, source=None)
    goes_on.released(of_old, "incident")
    with pytest.raises(Halted):
        Processor.begin_update(of_old)
    goes_on.over()  # its training thread was about to enter the barrier before the update
    assert goes_on.runs and os.getpid() in Again(tmp_path).marks()
    goes_on.releasing = False  # it is out of train()
    of_new: Any = SimpleNamespace(goes_on=goes_on, copying=None, gate=new)
    Processor.begin_update(of_new)
    assert not goes_on.runs and not Again(tmp_path).marks() and new.updating
