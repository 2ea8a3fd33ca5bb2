"""What torch tells of the waits of a host for its device, and what the driver refuses. There is no device here."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.adapters.torch.device import stream_hold
from ttp.adapters.torch.device.stream_hold import check, noticing


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the debug modes that torch is set to, in order; it begins with that of the program."""
    seen: list[Any] = ["the program's"]
    library = SimpleNamespace(get_sync_debug_mode=lambda: seen[-1], set_sync_debug_mode=seen.append)
    monkeypatch.setattr(stream_hold, "_cuda", library)
    return seen


def test_a_wait_of_the_optimizer_is_noted_with_its_place(modes: list[Any]) -> None:
    """It is no warning to the user, who has not asked for it. Other warnings are the user's."""
    found: list[str] = []
    with pytest.warns(UserWarning, match="of the program") as told, noticing(found):
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("of the program", UserWarning, stacklevel=1)
    assert len(told) == len(found) == 1 and found[0].partition(":")[0] == __file__
    assert modes == ["the program's", "warn", "the program's"]


def test_an_update_that_fails_leaves_no_mode_behind(modes: list[Any]) -> None:
    with pytest.raises(ValueError, match="of the optimizer"), noticing([]):
        raise ValueError("of the optimizer")
    assert modes[-1] == "the program's"


def test_what_the_driver_refuses_is_told_with_its_number() -> None:
    check(0, "it does not")
    with pytest.raises(RuntimeError, match="it does not: error 801"):
        check(801, "it does not")
