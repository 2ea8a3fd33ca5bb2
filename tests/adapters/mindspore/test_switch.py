"""The messages for jobs that cannot be protected: each says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import pytest
from mindspore import nn

import ttp
from ttp import session
from ttp.adapters.mindspore import (
    OptTFTWrapper,
    OptTTPWrapper,
    TFTRegister,
    TrainFaultTolerance,
    callbacks,
    constraints,
    wrapping,
)
from ttp.adapters.mindspore.switch import require_switched_on
from ttp.errors import ConfigError, UsageError

pytestmark = pytest.mark.xdist_group("mindspore")

ON = {"MS_ENABLE_TFT": "{TTP:1}", "MINDIO_FOR_MINDSPORE": "1"}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in ON.items():
        monkeypatch.setenv(name, value)
    session.reset()
    yield
    session.reset()


def optimizer(**settings: Any) -> nn.Optimizer:
    return nn.SGD(nn.Dense(2, 2).trainable_params(), **settings)


@pytest.mark.parametrize("value", ["{TTP:1}", "'{TTP:1}'".strip("'"), "{UCE:1, TTP:1}", "{TTP:1,ARF:1}", "TTP:1"])
def test_both_variables_switch_it_on(value: str) -> None:
    require_switched_on({**ON, "MS_ENABLE_TFT": value})


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({}, r"MS_ENABLE_TFT='\{TTP:1\}' \(it is not set\) and MINDIO_FOR_MINDSPORE=1 \(it is not set\)"),
        ({"MS_ENABLE_TFT": "{TTP:1}"}, r"set MINDIO_FOR_MINDSPORE=1 \(it is not set\) in"),
        ({"MINDIO_FOR_MINDSPORE": "1"}, r"set MS_ENABLE_TFT='\{TTP:1\}' \(it is not set\) in"),
        ({**ON, "MS_ENABLE_TFT": "{TTP:0}"}, r"\(it is '\{TTP:0\}'\)"),
        ({**ON, "MS_ENABLE_TFT": "{TTP:10}"}, r"\(it is '\{TTP:10\}'\)"),
        ({**ON, "MINDIO_FOR_MINDSPORE": "0"}, r"MINDIO_FOR_MINDSPORE=1 \(it is '0'\)"),
    ],
)
def test_what_is_missing_is_said(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        require_switched_on(environ)


def test_the_callbacks_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ON:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="MS_ENABLE_TFT"):
        TFTRegister(0, "127.0.0.1", 30051, "./ttp_checkpoints/")
    with pytest.raises(ConfigError, match="MS_ENABLE_TFT"):
        TrainFaultTolerance("./ttp_checkpoints/")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((-1, "127.0.0.1", 30051, "d"), "ctrl_rank_id=-1"),
        (("0", "127.0.0.1", 30051, "d"), "ctrl_rank_id='0'"),
        ((0, "", 30051, "d"), "ctrl_ip=''"),
        ((0, "127.0.0.1", 80, "d"), "ctrl_port=80"),
        ((0, "127.0.0.1", "30051", "d"), "ctrl_port='30051'"),
    ],
)
def test_arguments_that_are_none_are_refused(arguments: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        TFTRegister(*arguments)


def test_the_rank_of_the_controller_is_one_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "pod-0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="ctrl_rank_id=4 is no rank: the job has 4 workers"):
        TFTRegister(4, "127.0.0.1", 30051, "d")


def test_somebody_has_to_write_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="ckpt_save_path, or a ckpt_save_fn"):
        TrainFaultTolerance()
    with pytest.raises(UsageError, match="ckpt_load_fn=3 is no function"):
        TrainFaultTolerance("d", ckpt_load_fn=3)  # type: ignore[arg-type] # on purpose
    monkeypatch.setenv("MS_TFT_PORT", "http")
    with pytest.raises(ConfigError, match="MS_TFT_PORT='http'"):
        TrainFaultTolerance("d")


def test_only_optimizers_of_mindspore_are_wrapped() -> None:
    with pytest.raises(UsageError, match=r"wraps a mindspore\.nn\.Optimizer, and got a builtins\.object"):
        OptTTPWrapper(object())
    wrapped = OptTFTWrapper(optimizer())
    with pytest.raises(UsageError, match="wrapped already"):
        OptTTPWrapper(wrapped)


def test_a_model_whose_optimizer_is_not_wrapped_is_refused() -> None:
    for found, why in (
        (optimizer(), "write optimizer = ttp.adapters.mindspore.OptTTPWrapper"),
        (object(), "only optimizers derived from"),
        (None, "Model has no optimizer"),
    ):
        params = SimpleNamespace(optimizer=found, network=object(), train_network=nn.Dense(2, 2), cur_step_num=0)
        with pytest.raises(UsageError, match=why):
            TFTRegister(0, "127.0.0.1", 30051, "d")._join(params)


def test_one_rank_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"init\(\) was not called"):
        constraints.check_world(4)
    with pytest.raises(ConfigError, match="data parallelism of at least 2"):  # init() would not help
        constraints.check_world(1)
    monkeypatch.setattr(constraints, "GlobalComm", SimpleNamespace(INITED=True))
    monkeypatch.setattr(constraints, "get_group_size", lambda: 1)
    with pytest.raises(ConfigError, match="started 4 ranks, and MindSpore has 1"):
        constraints.check_world(4)
    monkeypatch.setattr(constraints, "get_group_size", lambda: 4)
    with pytest.raises(ConfigError, match="parallel_mode is stand_alone"):
        constraints.check_world(4)


@pytest.mark.parametrize(("sink_size", "batch_num", "said"), [(2, 8, 2), (-1, 8, 8), (4, 8, 4)])
def test_steps_that_nobody_reports_are_refused(sink_size: int, batch_num: int, said: int) -> None:
    params: Any = type("P", (dict,), {"__getattr__": dict.__getitem__})(sink_size=sink_size, batch_num=batch_num)
    with pytest.raises(ConfigError, match=f"sink_size is {said}: only sink_size=1"):
        constraints.check_sink(callbacks._sink_size(params))


def test_single_steps_are_taken() -> None:
    for size in (None, 1):
        constraints.check_sink(size)


def test_optimizer_parallelism_without_replicas_is_refused() -> None:
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", enable_parallel_optimizer=True)
    try:
        with pytest.raises(ConfigError, match=r"optimizer_weight_shard_size=-1.*'optimizer_weight_shard_size': 2"):
            OptTTPWrapper(optimizer())
        ms.set_auto_parallel_context(parallel_optimizer_config={"optimizer_weight_shard_size": 2})
        made = optimizer()
        OptTTPWrapper(made)
        ms.set_auto_parallel_context(parallel_mode="data_parallel")  # where the size has no effect
        with pytest.raises(ConfigError, match="no other rank has their moments"):
            OptTTPWrapper(made)  # on a CPU MindSpore would not make another one
    finally:
        ms.reset_auto_parallel_context()


def test_switched_off_the_wrapper_checks_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program trains as without ttp, even with optimizer parallelism and no replicas."""
    for name in ("MS_ENABLE_TFT", "TTP_PORT"):
        monkeypatch.delenv(name, raising=False)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", enable_parallel_optimizer=True)
    try:
        assert not OptTTPWrapper(optimizer()).ttp_reports
    finally:
        ms.reset_auto_parallel_context()


def test_wrap_optimizer_gives_the_wrapper_back(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = ttp.wrap_optimizer(optimizer())
    assert type(wrapped) is OptTTPWrapper
    told: list[bool] = []
    monkeypatch.setattr(wrapping, "tell_launcher_of_mistakes", lambda: told.append(True))
    with pytest.raises(UsageError, match=r"wrap_optimizer\(scheduler, buddy=\) is not for MindSpore"):
        ttp.wrap_optimizer(optimizer(), scheduler=object(), buddy=True)
    with pytest.raises(UsageError, match="give the network"):
        ttp.wrap_optimizer(optimizer(), model=object())
    assert len(told) == 2, "else the launcher starts the job again"


def test_of_several_optimizers_the_last_is_wrapped() -> None:
    with pytest.raises(UsageError, match="wrap the optimizer that steps last"):
        ttp.wrap_optimizer([optimizer(), optimizer()], model=nn.Dense(2, 2))
    network = nn.Dense(2, 2)
    wrapped = ttp.wrap_optimizer(nn.SGD(network.trainable_params()), model=network)
    with pytest.raises(UsageError, match="wrap the optimizer that steps last"):
        ttp.wrap_optimizer(wrapped, model=network)
