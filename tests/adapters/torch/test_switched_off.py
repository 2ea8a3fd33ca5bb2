"""Without ``TTP_PORT`` a program trains as usual; ``restore()`` restores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ttp
from ttp import session


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TTP_PORT", raising=False)
    session.reset()
    yield
    session.reset()


def wrap(place: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ttp.wrap_optimizer(torch.optim.SGD(model.parameters()), model=model, save_dir=place)


def test_a_process_may_train_one_thing_after_another(tmp_path: Path) -> None:
    @ttp.ttp_to_persist
    def train(name: str) -> int:
        wrap(tmp_path / name)
        return ttp.restore()

    assert [train(name) for name in ("first", "second")] == [0, 0]


def test_what_was_wrapped_before_train_stays_and_misuse_is_raised(tmp_path: Path) -> None:
    wrap(tmp_path)

    @ttp.ttp_to_persist
    def train() -> int:
        return ttp.restore()

    assert [train(), train()] == [0, 0]
    with pytest.raises(ttp.UsageError, match="called twice"):
        ttp.ttp_to_persist(wrap)(tmp_path)
