"""What is said where a framework is missing, or is none of the versions that were tried."""

from __future__ import annotations

import logging

import pytest

from ttp.adapters.frameworks.versions import require
from ttp.errors import ConfigError


def test_one_that_is_missing_is_an_extra_to_install() -> None:
    with pytest.raises(ConfigError, match=r"ttp\.hf needs no_such_package.*pip install 'ttp-ft\[hf\]'"):
        require("no_such_package", "hf", ("1.0", "2.0"))


@pytest.mark.parametrize(
    ("tested", "warned"), [(("1.0", "1.9"), True), (("7.1", "9.0"), False), (("90.1", "91"), True)]
)
def test_a_version_that_was_not_tried_is_a_warning(
    tested: tuple[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert require("pytest", "hf", tested) is pytest
    assert (f"was tested with ({tested[0]} to {tested[1]})" in caplog.text) is warned
