"""What a rank does with what it was told before it joins the job, and in the function that joins it."""

from __future__ import annotations

from typing import Any

import pytest

import ttp.compat.mindio.framework_ttp as tft
from tests.compat.test_names import Told, fresh  # noqa: F401 - a fixture that is used in each test
from ttp.compat.mindio import rank
from ttp.errors import ConfigError
from ttp.mindio.handlers import Ailment


@pytest.mark.parametrize(("words", "code"), [(" 507054", "507054"), ("  12aB", "12aB"), (": 1", "")])
def test_the_processor_may_be_started_in_the_training_function(
    monkeypatch: pytest.MonkeyPatch, words: str, code: str
) -> None:
    """As the guide's ``train`` does. The repair is the same, and the code of the device is reported."""
    told: list[Told] = []

    def train(state: str) -> list[Any]:
        if not told:
            told.append(Told(monkeypatch))
            for name in ("wait_next_action", "wait_repair_action"):
                monkeypatch.setattr(told[0], name, lambda: None, raising=False)
            raise RuntimeError(f"UCE ERROR, Device error type{words}")
        return list(rank.THIS.handlers.args)

    assert tft.tft_exception_handler(train)("state") == ["state"]
    assert (told[0].reports, told[0].codes, told[0].left) == ([Ailment.MEMORY], [code], [False])


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 180), ("soon", 180), ("nan", 180), ("7", 30), ("60", 60), ("inf", 1800)]
)
def test_a_time_limit_that_is_no_number_is_the_default(
    monkeypatch: pytest.MonkeyPatch, text: str, seconds: float
) -> None:
    monkeypatch.setenv("TTP_NORMAL_ACTION_TIME_LIMIT", text)
    assert rank.seconds("TTP_NORMAL_ACTION_TIME_LIMIT", 180, 30, 1800) == seconds


def test_replicas_that_the_job_refuses_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a processor that is started again would declare them."""

    def refuse(sets: Any) -> None:
        raise ConfigError("outside 0..1")

    monkeypatch.setattr(Told(monkeypatch), "set_replicas", refuse, raising=False)
    with pytest.raises(ConfigError, match="outside"):
        tft.tft_set_optimizer_replica(0, [{"rank_list": [0, 7], "replica_cnt": 2}])
    assert not rank.THIS._sets
