"""The messages when a framework is missing, or is installed in a version that was not tested."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from ttp.adapters.versions import check_torch, require
from ttp.errors import ConfigError

PACKAGES = {"hf": "transformers", "titan": "torchtitan"}
"""Of modules that are called otherwise."""


def test_one_that_is_missing_is_an_extra_to_install() -> None:
    with pytest.raises(ConfigError, match=r"ttp\.hf needs no_such_package.*pip install 'ttp-ft\[hf\]'"):
        require("no_such_package", "hf", ("1.0", "2.0"))


def test_a_torch_that_could_save_and_not_restore_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for version in ("2.7.1", "3.0.0a0+git1"):
        monkeypatch.setattr("torch.__version__", version)
        check_torch()
    monkeypatch.setattr("torch.__version__", "2.6.0+cu124")
    with pytest.raises(ConfigError, match=r"torch 2\.6\.0\+cu124 is too old.*torch 2\.7 or later"):
        ttp.wrap_optimizer(optimizer, model=model)


@pytest.mark.parametrize(
    ("tested", "warned"), [(("1.0", "1.9"), True), (("7.1", "9.0"), False), (("90.1", "91"), True)]
)
def test_a_version_that_was_not_tried_is_a_warning(
    tested: tuple[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert require("pytest", "hf", tested) is pytest
    assert (f"was tested with ({tested[0]} to {tested[1]})" in caplog.text) is warned


def test_without_torch_it_is_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, "ttp.adapters.frameworks", raising=False)
    with pytest.raises(ConfigError, match=r"need torch.*pip install 'ttp-ft\[torch\]'"):
        importlib.import_module("ttp.adapters.frameworks")


@pytest.fixture(params=ttp.FRAMEWORKS)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a module that is not imported, and whose package cannot be imported, installed or not."""
    for name in [name for name in sys.modules if name.startswith("ttp.adapters.frameworks.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"ttp.{request.param}", raising=False)
    monkeypatch.setitem(sys.modules, PACKAGES.get(request.param, request.param), None)
    yield request.param
    for name in [name for name in sys.modules if name.startswith("ttp.adapters.frameworks.")]:
        del sys.modules[name]


def test_each_module_names_an_extra_that_there_is(module: str) -> None:
    with pytest.raises(ConfigError) as said:
        getattr(ttp, module)
    (extra,) = re.findall(r"pip install 'ttp-ft\[(\w+)\]'", str(said.value))
    extras = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert re.search(rf"^{extra} = .*\b{PACKAGES.get(module, module)}\b", extras, re.MULTILINE)


def test_each_module_warns_of_a_version_that_was_not_tried_and_of_one_that_is_otherwise(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = PACKAGES.get(module, module)
    tmp_path.joinpath(f"{package}.py").write_text("__version__ = '99.1'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    try:
        with caplog.at_level(logging.WARNING):
            if module in ("accelerate", "deepspeed"):  # nothing is imported from it at once
                getattr(ttp, module)
            else:
                with pytest.raises(ConfigError, match=rf"{package} 99\.1 lacks a name that ttp imports .* tested with"):
                    getattr(ttp, module)
    finally:
        sys.modules.pop(package, None)
        sys.modules.pop(f"ttp.{module}", None)
    assert re.search(rf"{package} 99\.1 is outside the versions that ttp\.{module} was tested with", caplog.text)


def test_so_does_a_loader_of_torchdata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from torch.utils.data import DistributedSampler, TensorDataset

    from ttp.adapters.torch.local_state.extra_state import ExtraState

    package = tmp_path / "torchdata"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '99.1'")
    text = "class Loader:\n    state_dict = load_state_dict = lambda self: {}\n"
    (package / "loader.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchdata"]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.WARNING):
        loader = importlib.import_module("torchdata.loader").Loader()
        assert ExtraState(loader).notes() == []
    assert "torchdata 99.1 is outside the versions" in caplog.text
    data = TensorDataset(torch.arange(8))
    loader.sampler = DistributedSampler(data, num_replicas=2, rank=0)
    note = r"^extra_state\['loader'\] goes to its saved position in ttp\.restore\(\).* later set_epoch\(\) is too late"
    (found,) = ExtraState({"loader": loader}).notes()
    assert re.match(note, found), "an order that follows from the epoch, which is told too late"
    epoch: Any = type("Epoch", (), dict.fromkeys(("state_dict", "load_state_dict"), dict))()
    epoch.sampler = loader.sampler
    assert ExtraState({"loader": loader, "epoch": epoch}).notes() == [found], "after the loader"
    assert ExtraState({"epoch": epoch, "loader": loader}).notes() == [], "as the note advises"
    for name in ("torchdata", "torchdata.loader"):
        sys.modules.pop(name)
