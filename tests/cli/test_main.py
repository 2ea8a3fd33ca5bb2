"""The command line as a whole: help, wrong usage, exit codes, and start without heavy imports."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import REPOSITORY, Ttp
from ttp.cli import main as module
from ttp.core.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR
from ttp.store.history import FILE, line_of
from ttp.store.names import INCIDENTS

COMMANDS = ["status", "save", "report-fault", "list", "verify", "inspect", "incidents", "simulate", "version"]


def words(text: str) -> str:
    return re.sub(r"[\s│]+", " ", text)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command(ttp: Ttp, arguments: list[str]) -> None:
    said = ttp(*arguments)
    assert said.code == 0
    for command in [*COMMANDS, "run", "controller"]:
        assert re.search(rf"^│ {command} ", said.out, re.MULTILINE), command
    assert "[torchrun's flags]" in said.out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(ttp: Ttp, command: str) -> None:
    said = ttp(command, "--help")
    assert said.code == 0
    assert "--json" in said.out
    assert "JSON" in words(said.out).split("Options")[0], "the keys of its JSON are not documented"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["bogus"], "No such command 'bogus'. Try: ttp --help"),
        (["lst"], "Did you mean 'list'? Try: ttp --help"),
        (["status", "--bogus"], "No such option"),
        (["verify"], "Missing argument"),
        (["save", "--timeout", "soon"], "--timeout"),
        (["status", "--port", "70000"], "--port"),
        (["report-fault", "--port", "1"], "--rank N or --host NAME"),
        (["report-fault", "--rank", "1", "--recovered"], "--recovered takes a whole host"),
        (["watch-node"], "needs a check"),
        (["list", "/no/such/directory"], "does not exist"),
        (["list", ""], "the path is empty (an unset variable?): give the save_dir"),
        (["verify", ""], "the path is empty"),
        (["incidents", ""], "the path is empty"),
    ],
)
def test_bad_usage_is_one_line_and_64(ttp: Ttp, arguments: list[str], complaint: str) -> None:
    said = ttp(*arguments)
    assert said.code == 64
    assert said.out == ""
    assert complaint in said.err
    assert said.err.count("\n") == 1


def test_an_unknown_variable_is_bad_configuration(ttp: Ttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_PROT", "1")
    said = ttp("status")
    assert said.code == 64
    assert "did you mean TTP_PORT" in said.err


@pytest.mark.parametrize("command", ["run", "controller"])
def test_arguments_of_launchers_are_passed_on_untouched(
    ttp: Ttp, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    given = ["--help", "--nnodes=1:2", "-m", "module", "--", "--json", "-x"]
    seen: list[list[str]] = []

    def launch(argv: list[str]) -> int:
        seen.append(argv)
        return 75

    monkeypatch.setitem(module.PASSED_ON, command, launch)
    assert ttp(command, *given).code == 75
    assert seen == [given]


def test_help_and_bad_usage_of_the_controller_are_its_own(ttp: Ttp) -> None:
    said = ttp("controller", "--help")
    assert said.code == 0 and "--abandoned-s" in said.out
    assert ttp("controller", "--bogus").code == 64


def test_interrupted(ttp: Ttp, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(module.PASSED_ON, "run", interrupted)
    assert ttp("run").code == 130


def test_a_bug_is_not_taken_for_bad_usage(ttp: Ttp, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setitem(module.PASSED_ON, "run", broken)
    with pytest.raises(ZeroDivisionError):
        ttp("run")


def test_a_bug_is_no_negative_finding(ttp: Ttp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a script, the exit code 1 of `ttp verdict` means that the job runs."""

    def broken(_place: Path) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("ttp.cli.verdict.read_launches", broken)
    found = ttp("verdict", tmp_path)
    assert found.code == 70 and "ZeroDivisionError" in found.err


def run(*command: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=REPOSITORY, text=True, stderr=subprocess.PIPE, check=False, **settings)


@pytest.mark.parametrize(("stream", "more", "code"), [("full", (), 74), ("full", ("--json",), 74), ("closed", (), 0)])
def test_an_output_that_cannot_be_written(stream: str, more: tuple[str, ...], code: int, tmp_path: Path) -> None:
    full = tmp_path / "full"
    try:
        os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        full.open("wb").close()
    except PermissionError:
        pytest.skip("may not make a device node")
    redirect = {"full": f">{full}", "closed": ">&-"}[stream]
    done = run("sh", "-c", f'"$@" {redirect}', "sh", sys.executable, "-m", "ttp", "version", *more)
    assert (done.returncode, done.stderr.count("\n")) == (code, int(stream == "full")), done.stderr


def test_a_character_that_the_output_lacks_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "caf\u00e9\x01").mkdir()
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    listed = run(sys.executable, "-m", "ttp", "list", str(tmp_path / "caf\u00e9\x01"), env=env, stdout=subprocess.PIPE)
    assert (listed.returncode, listed.stderr) == (0, "") and "/caf??" in listed.stdout


def test_help_loads_neither_torch_nor_grpc_and_a_command_no_other() -> None:
    check = (
        "import sys; from ttp.cli.main import main; main(['version']); assert 'ttp.cli.status' not in sys.modules;"
        "code = main(['--help']);"
        "heavy = {'torch', 'grpc', 'numpy', 'mindspore', 'google.protobuf'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = run(sys.executable, "-c", check, stdout=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


def test_as_a_module() -> None:
    """Other tests here run ``python -m ttp``."""
    done = run(sys.executable, "-m", "ttp.cli", "version", "--json", stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert f'"protocol": "{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"' in done.stdout


def test_a_shell_completes_commands_and_their_flags(ttp: Ttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TTP_COMPLETE", "complete_bash")
    for words, number, completed in [("ttp verd", "1", "verdict"), ("ttp verdict --launch", "2", "--launcher-code")]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", number)
        said = ttp()
        assert (said.code, said.out.strip()) == (0, completed)


def test_a_reader_that_has_seen_enough() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run(sys.executable, "-m", "ttp", "--help", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize("out", ["a full disk", "a closed pipe"])
def test_the_verdict_counts_where_its_word_cannot_be_written(out: str, flags: list[str], tmp_path: Path) -> None:
    """The log of a batch job may be on the disk that is full, and what was saved must be started again."""
    (tmp_path / INCIDENTS).mkdir()
    released = line_of("released", 111.0, {"exit_code": 75, "text": "saved"})
    (tmp_path / INCIDENTS / FILE).write_text(line_of("incarnation", 100.0, {"run_id": "job"}) + released)
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    where = full if out == "a full disk" else writing
    command = [sys.executable, "-m", "ttp", "verdict", str(tmp_path), *flags]
    done = subprocess.run(command, stdout=where, stderr=where, check=False)
    os.close(writing)
    os.close(full)
    assert done.returncode == 75


def test_an_error_that_nobody_reads_keeps_its_code(tmp_path: Path) -> None:
    """As of ``ttp verdict DIR 2>&1 | tee log``, where tee has ended."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ttp", "verdict", str(tmp_path)]
    done = subprocess.run(command, stdout=writing, stderr=writing, check=False)
    os.close(writing)
    assert done.returncode == 64


def test_version(ttp: Ttp) -> None:
    said = ttp("version", "--json")
    assert set(said.json) == {"ttp", "protocol", "checkpoint_format", "python", "torch", "grpcio", "protobuf"}
    assert said.json["ttp"] in ttp("version").out == ttp("--version").out
