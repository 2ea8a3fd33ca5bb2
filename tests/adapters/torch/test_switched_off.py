"""Without ``TTP_PORT`` a program trains as usual; ``restore()`` restores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ttp
from ttp import session
from ttp.store.writable import as_path


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TTP_PORT", raising=False)
    session.reset()
    yield
    session.reset()


def wrap(place: Path | str) -> None:
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


@pytest.mark.parametrize("named", ["~/ck", "link/../ck", "ck"])
def test_it_looks_where_the_job_has_saved(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "inner")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model = torch.nn.Linear(2, 2)
    ttp.wrap_optimizer(torch.optim.SGD(model.parameters()), model=model, save_dir=named)
    assert session.current().save_dir == as_path(named)
    place = tmp_path / ("elsewhere" if "link" in named else "") / "ck"
    assert as_path(named).resolve() == place.resolve()


@pytest.mark.parametrize("named", ["s3://bucket/ck", "~nobody-of-this-name/ck", "$NOWHERE/ck"])
def test_a_directory_that_a_job_would_refuse_does_not_keep_it_from_training(named: str) -> None:
    wrap(named)
    with pytest.raises(ttp.ConfigError):
        as_path(named)


def test_an_asynchronous_train_is_called_as_without_ttp() -> None:
    @ttp.ttp_to_persist
    async def train() -> int:
        return 3

    assert asyncio.run(train()) == 3
