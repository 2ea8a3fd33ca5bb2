"""Settings: every bad value is named together with the valid ones."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import GenericAlias
from typing import get_origin, get_type_hints

import pytest

from ttp.config import Config, RankEnv
from ttp.errors import ConfigError

ROOT = Path(__file__).parent.parent


def test_defaults_are_off() -> None:
    config = Config.from_env({"HOME": "/somewhere"})
    assert config.port is None and config == Config()


def test_a_default_is_of_the_type_that_the_setting_has() -> None:
    """A default text "off" would count as on."""
    for field, kind in get_type_hints(Config).items():
        plain = get_origin(kind) if isinstance(kind, GenericAlias) else kind
        assert isinstance(getattr(Config(), field), plain), field


def test_everything_can_be_set() -> None:
    env = {"TTP_PORT": "1", "TTP_OT": "2.5", "TTP_KEEP": "7", "TTP_TOKEN": "", "TTP_SAVE_DIR": "/ck", "TTP_LOG": ""}
    config = Config.from_env(env)
    assert (config.port, config.rescue_patience_s, config.keep, config.token) == (1, 2.5, 7, "")
    assert config.save_dir == "/ck" and config.log_level == "INFO"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TTP_BIND", "[::1]", "::1"),
        ("TTP_ADDRESS", "[fd00::7]", "fd00::7"),
        ("TTP_FALLBACK_DIR", "/mnt/other//ck/", "/mnt/other/ck"),
        *(("TTP_DIGEST", mode, mode) for mode in ("sample", "all", "off")),
        *(("TTP_HANG_S", text, value) for text, value in (("2.5", 2.5), ("off", None), ("OFF", None), ("0", None))),
        *(("TTP_STACKS", text, value) for text, value in (("on", True), ("1", True), ("off", False), ("0", False))),
        ("TTP_HANG_S", "", 60.0),
        ("TTP_STACKS", "", True),
    ],
)
def test_a_value_may_have_several_forms(name: str, text: str, value: object) -> None:
    field = {setting.metadata["env"]: setting.name for setting in fields(Config)}[name]
    assert getattr(Config.from_env({name: text, "TTP_STALL_S": "5"}), field) == value


@pytest.mark.parametrize(
    ("name", "hint"), [("TTP_PROT", "TTP_PORT"), ("TTP_FREEZE", "TTP_FREEZE_S"), ("TTP_XYZZY", "known names: TTP_A")]
)
def test_an_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Config.from_env({name: "1"})
    assert hint in str(caught.value)


PORT = "expected a port number from 1 to 65535"
COUNT = "expected a whole number of at least 1"
SECONDS = "expected a number of seconds above 0 and up to 10000000"
DIRECTORY = "expected an absolute path, so that every rank uses the same directory"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *(("TTP_PORT", value, PORT) for value in ("x", "0", "-5", "1.5", "65536")),
        *(("TTP_KEEP", value, COUNT) for value in ("x", "0", "-5", "1.5")),
        *((n, v, SECONDS) for n in ("TTP_OT", "TTP_GRACE_S") for v in ("soon", "0", "-1", "nan", "inf", "1e9")),
        *(("TTP_FALLBACK_DIR", value, DIRECTORY) for value in ("ck", "./ck", "~/ck", "s3://bucket/ck")),
        ("TTP_HANG_S", "no", f"{SECONDS}, or off"),
        ("TTP_STACKS", "no", "expected on or off (or 1 or 0)"),
        ("TTP_SAVED_EXIT_CODE", "no", "expected a number from 1 to 255"),
        ("TTP_MINDIO", "no", "expected 1, 0 or force"),
        ("TTP_MINDIO", "OFF", "expected 1, 0 or force"),  # what decides whether ranks may move would take it for 1
        ("TTP_DIGEST", "some", "expected one of sample, all, off"),
    ],
)
def test_a_value_that_is_none_says_what_is_wanted(name: str, value: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({name: value})
    assert f"{name}={value!r} is not valid: {wanted}" in str(caught.value)


@pytest.mark.parametrize("field", ["run_dir", "tls_cert", "tls_key", "tls_ca", "tls_key_password", "tls_crl"])
def test_a_program_that_changes_its_directory_keeps_its_files(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are read for every connection, and a rank may have to connect again."""
    env, here = {f"TTP_{field.upper()}": "of the job"}, Path.cwd()
    Config.from_env(env)
    monkeypatch.chdir("/")
    assert getattr(Config.from_env(env), field) == str(here / "of the job")


@pytest.mark.parametrize(("watchdog", "seconds"), [("0", None), ("1", 60.0), ("2", 60.0), ("", 60.0)])
def test_ascends_watchdog_says_it_too_where_nobody_says_it_to_ttp(watchdog: str, seconds: float | None) -> None:
    told = {"HCCL_ASYNC_ERROR_HANDLING": watchdog}
    assert Config.from_env(told).hang_s == seconds
    assert Config.from_env(told | {"TTP_HANG_S": "30"}).hang_s == 30


def test_every_setting_is_documented() -> None:
    documented = (ROOT / "docs" / "configuration.md").read_text()
    for setting in fields(Config):
        assert f"`{setting.metadata['env']}`" in documented


RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host"}


def test_a_rank() -> None:
    env = RankEnv.from_env(RANK | {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "r", "LOCAL_RANK": "1"})
    assert env == RankEnv(1, 4, 1, "host", "r", 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "4"}, "RANK=4 is not in 0..3"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": "zero"}, "RANK='zero' is not a whole number"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
    ],
)
def test_a_rank_that_is_none(change: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RankEnv.from_env(RANK | change)
    assert text in str(caught.value)


def test_no_rank_at_all_says_how_to_start() -> None:
    with pytest.raises(ConfigError, match="ttp run"):
        RankEnv.from_env({})


def test_what_kubernetes_says_of_services_is_not_a_setting() -> None:
    """It gives every pod variables of each Service of its namespace, whatever the Service is for."""
    web = {"TTP_WEB_SERVICE_HOST": "10.0.0.7", "TTP_WEB_SERVICE_PORT": "80", "TTP_WEB_PORT_80_TCP_ADDR": "10.0.0.7"}
    own = {"TTP_SERVICE_HOST": "10.0.0.8", "TTP_SERVICE_PORT_HTTP": "80", "TTP_PORT": "tcp://10.0.0.8:80"}
    assert Config.from_env(web | own | {"TTP_WEB_PORT": "tcp://10.0.0.7:80", "TTP_KEEP": "7"}).port is None
    assert Config.from_env(web | own | {"TTP_PORT": "7", "TTP_METRICS_PORT": "8"}).port == 7
    with pytest.raises(ConfigError, match="TTP_WEB_PORT"):
        Config.from_env({"TTP_WEB_PORT": "80"})
