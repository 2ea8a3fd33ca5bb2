"""The targets of the coverage-driven fuzzer exist, and take bytes."""

from __future__ import annotations

import pytest

from tests.fuzz.atheris_targets import main, names, target


@pytest.mark.parametrize("name", names())
def test_every_target_takes_bytes(name: str) -> None:
    chosen = target(name)
    for data in (b"", b"\0" * 64, bytes(range(256))):
        chosen(data)


def test_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and main(["nothing"]) == 64
    assert set(names()) == set(capsys.readouterr().out.split())
