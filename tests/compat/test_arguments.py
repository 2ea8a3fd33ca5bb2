"""Arguments of a wrong type get an error that names them, as numbers that are out of range do."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import pytest

import ttp.compat.mindio.controller_ttp as controller
import ttp.compat.mindio.framework_ttp as tft
from tests.compat.test_names import Told, fresh  # noqa: F401 - a fixture that is used in each test
from ttp.compat.mindio import rank, tls_info
from ttp.errors import ConfigError

PROCESSOR = "rank, world_size, enable_local_copy, enable_tls=True, tls_info='', enable_uce=True, enable_arf=False, "
DOCUMENTED: dict[Callable[..., Any], str] = {
    tft.tft_init_controller: "rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False",
    tft.tft_start_controller: "bind_ip, port, enable_tls=True, tls_info=''",
    tft.tft_init_processor: f"{PROCESSOR}enable_zit=False",
    tft.tft_start_processor: "master_ip, port, local_ip=''",
    tft.tft_start_updating_os: "backup_step=-1",
    tft.tft_end_updating_os: "step",
    tft.tft_set_optimizer_replica: "rank, replica_info",
    tft.tft_set_dp_group_info: "rank, dp_rank_list",
    tft.tft_set_step_args: "args",
    tft.tft_pause_train: "cur_step",
    tft.tft_exception_handler: "func",
    tft.tft_register_save_ckpt_handler: "func, ctx=None",
    tft.tft_register_zit_upgrade_repair_handler: "func, ctx=None",
    tft.tft_register_exception_handler: "fault_pattern, fault_type, fault_handle",
    tft.tft_register_decrypt_handler: "decryptor",
    tft.tft_report_error: "error_type, error_code=''",
    tft.tft_report_load_ckpt_step: "step",
    tft.tft_can_do_uce_repair: "hbm_error_time, start_time=None, end_time=None",
    tft.tft_set_update_start_time: "start_time=None",
    tft.tft_set_update_end_time: "end_time=None",
    tft.set_mindio_export_version: "framework_type",
    controller.tft_register_mindx_callback: "action, func",
    controller.tft_notify_controller_stop_train: "fault_ranks, stop_type='stop', timeout=None",
    controller.tft_notify_controller_on_global_rank: "fault_ranks, time=1",
    controller.tft_notify_controller_prepare_action: "action, fault_ranks=None",
    controller.tft_notify_controller_change_strategy: "strategy, params=''",
}
"""The functions of the original that take arguments, and the names of these, by which programs may give them."""


@pytest.mark.parametrize("function", DOCUMENTED, ids=lambda function: function.__name__)
def test_arguments_have_the_originals_names_and_defaults(function: Callable[..., Any]) -> None:
    empty = inspect.Parameter.empty
    plain = [each.replace(annotation=empty) for each in inspect.signature(function).parameters.values()]
    assert ", ".join(map(str, plain)) == DOCUMENTED[function]


@pytest.mark.parametrize("wrong", ["0", None, 0.0, True, b"0"])
def test_numbers_of_another_type_are_refused_like_numbers_that_are_out_of_range(
    capsys: pytest.CaptureFixture[str], wrong: Any
) -> None:
    """As ``os.environ["RANK"]`` without ``int()``."""
    for rank_of, world in ((wrong, 2), (0, wrong)):
        with pytest.raises(ConfigError, match=r"is not a whole number from"):
            tft.tft_init_controller(rank_of, world, False)
        with pytest.raises(SystemExit) as leaving:
            tft.tft_init_processor(rank_of, world, False)
        assert leaving.value.code == 2 and f"{wrong!r} is not a whole number from" in capsys.readouterr().err
    for takes_a_step in (tft.tft_end_updating_os, tft.tft_pause_train, tft.tft_report_load_ckpt_step):
        with pytest.raises(ConfigError, match=f"{takes_a_step.__name__}: step .* is not a whole number from"):
            takes_a_step(wrong)


def test_numbers_of_numpy_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    told, steps, number = Told(monkeypatch), list[int](), cast("Any", np.int64)
    for name, answer in {"begin_update": lambda: True, "end_update": steps.append, "pause_train": steps.append}.items():
        monkeypatch.setattr(told, name, answer, raising=False)
    tft.tft_init_controller(number(0), number(2), False)
    tft.tft_start_updating_os()
    tft.tft_end_updating_os(number(3))
    tft.tft_pause_train(number(3))
    assert steps == [3, 3] and {type(step) for step in steps} == {int}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda nothing: tft.tft_set_optimizer_replica(0, nothing), "needs a list .*got"),
        (lambda nothing: tft.tft_set_dp_group_info(0, nothing), "must be a list that holds rank 0"),
        (lambda nothing: tft.tft_report_error(2, nothing), "error_code .* is not text of at most 15 characters"),
        (lambda nothing: tft.tft_register_exception_handler(nothing, "RS_UCE", str), "pattern .* is not text"),
        (lambda nothing: tft.tft_register_exception_handler("A", nothing, str), "is not one of RS_NORMAL"),
        (lambda nothing: tft.tft_register_exception_handler("A", "RS_RETRY", nothing), "cannot be called"),
        (lambda _: tft.tft_register_exception_handler("A", "RS_WEATHER", str), "is not one of RS_NORMAL"),
        (tft.tft_register_save_ckpt_handler, "save is not callable"),
        (tft.tft_register_zit_upgrade_repair_handler, "upgrade_repair is not callable"),
        (tft.tft_register_decrypt_handler, "decrypt is not callable"),
        (lambda nothing: tls_info.use(True, nothing, Path(), None), "tls_info .* is not text"),
        (rank.resolve, "is not an address"),
    ],
)
def test_arguments_of_another_type_are_refused_with_their_name(call: Any, said: str) -> None:
    odd: list[Any] = [None, 507054, []]
    for wrong in odd:
        with pytest.raises((ConfigError, TypeError), match=said):
            call(wrong)


def test_the_time_of_an_update_is_that_of_an_event_with_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of torch_npu has a time only if it was made for that. Older releases tell none."""
    made: list[dict[str, bool]] = []

    class Event:
        recorded_time = staticmethod(lambda: 1000)

        def __init__(self, **how: bool) -> None:
            made.append(how)

        def record(self) -> None: ...

    npu = SimpleNamespace(Event=Event)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(npu=npu))
    tft.tft_set_update_start_time()
    tft.tft_set_update_end_time()
    assert made == [{"enable_timing": True}] * 2 and tft.tft_can_do_uce_repair(1001)
    del Event.recorded_time
    tft.tft_set_update_start_time()
    assert not tft.tft_can_do_uce_repair(time.time_ns()), "an unknown time is not that of the host"


async def _of_coroutines() -> None: ...


def _of_generators() -> Any:
    yield


@pytest.mark.parametrize("suspended", [_of_coroutines, _of_generators])
def test_a_function_that_only_makes_an_object_is_not_decorated(suspended: Any) -> None:
    """Calling it returns at once, and the rank would leave the job before it has trained."""
    with pytest.raises(TypeError, match=r"plain function, which may call asyncio\.run"):
        tft.tft_exception_handler(suspended)


class Held:
    """Stands for a tensor on a device."""


def test_nothing_of_the_ended_loop_is_held_while_its_state_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the repair needs that memory."""
    told, held = Told(monkeypatch), WeakSet[Held]()
    monkeypatch.setattr(told, "wait_repair_action", lambda: left.append(len(held)))
    left: list[int] = []

    def step(activations: Any) -> None:
        raise RuntimeError("UCE ERROR")

    def train() -> int:
        if left:
            return 7
        activations = Held()
        held.add(activations)
        step(activations)
        return 0

    assert tft.tft_exception_handler(train)() == 7
    assert left == [0]
