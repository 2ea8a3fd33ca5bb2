"""Any environment gives valid settings, or an error that names the variable."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest
from hypothesis import strategies as st

from tests.fuzz.profile import fuzz
from ttp.config import Config, RankEnv
from ttp.core.layout import Layout
from ttp.errors import ConfigError
from ttp.testing.toy import hello
from ttp.wire.convert import parse_report, report_to_wire

NAMES = [field.metadata["env"] for field in fields(Config)]
NUMBERS = ["", "0", "1", "-1", "2147483648", "1e400", "nan", "inf", "1_0", " 5 ", "٣", "9" * 5000]
ODD = [*NUMBERS, "on", "off", "/x", "x" * 5000, "\udcff"]
RAW = st.binary(max_size=4).map(lambda raw: raw.decode(errors="surrogateescape"))
VALUES = st.sampled_from(ODD) | st.text(max_size=12) | RAW
UNKNOWN = st.text("TP_XY", max_size=6).map("TTP_".__add__)
SETTINGS = st.dictionaries(st.sampled_from(NAMES) | UNKNOWN, VALUES, max_size=4)
RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}
LAUNCHER = [*RANK, "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]


def use(config: Config) -> None:
    """Use the settings as ranks and controllers do."""
    logging.getLogger("ttp.fuzz").setLevel(config.log_level.upper())
    assert config.token.isascii() and config.token.isprintable()
    greeting = hello(
        0,
        Layout.data_parallel(1),
        keep=config.keep,
        save_dir=config.save_dir or "",
        fallback_dir=config.fallback_dir or "",
        host=config.host,
        address=config.address,
    )
    assert parse_report(report_to_wire(greeting).SerializeToString()) == greeting
    assert config.resolved_run_dir()


@fuzz(SETTINGS, examples=150)
def test_settings(environ: dict[str, str]) -> None:
    try:
        config = Config.from_env(environ)
    except ConfigError as problem:
        assert any(name in str(problem) for name in environ)
        assert len(str(problem)) < 1500
        return
    use(config)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["\udcff", "x" * 5000, "a\nb", "9" * 5000])
def test_no_value_breaks_its_setting(name: str, value: str) -> None:
    try:
        use(Config.from_env({name: value}))
    except ConfigError as problem:
        assert name in str(problem)


def test_a_token_that_cannot_travel_is_not_shown() -> None:
    for token in ("söcret", "secret\n", " secret", "\x00secret"):
        with pytest.raises(ConfigError, match="TTP_TOKEN is not valid") as caught:
            Config.from_env({"TTP_TOKEN": token})
        assert "cret" not in str(caught.value)


@fuzz(st.dictionaries(st.sampled_from(LAUNCHER), VALUES, max_size=3), examples=100)
def test_what_launchers_say(changes: dict[str, str]) -> None:
    try:
        env = RankEnv.from_env(RANK | changes)
    except ConfigError as problem:
        assert any(name in str(problem) for name in LAUNCHER)
        return
    about = {"run_id": env.run_id, "launch": env.launch, "local_rank": env.local_rank}
    greeting = hello(env.rank, Layout.data_parallel(2), **about)
    assert parse_report(report_to_wire(greeting).SerializeToString()) == greeting
