"""Without ``TTP_PORT`` a program trains as usual; ``restore()`` restores."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def wrap(place: Any, **given: Any) -> None:
    model = torch.nn.Linear(2, 2)
    ttp.wrap_optimizer(torch.optim.SGD(model.parameters()), **{"model": model, "save_dir": place, **given})


def test_a_static_method_stays_one() -> None:
    class Trainer:
        @ttp.ttp_to_persist
        @staticmethod
        def doubled(count: int) -> int:
            return 2 * count

    assert [Trainer.doubled(1), Trainer().doubled(2)] == [2, 4]


def test_a_process_may_train_one_thing_after_another(tmp_path: Path) -> None:
    @ttp.ttp_to_persist
    def train(name: str) -> int:
        wrap(tmp_path / name)
        return ttp.restore()

    assert [train(name) for name in ("first", "second")] == [0, 0]


def test_what_was_wrapped_before_train_stays(tmp_path: Path) -> None:
    wrap(tmp_path)

    @ttp.ttp_to_persist
    def train() -> int:
        return ttp.restore()

    assert [train(), train()] == [0, 0]


def test_misuse_is_raised() -> None:
    with pytest.raises(ttp.UsageError, match="call wrap_optimizer"):
        ttp.ttp_to_persist(ttp.restore)()


def test_the_last_of_several_calls_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Folds of a cross validation, or the tests of a project, in one process and without the decorator."""
    for name in ("first", "second"):
        wrap(tmp_path / name)
        assert ttp.restore() == 0
        assert session.current().save_dir == tmp_path / name
    assert [record.levelname for record in caplog.records if "called twice" in record.message] == ["WARNING"]


def test_a_later_call_reads_the_environment_as_it_is_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(tmp_path)
    monkeypatch.setenv("TTP_SAVE_DIR", str(tmp_path / "other"))
    wrap(tmp_path)
    assert session.current().save_dir == tmp_path / "other"
    monkeypatch.setenv("TTP_PORT", "none")
    with pytest.raises(ttp.ConfigError, match="TTP_PORT='none' is not valid"):
        wrap(tmp_path)


@pytest.mark.parametrize("model", ["model", [torch.nn.Linear(2, 2)], torch.nn.Linear], ids=["text", "list", "class"])
def test_a_model_that_is_no_module_is_refused(model: object, tmp_path: Path) -> None:
    with pytest.raises(ttp.UsageError, match=r"needs model=.* is no Module"):
        wrap(tmp_path, model=model)


class AnyPath(os.PathLike[Any]):
    def __init__(self, path: str | bytes) -> None:
        self._path = path

    def __fspath__(self) -> Any:
        return self._path


def test_a_path_need_not_be_one_of_pathlib(tmp_path: Path) -> None:
    wrap(AnyPath(str(tmp_path)))
    assert session.current().save_dir == tmp_path


@pytest.mark.parametrize("place", [None, 5, b"checkpoints", AnyPath(b"checkpoints")])
def test_a_directory_that_is_no_path_is_refused(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a directory of that name, in which a rank that leaves with 64 would say why."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TTP_PORT", "23456")
    with pytest.raises(SystemExit):
        ttp.ttp_to_persist(wrap)(place)
    assert not list(tmp_path.iterdir())


def test_no_directory_is_needed_where_the_environment_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_SAVE_DIR", str(tmp_path))
    wrap(None)
    assert session.current().save_dir == tmp_path


@pytest.mark.parametrize("name", ["layout", "shard_of", "scaler", "buddy"])
def test_an_argument_of_a_wrong_kind_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ttp.UsageError, match=rf"wrap_optimizer\({name}=...\) takes a .*, but got a str"):
        wrap(tmp_path, **{name: "text"})


@pytest.mark.parametrize(
    ("given", "todo"),
    [("checkpoints", "$"), (classmethod(lambda cls: None), ": write @classmethod above "), (torch.nn.Linear, "$")],
)
def test_what_is_no_function_is_not_decorated(given: object, todo: str) -> None:
    decorate: Any = ttp.ttp_to_persist
    with pytest.raises(ttp.UsageError, match=f"decorates a function, and .* is not one{todo}"):
        decorate(given)


@pytest.mark.parametrize("named", ["~/ck", "link/../ck", "ck"])
def test_it_looks_where_the_job_has_saved(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "inner")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    wrap(named)
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
