"""Which exceptions are only consequences of a peer's death, how errors are shown, and the files of an exiting rank."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ttp.config import Config
from ttp.launch.log_format import configure_logging
from ttp.processor.faults import called_torch_at, describe, errors_of, is_collective_error, is_out_of_device_memory
from ttp.processor.last_words import asked_for, complain, leave_word, log_error, write_error_file
from ttp.store.history import read_word

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:23475: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
)


class DistNetworkError(RuntimeError):
    """Has the name of torch's exception."""


@pytest.mark.parametrize(
    ("problem", "collective"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:52366."), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("Launch kernel failed, name:Default/AllGather-op0"), True),
        (RuntimeError("- Kernel error:\n\nLaunch kernel failed: Default/step-Step/Broadcast-op12"), True),
        (RuntimeError("Launch kernel failed: Default/step-Step/BroadcastTo-op12"), False),
        (RuntimeError("CUDA out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo is mentioned, but this is no runtime error"), False),
        (ZeroDivisionError("division by zero"), False),
        (FileNotFoundError(2, "No such file"), False),
    ],
)
def test_secondary_or_not(problem: BaseException, collective: bool) -> None:
    assert is_collective_error(problem) is collective


def test_descriptions_are_one_bounded_line() -> None:
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert describe(RuntimeError("\n-----\n- Select failed:\n---\n")) == "RuntimeError: - Select failed:"
    assert describe(RuntimeError("\n")) == describe(RuntimeError()) == "RuntimeError"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(describe(RuntimeError("x" * 10_000))) == 500


def test_an_exception_that_cannot_say_what_it_is() -> None:
    class OddError(RuntimeError):
        def __str__(self) -> str:
            raise KeyError("missing")

    assert describe(OddError()) == "OddError: <exception str() failed>"
    assert not is_collective_error(OddError()) and not is_out_of_device_memory(OddError())


def raised_in(module: str, text: str = GLOO) -> RuntimeError:
    """Return an error that code of this module has raised."""
    library = types.ModuleType(module)
    exec("def all_reduce(problem): raise problem", vars(library))
    try:
        library.all_reduce(RuntimeError(text))
    except RuntimeError as problem:
        return problem
    raise AssertionError


@pytest.mark.parametrize("module", ["torch.distributed.distributed_c10d", "train"])
def test_a_collective_that_fails_is_one_line(caplog: pytest.LogCaptureFixture, module: str) -> None:
    """The traceback of each survivor would stand before the reason. A program may call torch's C++ code itself."""
    problem = raised_in(module, GLOO + " Check the logs of the remote worker. GLHF!")
    detail = log_error(3, problem)
    (record,) = caplog.records
    assert "GLHF" in detail and "GLHF" not in record.message, "each survivor said it in 350 characters"
    assert "Traceback" in detail and "Traceback" not in record.message and "\n" not in record.message
    line = called_torch_at(problem)
    assert line.startswith("test_fault_texts.py:" if module != "train" else "<string>:")
    assert f"rank 3: a collective failed at {line}" in record.message and "reset by peer" in record.message
    assert record.levelname == "WARNING" and "asking the controller why" in record.message, "the cause comes later"


def test_a_collective_that_fails_at_the_end_of_a_block_names_the_block() -> None:
    """It named a line of contextlib, which runs the block of torch's coalesced collectives."""
    library = types.ModuleType("torch.distributed.distributed_c10d")
    exec("def block(problem):\n yield\n raise problem", vars(library))
    try:
        with contextlib.contextmanager(library.block)(RuntimeError(GLOO)):
            pass
    except RuntimeError as problem:
        found = called_torch_at(problem)
    assert found.startswith("test_fault_texts.py:")


