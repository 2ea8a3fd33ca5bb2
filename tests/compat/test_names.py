"""The names, numbers and texts of the original's interface, and the messages when they are used wrongly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ttp.compat.mindio.controller_ttp as controller
import ttp.compat.mindio.framework_ttp as tft
from tests.wire.certificates import Authority
from ttp.compat.mindio import catching, managing, rank, tls_info, update_times
from ttp.compat.mindio.handlers import Handlers
from ttp.errors import ConfigError, UsageError
from ttp.mindio.handlers import Ailment, Call, HandlerKind, NextAction
from ttp.mindio.protocol.messages import RepairWay


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process one that has called nothing yet."""
    for name in ("TTP_PORT", "TTP_MINDIO", "MINDIO_FOR_MINDSPORE", "TTP_FRAMEWORK_TYPE", "TTP_STOP_CLEAN_BEFORE_DUMP"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and what a test sets by itself does not stay
    this = rank.ThisRank()
    from ttp.compat.mindio.framework_ttp import ttp_decorator

    for module in (rank, catching, managing, ttp_decorator):
        monkeypatch.setattr(module, "THIS", this)
    monkeypatch.setattr(managing, "HERE", managing.Managing())
    monkeypatch.setattr(catching, "TABLE", catching.Table())
    monkeypatch.setattr(ttp_decorator, "TABLE", catching.TABLE)
    monkeypatch.setattr(update_times, "_times", {"start": None, "end": None})
    yield


class Told:
    """A stand-in for a participant that records its calls. ``exits_at``: the wait that ends the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: list[Ailment] = []
        self.codes: list[str] = []
        self.left: list[bool] = []
        self.waited: list[str] = []
        self.exits_at = ""
        self.device_index: int | None = None
        self.rebooted = self.moves = self.was_guest = False
        monkeypatch.setattr(rank.THIS, "participant", self)

    def report_error(self, ailment: Ailment, code: str, text: str) -> None:
        self.reports.append(ailment)
        self.codes.append(code)

    def leave(self, interrupt: KeyboardInterrupt | None = None) -> None:
        self.left.append(interrupt is not None)

    def wait_next_action(self) -> NextAction:
        return self._wait("next")

    def wait_repair_action(self) -> NextAction:
        return self._wait("repair")

    def _wait(self, what: str) -> NextAction:
        self.waited.append(what)
        assert len(self.waited) < 9, "the function is called again and again"
        return NextAction.EXIT if what == self.exits_at else NextAction.RETRY


def test_the_numbers() -> None:
    assert [state.value for state in tft.ReportState] == list(range(9))
    assert [state.name for state in tft.ReportState][:3] == ["RS_NORMAL", "RS_RETRY", "RS_UCE"]
    assert {kind.name: kind.value for kind in tft.RepairType} == {
        "RT_SEND": 0, "RT_UCE_HIGHLEVEL": 1, "RT_UCE_LOWLEVEL": 2, "RT_RECV_REPAIR": 3, "RT_ROLLBACK": 4,
        "RT_LOAD_CKPT": 5, "RT_LOAD_REBUILD": 6,
    }  # fmt: skip
    assert (tft.OptimizerType.ATTENTION.value, tft.OptimizerType.MOE.value) == (0, 1)
    assert (tft.Action.RETRY.value, tft.Action.EXIT.value) == (0, 1)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("UCE ERROR at 0x12", "RS_UCE"),
        ("FORCE STOP. By mindio-ttp BeginUpdating", "RS_NORMAL"),
        ("ARF FINISH", "RS_PREREPAIR_FINISH"),
        ("STEP FINISH", "RS_STEP_FINISH"),
        ("HCCL OP RETRY FAILED", "RS_HCCL_FAILED"),
        ("SUSPECT REMOTE ERROR", "RS_HCCL_FAILED"),
        ("UB LINK ERROR", "RS_HCCL_FAILED"),
        ("HCCS LINK ERROR", "RS_HCCL_FAILED"),
        ("HBM MULTI BIT ECC time us= 3000", "RS_UCE"),
        ("HBM MULTI BIT ECC time us=1500", "RS_UCE"),
        ("HBM MULTI BIT ECC time us=500", "RS_UCE_CORRUPTED"),
        ("HBM MULTI BIT ECC", "RS_UCE_CORRUPTED"),
        ("FORCE STOP after UCE ERROR", "RS_UCE"),  # the first of the table
        ("PRECISION ERROR load ckpt step=7", "RS_RETRY"),
        ("cuda out of memory", "RS_UNKNOWN"),
        ("", "RS_UNKNOWN"),
    ],
)
def test_the_table_of_exceptions(text: str, state: str) -> None:
    tft.tft_set_update_start_time(1000)
    tft.tft_set_update_end_time(2000)
    tft.tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", lambda text: "PRECISION ERROR")
    assert catching.TABLE.classify(text).name == state


def test_a_programs_own_handler_may_say_any_kind_and_nonsense_is_unknown() -> None:
    said: dict[str, Any] = {"by its name": "HBM MULTI BIT ECC can't repair", "by another": "OTHER"}
    said |= {"nonsense": "weather", "what is no text": ["OTHER"]}
    tft.tft_register_exception_handler("ODD", "RS_RETRY", lambda text: said[text.removeprefix("ODD ")])
    found = [catching.TABLE.classify(f"ODD {text}").name for text in said]
    assert found == ["RS_UCE_CORRUPTED", "RS_UNKNOWN", "RS_UNKNOWN", "RS_UNKNOWN"]


@pytest.mark.parametrize(
    ("fact", "text", "ailment"),
    [
        ("rebooted", "ARF FINISH", Ailment.JOINED),
        ("moves", "STEP FINISH", Ailment.STOPPED),
        ("", "gloo: Connection closed by peer [127.0.0.1]", Ailment.PEER),
    ],
)
def test_arf_has_processes_that_join_and_others_that_lose_a_peer(
    monkeypatch: pytest.MonkeyPatch, fact: str, text: str, ailment: Ailment
) -> None:
    """The function is called again in each of them; only the last has something to clean."""
    told, calls = Told(monkeypatch), []
    setattr(told, fact or "other", True)
    monkeypatch.setattr(rank.THIS, "enable_arf", True)

    def train() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError(text)
        return 7

    assert tft.tft_exception_handler(train)() == 7
    assert told.reports == [ailment] and told.waited == ["next", "repair"][bool(fact) :]


@pytest.mark.parametrize(("guest", "how"), [(False, "arf"), (True, "hot switch")])
def test_a_new_process_asks_how_it_has_joined(monkeypatch: pytest.MonkeyPatch, guest: bool, how: str) -> None:
    """A program may ask in code that also runs without high availability."""
    assert (tft.tft_get_repair_step(), tft.tft_get_repair_type()) == (0, "unknow")
    assert (tft.tft_is_reboot_node(), tft.tft_get_reboot_type()) == (False, "arf")
    told = Told(monkeypatch)
    assert not tft.tft_is_reboot_node()
    told.rebooted, told.was_guest = True, guest
    assert tft.tft_is_reboot_node() and tft.tft_get_reboot_type() == how


REPORTED, LEFT = [Ailment.FATAL], [False]


@pytest.mark.parametrize(
    ("problem", "destroyed", "reports", "left"),
    [
        (RuntimeError("out of luck"), False, REPORTED, []),
        (RuntimeError("ARF FINISH"), False, REPORTED, []),  # only processes say that which join a running job
        (RuntimeError("STEP FINISH"), False, REPORTED, []),
        (RuntimeError("ODD without a number"), False, REPORTED, []),  # the error of the program's handler hides nothing
        (SystemExit(3), False, REPORTED, []),
        (SystemExit(0), False, [], LEFT),
        (SystemExit(), False, [], LEFT),
        (KeyboardInterrupt(), False, [], [True]),  # who presses Control-C is not kept waiting
        *(
            (problem, True, [], LEFT)
            for problem in (RuntimeError("disk full"), ValueError("no accuracy"), SystemExit(3))
        ),
    ],
    ids=repr,
)
def test_what_ends_the_training_function_is_reported_and_stays_what_it_is(
    monkeypatch: pytest.MonkeyPatch, problem: BaseException, destroyed: bool, reports: Any, left: list[bool]
) -> None:
    """``destroyed``: the program has left the job before."""
    told = Told(monkeypatch)
    tft.tft_register_exception_handler("ODD", "RS_RETRY", lambda text: text.split("=")[1])

    def train() -> None:
        if destroyed:
            tft.tft_destroy_processor()
        raise problem

    with pytest.raises(type(problem)) as raised:
        tft.tft_exception_handler(train)()
    assert raised.value is problem and (told.reports, told.left) == (reports, left)


def test_arguments_of_none_change_nothing() -> None:
    tft.tft_set_step_args("args")
    tft.tft_set_step_args(None)
    assert rank.THIS.handlers.args == "args"
    tft.set_mindio_export_version("MindSpeed-LLM")
    tft.tft_set_step_args("others")
    assert rank.THIS.handlers.args == "args"


def test_the_device_is_that_of_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tft.get_device() is None
    Told(monkeypatch).device_index = 5
    assert tft.get_device() == 5
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    context = SimpleNamespace(get_context=lambda what: {"device_id": 6}[what])
    monkeypatch.setitem(sys.modules, "mindspore", SimpleNamespace(context=context))
    assert tft.get_device() == 6


def test_a_managers_callback_gets_the_arguments_that_it_takes() -> None:
    told: list[Any] = []

    def older(faults: Any) -> None:
        told.append(faults)

    def any_number(*given: Any) -> None:
        told.append(given)

    for func in (older, any_number):
        managing._fitting(func)({1: 0}, {1: "12ab"})
    assert told == [{1: 0}, ({1: 0}, {1: "12ab"})]


def test_modules_that_log_beside_the_original() -> None:
    assert controller.ttp_logger.LOGGER.name == "ttp.compat.mindio"
    assert tft.get_mindio_export_version() is None


def test_what_may_not_be_repaired_is_unknown() -> None:
    tft.tft_init_processor(0, 2, False, enable_uce=False)
    assert catching.TABLE.classify("UCE ERROR").name == catching.TABLE.classify("UB LINK ERROR").name == "RS_UNKNOWN"
    assert catching.TABLE.classify("FORCE STOP").name == "RS_NORMAL"


@pytest.mark.parametrize(
    ("error", "start", "end", "can"),
    [
        (5, None, None, False), (5, 1, None, False), (5, 1, 3, True), (2, 1, 3, True), (1, 1, 3, False),
        (5, 4, 2, True), (5, 0, 0, False), (5, 0, 3, False), (0, 1, 3, False), (None, 1, 3, False),
    ],
)  # fmt: skip
def test_when_memory_can_be_repaired(error: Any, start: int | None, end: int | None, can: bool) -> None:
    """0 is unknown: MindSpore passes it for what its device has not told, such as the update before the first one."""
    assert tft.tft_can_do_uce_repair(error, start, end) is can


def call(kind: HandlerKind) -> Call:
    return Call(kind, step=7, error_ranks=(1,), way=RepairWay.SEND, types=(0,), src=(3,), dst=(1,), ranks=(1, 3))


@pytest.mark.parametrize(
    ("kind", "torch", "mindspore"),
    [
        (HandlerKind.SAVE, (7, [], "args", "ctx"), (7, [], "args", "ctx")),
        (HandlerKind.RENAME, (7, "args"), (7, "ctx")),
        (HandlerKind.EXIT, None, ("ctx",)),
        (HandlerKind.STOP, ("args", "ctx"), ("args", "ctx")),
        (HandlerKind.CLEAN, (False, "args", "ctx"), (False, "args", "ctx")),
        (HandlerKind.ROLLBACK, (7, "args", "ctx"), (7, "args", "ctx")),
        (HandlerKind.REBUILD, ([1], "args", "ctx"), ([1], "args", "ctx")),
        (HandlerKind.STREAM_SYNC, (), ()),
    ],
)
def test_how_handlers_are_called(
    monkeypatch: pytest.MonkeyPatch, kind: HandlerKind, torch: Any, mindspore: Any
) -> None:
    for dialect, wanted in (("0", torch), ("1", mindspore)):
        monkeypatch.setenv("MINDIO_FOR_MINDSPORE", dialect)
        handlers = Handlers()
        given: list[Any] = []
        handlers.args = "args"
        handlers.add(kind, lambda *what, given=given: given.append(what), "ctx")
        assert handlers.kinds() == ([] if wanted is None else [kind])
        handlers.call(call(kind))
        assert wanted is None or given == [wanted]


def test_a_repair_is_described_as_the_original_does() -> None:
    handlers = Handlers()
    given: list[Any] = []
    handlers.add(HandlerKind.REPAIR, lambda *what: given.append(what), None)
    handlers.call(call(HandlerKind.REPAIR))
    info = {"type": [0], "repair_type": 0, "src": [3], "dst": [1], "rank_list": [1, 3]}
    assert given == [(7, False, [1], info, None, None)]


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({}, "has to be .*: KeyError"),
        ({"rank_list": [1, 2], "replica_cnt": 2}, "must contain rank 0"),
        ({"rank_list": [0, 0], "replica_cnt": 2}, "no rank twice"),
        ({"rank_list": [0, 1], "replica_cnt": 3}, "give 1 to 2"),
        ({"rank_list": [0, 1], "replica_cnt": 0}, "give 1 to 2"),
    ],
)
def test_replicas_that_make_no_sense(info: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tft.tft_set_optimizer_replica(0, [info])


def test_calls_before_the_start() -> None:
    nothing: Any = None
    with pytest.raises(UsageError, match="call tft_init_processor"):
        tft.tft_start_updating_os()
    with pytest.raises(ConfigError, match="tft_pause_train: step -1 is not a whole number from 0"):
        tft.tft_pause_train(-1)  # which cannot be sent to the controller
    with pytest.raises(ConfigError, match="value of a ReportState"):
        tft.tft_report_error(42)
    with pytest.raises(UsageError, match="joins with ARF FINISH"):
        tft.tft_report_error(tft.ReportState.RS_INIT_FINISH.value)
    with pytest.raises(ConfigError, match="is not one of MindSpeed, MindSpeed-LLM"):
        tft.set_mindio_export_version("2.0")
    with pytest.raises(TypeError):
        tft.tft_exception_handler(nothing)
    assert tft.tft_exception_handler(lambda a, b=2: a + b)(1) == 3  # not switched on: nothing is caught
    assert controller.tft_notify_controller_prepare_action("stop switch") == 1
    assert controller.tft_notify_controller_stop_train({0: 1}) == controller.tft_notify_controller_dump() == 1
    assert controller.tft_register_mindx_callback("report_weather", print) == 1


@pytest.mark.parametrize(
    ("address", "port", "said"),
    [
        ("0.0.0.0", 9000, "stands for all addresses"),
        ("127.0.0.1", 80, "is not a whole number from 1024 to 65535"),
        ("127.0.0.1", 9000, ""),
    ],
)
def test_what_cannot_start_ends_the_process(
    capsys: pytest.CaptureFixture[str], address: str, port: int, said: str
) -> None:
    tft.tft_init_controller(0, 2, False)
    tft.tft_init_processor(0, 2, False)
    for start in (tft.tft_start_controller, tft.tft_start_processor):
        with pytest.raises(SystemExit) as leaving:
            start(address, port)  # with TLS, but without tls_info
        assert leaving.value.code == 2
        assert (said or "enable_tls is set but tls_info is empty") in capsys.readouterr().err


def test_tls_info_becomes_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b", "other")
    made = authority.sign(password="emases nepo")
    (tmp_path / "cipher").write_text("open sesame\n")
    for name in ("TTP_TLS_CERT", "TTP_TLS_KEY", "TTP_TLS_CA", "TTP_TLS_KEY_PASSWORD", "TTP_TLS_CRL"):
        monkeypatch.setenv(name, "")
    text = (
        f"tlsCert: {made['TTP_TLS_CERT']}; tlsPk: {made['TTP_TLS_KEY']}; tlsPkPwd: {tmp_path / 'cipher'};"
        f"tlsCaPath: {tmp_path}; tlsCaFile: a/{authority.certificate.name}, b/{other.certificate.name}; tlsCrlFile: ;"
    )
    tls_info.use(True, text, tmp_path / "run", lambda cipher: cipher[::-1])
    kept = tmp_path / "run" / "key-password"
    assert kept.read_text() == "emases nepo" and kept.stat().st_mode & 0o777 == 0o600
    lists = f"tlsCrlPath: {tmp_path}; tlsCrlFile: a/{authority.revoke().name}, b/{other.revoke().name}"
    tls_info.use(True, f"{text}{lists}", tmp_path / "run", lambda cipher: cipher[::-1])
    authority.revoke("own")
    with pytest.raises(ConfigError, match="certificate revoked"):
        tls_info.use(True, f"{text}{lists}", tmp_path / "run", lambda cipher: cipher[::-1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tlsCert a.pem", "'tlsCert a.pem' is not 'key: value'"),
        ("tlsCert: a.pem", "lacks tlsPk, tlsCaFile"),
        ("tlsCert: a; tlsPk: b; tlsCaFile: c; tlsCrlFile: d, e", "d cannot be read"),
    ],
)
def test_tls_info_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tls_info.use(True, text, tmp_path / "run", None)
