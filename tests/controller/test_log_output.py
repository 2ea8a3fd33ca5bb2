"""The controller never waits for its log."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ttp.controller import log_output
from ttp.controller.log_output import ALIKE_MAX, RecordLog, written_aside
from ttp.launch.log_format import FACTS

log = logging.getLogger("ttp.controller")


class Hanging(io.StringIO):
    """A disk on which writes hang until the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.begun.set()
        assert self.go_on.wait(60)
        return super().write(text)


@contextmanager
def controller_logs_to(stream: io.StringIO, kind: str = "text") -> Iterator[None]:
    """Set up logging as in a new controller process; pytest has handlers of its own."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        with written_aside("INFO", stream, kind):
            yield
        assert not root.handlers
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_lines_are_written_before_the_end() -> None:
    stream = io.StringIO()
    with controller_logs_to(stream):
        for number in range(100):
            log.info("line %s", number)
        log.debug("not this one")
    lines = stream.getvalue().splitlines()
    assert [line.split(" INFO ttp.controller ")[1] for line in lines] == [f"line {n}" for n in range(100)]


def test_a_disk_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bounded number of lines is kept, and the number of dropped lines is logged."""
    monkeypatch.setattr(log_output, "LINES_MAX", 10)
    stream = Hanging()
    with controller_logs_to(stream):
        log.info("line")
        assert stream.begun.wait(60)
        for _ in range(25):
            log.info("line")
        stream.go_on.set()
        while "lines before" not in stream.getvalue():
            log.info("at last")
    assert stream.getvalue().count("INFO ttp.controller line\n") == 11


def test_the_end_does_not_wait_for_it_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_output, "FLUSH_S", 0.01)
    stream = Hanging()
    with controller_logs_to(stream):
        log.info("line")
        assert stream.begun.wait(60)
    assert stream.getvalue() == ""
    stream.go_on.set()


def test_json_has_an_object_on_each_line_whatever_is_in_it() -> None:
    stream = io.StringIO()
    with controller_logs_to(stream, "json"):
        facts = {"event": "evidence", "incident": "i", "rank": 3, "text": 'a "quoted"\nline\x1b[31m'}
        log.info("[i] %s", "evidence", extra={FACTS: facts})
        try:
            raise ValueError("odd")
        except ValueError:
            log.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert facts.items() <= first.items() and first["message"] == "[i] evidence" and first["level"] == "INFO"
    assert first["time"].endswith("Z") and first["logger"] == "ttp.controller" and first["process"]
    assert "ValueError: odd" in json.dumps(second) and second["level"] == "ERROR"


def test_a_line_for_each_of_a_thousand_ranks_is_not_logged() -> None:
    stream = io.StringIO()
    with controller_logs_to(stream):
        records = RecordLog()
        for launch in (1, 2):
            records.take("incarnation", "", {}, f'{{"incarnation": {launch}}}')
            for rank in range(1_000):
                records.take("joined", "", {"rank": rank}, f'{{"rank": {rank}}}')
            for rank in range(1_000):
                records.take("evidence", "i1", {"evidence": "collective"}, f'{{"rank": {rank}}}')
            records.take("evidence", "i1", {"evidence": "exited"}, '{"rank": 7}')
    lines = [line.partition("ttp.controller ")[2] for line in stream.getvalue().splitlines()]
    assert lines.count('[i1] evidence {"rank": 7}') == 4, "once as the cause, and once among the others, a launch"
    assert sum(line.startswith("joined {") for line in lines) == 2 * ALIKE_MAX
    assert lines.count("joined: more of these are logged at level DEBUG only") == 2
    assert len(lines) == 2 * (1 + (ALIKE_MAX + 1) + (ALIKE_MAX + 1) + 1)


def test_two_machines_with_one_name_are_a_warning() -> None:
    stream = io.StringIO()
    with controller_logs_to(stream):
        RecordLog().take("one_name", "", {}, '{"host": "node"}')
    assert 'WARNING ttp.controller one_name {"host": "node"}' in stream.getvalue()