@pytest.mark.parametrize(
    "problem", [raised_in("urllib3.connection", "Connection reset by peer"), ZeroDivisionError("oops")]
)
def test_an_error_of_the_program_keeps_its_traceback(problem: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Also one whose text looks like that of a collective: the storage of the data resets connections too."""
    assert log_error(3, problem) in caplog.text and called_torch_at(problem) == ""


def test_an_error_behind_a_barrier_in_a_finally_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """The barrier fails because the other ranks wait elsewhere, and is not what has to be mended."""
    try:
        try:
            raise ValueError("my bug")
        finally:
            raise raised_in("torch.distributed.distributed_c10d")
    except RuntimeError as problem:
        log_error(1, problem)
        assert [type(each) for each in errors_of(problem)] == [RuntimeError, ValueError]
    assert "ValueError: my bug" in caplog.text and "as it does when another rank is lost" not in caplog.text
    alone = RuntimeError(GLOO)
    assert errors_of(alone) == [alone]


def test_an_error_that_was_raised_from_itself_has_an_end() -> None:
    """``raise problem from problem``; so has one of two errors that name each other."""
    problem, other = RuntimeError(GLOO), RuntimeError(GLOO)
    problem.__cause__ = problem
    assert errors_of(problem) == [problem]
    problem.__cause__, other.__cause__ = other, problem
    assert errors_of(problem) == [problem]


def turned_into(problem: Exception, other: BaseException, cause: bool | None) -> BaseException:
    """Return the error that a program raises where it has caught another one; ``cause``: from it, or from None."""
    try:
        try:
            raise problem
        except Exception as caught:
            if cause is None:
                raise other  # noqa: B904 - without a cause, as some programs do
            raise other from (caught if cause else None)
    except BaseException as raised:
        return raised


@pytest.mark.parametrize("cause", [None, True, False])
@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_collective_that_failed_is_known_behind_the_error_that_a_program_makes_of_it(
    kind: type[BaseException], cause: bool | None
) -> None:
    """Hydra makes ``sys.exit(1)`` of every error: survivors would count as broken by errors of their own."""
    assert is_collective_error(turned_into(RuntimeError(GLOO), kind(1), cause))
    assert not is_collective_error(turned_into(KeyError("epoch"), kind(1), cause))


def failing_forward(problem: Exception) -> RuntimeError:
    """Return the error that a pipeline stage of torch raises if its module raises ``problem``."""
    library = types.ModuleType("torch.distributed.pipelining.stage")
    exec("def forward_one_chunk(error, problem): raise error from problem", vars(library))
    around = RuntimeError("\n   [Stage 3] failed to run forward:\n   args: ('Tensor',)\n")
    with pytest.raises(RuntimeError) as raised:
        library.forward_one_chunk(around, problem)
    return raised.value


def failing_backward(problem: Exception) -> RuntimeError:
    """Return the error that a pipeline stage of torch raises if its backward pass raises ``problem``."""
    torch = pytest.importorskip("torch", reason="what says faults in words works without torch, and so do its tests")
    from torch.distributed.pipelining._backward import stage_backward

    output = torch.ones(2, requires_grad=True) * 2

    def raise_it(_: object) -> None:
        raise problem

    output.register_hook(raise_it)
    with pytest.raises(RuntimeError) as raised:
        stage_backward((output,), (torch.ones(2),), [])
    return raised.value


@pytest.mark.parametrize("failing", [failing_forward, failing_backward])
def test_the_error_of_a_pipeline_stage_is_the_one_inside(failing: Any, caplog: pytest.LogCaptureFixture) -> None:
    """torch raises one of its own around it, which says the arguments of the stage and not what has happened."""
    problem = failing(RuntimeError(GLOO))
    assert is_collective_error(problem) and errors_of(problem) == [problem]
    assert describe(problem).startswith("RuntimeError: [/__w/pytorch")
    log_error(3, problem)
    assert "rank 3: a collective failed at test_fault_texts.py:" in caplog.text and "Traceback" not in caplog.text
    problem = failing(ValueError("my bug"))
    assert not is_collective_error(problem)
    assert describe(problem) == "ValueError: my bug (in a pipeline stage)"
    assert is_out_of_device_memory(failing(RuntimeError("CUDA error: out of memory")))


# ----------------------------------------------------------------------------------------- what an exiting rank leaves


def test_the_report_of_an_error_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may end the process at any moment, but readers never see half a file."""
    path, before = tmp_path / "0" / "error.json", tmp_path / "before"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file(ValueError("first"))
    os.link(path, before)
    write_error_file(ValueError("second"))
    told = [json.loads(file.read_text())["message"]["message"] for file in (before, path)]
    assert told == ["ValueError: first", "ValueError: second"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("named", "setting"), [("ck", ""), ("other", "ck")])
def test_the_word_is_left_in_the_directory_that_was_asked_for(
    named: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_PORT", "1")
    monkeypatch.setenv("TTP_SAVE_DIR", setting)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    asked_for(named)
    monkeypatch.chdir(tmp_path / "elsewhere")
    leave_word("it")
    assert (tmp_path / "ck" / "incidents" / "wrong.json").exists() and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("why", ["no model", "rank 3 exits with 64: no model"])
def test_the_word_names_its_rank_once(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ttp verdict`` said: rank 3 exited with 64: rank 3 exits with 64: no model."""
    monkeypatch.setenv("TTP_PORT", "1")
    monkeypatch.setenv("RANK", "3")
    asked_for(str(tmp_path))
    leave_word(why)
    word = read_word(tmp_path)
    assert word is not None and word.text == "rank 3 exited with 64: no model"


@pytest.mark.parametrize("where", ["nowhere", "stderr", "stderr of the root", "file", "stderr, but no errors"])
@pytest.mark.parametrize(("level", "propagate"), [(0, True), (0, False), (logging.CRITICAL, True)])
def test_an_error_that_ends_the_process_is_shown_once(
    where: str,
    level: int,
    propagate: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = logging.NullHandler() if where == "file" else logging.StreamHandler(sys.stderr)
    if where == "stderr, but no errors":
        handler.setLevel(logging.CRITICAL)
    place = {"nowhere": "another", "stderr of the root": ""}.get(where, "ttp")
    for name in ("ttp", ""):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler] if name == place else [])
    monkeypatch.setattr(logging.getLogger("ttp"), "propagate", propagate)
    caplog.set_level(level, "ttp")
    complain("TTP_KEEP='x' is not valid")
    assert capsys.readouterr().err.count("TTP_KEEP='x' is not valid") == 1


def test_a_program_that_has_closed_its_stderr_is_reported_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ttp", ""):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    configure_logging(Config(port=1))
    logging.getLogger("ttp").error("before")
    said = stderr.getvalue()
    stderr.close()
    assert "ValueError: x" in log_error(0, ValueError("x"))
    complain("y")
    assert "before" in said


@pytest.mark.parametrize(("rank", "shown"), [("3", 3), ("", "?")])
def test_the_rank_of_a_json_line_is_a_number(rank: str, shown: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectors compare it with the ranks of incidents, which are numbers."""
    for name in ("ttp", ""):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    monkeypatch.setenv("RANK", rank)
    configure_logging(Config(port=1, log_format="json"))
    logging.getLogger("ttp").error("x")
    assert json.loads(stderr.getvalue())["rank"] == shown
