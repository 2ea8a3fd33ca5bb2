"""All settings of ttp (``TTP_*``). Other modules read single ones only where a mistake in another must not matter."""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ttp.core.layout import WORLD_SIZE_MAX
from ttp.core.stripes import AUTO, PARTS_ASKED_MAX, WHOLE
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED, ConfigError
from ttp.launch.rank_names import in_torchruns_names
from ttp.launch.token_file import secret_in, token_text

PREFIX = "TTP_"
CONTINUITY_MODES = OFF, WARM, KEEP = "off", "warm", "keep"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
CONTROLLER_ADDR = "TTP_CONTROLLER_ADDR"
MINDIO_FORCE = "force"
MINDIO_SWITCH = "TTP_MINDIO"
HCCL_WATCHDOG = "HCCL_ASYNC_ERROR_HANDLING"
"""Setting of Ascend's collectives: 1 switches their watchdog for hangs on, 0 switches it off."""
NAMES_OF_MINDIO = frozenset({
    "TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS", "TTP_ACCLINK_CHECK_PERIOD_HOURS", "TTP_ADDR", "TTP_FRAMEWORK_TYPE",
    "TTP_LOG_LEVEL", "TTP_LOG_MODE", "TTP_LOG_PATH", "TTP_LOG_STDOUT", "TTP_NORMAL_ACTION_TIME_LIMIT",
    "TTP_RETRY_TIMES", "TTP_SAVE_CKPT_TIME_LIMIT", "TTP_STOP_CLEAN_BEFORE_DUMP",
})  # fmt: skip
"""Settings of the original MindIO TTP. Programs for it set them; with ``TTP_MINDIO`` set they are ignored here."""
OTHER_CODES = (1, EXIT_BAD_CONFIG, EXIT_NOT_SAVED)
"""Exit codes of ``ttp run`` that have a meaning other than "saved"."""
COUNT_MAX = 2**31 - 1
SECONDS_MAX = 1e7  # nearly four months: more is a mistake, such as milliseconds
NAME_MAX = 4000
"""Maximum length of a name in characters; a little less than a message or a system call takes."""


def _within(text: str, kind: type[int] | type[float], low: float, high: float, wanted: str) -> Any:
    """Parse ``text`` as a number from ``low`` to ``high``. Raises ``ValueError(wanted)``, not Python's text."""
    with contextlib.suppress(ValueError):
        value = kind(text)
        if low <= value <= high:
            return value
    raise ValueError(wanted)


def port_number(text: str) -> int:
    """Parse a port number. Raises ``ValueError``."""
    return int(_within(text, int, 1, 65535, "expected a port number from 1 to 65535"))


def seconds(text: str) -> float:
    """Parse a number of seconds above 0. Raises ``ValueError``."""
    wanted = f"expected a number of seconds above 0 and up to {SECONDS_MAX:.0f}"
    return float(_within(text, float, math.ulp(0.0), SECONDS_MAX, wanted))


def _seconds_or_off(text: str) -> float | None:
    if text.strip().lower() in ("off", "0"):
        return None
    try:
        return seconds(text)
    except ValueError as problem:
        raise ValueError(f"{problem}, or off") from None


def _switch(text: str) -> bool:
    if text.strip().lower() not in ("on", "off", "1", "0"):
        raise ValueError("expected on or off (or 1 or 0)")
    return text.strip().lower() in ("on", "1")


def _whole(least: int) -> Callable[[str], int]:
    return lambda text: int(_within(text, int, least, COUNT_MAX, f"expected a whole number of at least {least}"))


_count, _natural = _whole(1), _whole(0)


def saved_exit_code(text: str) -> int:
    """Parse the exit code for "saved": 1 to 255, except codes that have another meaning.

    Raises:
        ValueError: the text is no such number.
    """
    wanted = f"expected a number from 1 to 255 without another meaning, so not {', '.join(map(str, OTHER_CODES))}"
    value = int(_within(text, int, 1, 255, wanted))
    if value in OTHER_CODES:
        raise ValueError(wanted)
    return value


def _name(text: str) -> str:
    """Check a path or the name of a host. It is sent in messages and shown, so it has to be short and printable."""
    if len(text) > NAME_MAX or not text.isprintable():
        raise ValueError(f"expected at most {NAME_MAX} printable characters")
    return text


@functools.cache
def _path(text: str) -> str:
    """Return an absolute path. A relative one is where the process finds it first: programs change their directory."""
    return str(Path(_name(text)).absolute())


def _stripes(text: str) -> int:
    """Parse a number of parts, auto or off; see ``ttp.core.stripes``. 1 part is the whole shard."""
    word = text.strip().lower()
    if word in ("auto", "off"):
        return AUTO if word == "auto" else WHOLE
    wanted = f"expected auto, off or a number of parts up to {PARTS_ASKED_MAX}"
    value = int(_within(word, int, 0, PARTS_ASKED_MAX, wanted))
    return WHOLE if value == 1 else value


@functools.cache
def _token_in(path: str) -> str:
    """Return the token in a file, read once per process: the file may be removed when the job has begun."""
    return secret_in(Path(path).expanduser(), f"TTP_TOKEN_FILE={path!r:.200}")


def _absolute(text: str) -> str:
    if not Path(text).is_absolute():
        raise ValueError("expected an absolute path, so that every rank uses the same directory")
    return os.path.normpath(_name(text))


def _mindio(text: str) -> str:
    words = {"1": "1", "on": "1", "0": "", "off": "", MINDIO_FORCE: MINDIO_FORCE}
    if text not in words:  # nor in capitals: programs of MindIO see the text as it is
        raise ValueError("expected 1, 0 or force")
    return words[text]


def _one_of(*modes: str, like: Callable[[str], str] = str) -> Callable[[str], str]:
    def mode(text: str) -> str:
        if like(text) not in modes:
            raise ValueError(f"expected one of {', '.join(modes)}")
        return text

    return mode


def _modules(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, (word.strip() for word in text.split(","))))
    if not all(word.isidentifier() for name in found for word in name.split(".")):
        raise ValueError("expected names of modules, separated by commas")
    return found


def _setting(env: str, parse: Callable[[str], Any], default: Any) -> Any:
    return field(default=default, metadata={"env": env, "parse": parse})


@dataclass(frozen=True, slots=True)
class Config:
    """The settings, as the environment gives them. The environment overrides arguments."""

    port: int | None = _setting("TTP_PORT", port_number, None)
    """Port of the controller; its presence switches ttp on."""

    rescue_patience_s: float = _setting("TTP_OT", seconds, 360.0)
    """Time that healthy ranks may take to save after a failure. Must outlast the slowest save: bytes / bandwidth."""

    freeze_patience_s: float = _setting("TTP_FREEZE_S", seconds, 30.0)
    """Time that a freeze waits for a running update. Must outlast the longest optimizer step, including the first."""

    answer_patience_s: float = _setting("TTP_ANSWER_S", seconds, 5.0)
    """Time that a rank outside an update may take to acknowledge a freeze; then the rescue goes on without it."""

    reconnect_grace_s: float = _setting("TTP_GRACE_S", seconds, 1.0)
    """Time that a rank whose stream broke may take to come back. Only the release waits for it; the save does not."""

    heartbeat_s: float = _setting("TTP_HEARTBEAT_S", seconds, 1.0)
    """Time between two heartbeats. Each costs one message of 40 bytes per rank."""

    hang_s: float | None = _setting("TTP_HANG_S", _seconds_or_off, 60.0)
    """Time without any progress in a job after which it counts as hanging; longer if its own steps take longer.
    None: never. ``HCCL_ASYNC_ERROR_HANDLING=0``, which switches off Ascend's own watchdog, sets None, too."""

    stacks: bool = _setting("TTP_STACKS", _switch, True)
    """Whether ranks answer a real-time signal with the stacks of their threads."""

    abandoned_s: float = _setting("TTP_ABANDONED_S", seconds, 120.0)
    """Time after which a controller without connected ranks ends. Must outlast a restart: imports, rendezvous."""

    restore_patience_s: float = _setting("TTP_RESTORE_S", seconds, 600.0)
    """Time that restore() waits for the other ranks to call it too."""

    keep: int = _setting("TTP_KEEP", _count, 3)
    """Number of whole checkpoints to keep in save_dir."""

    save_dir: str | None = _setting("TTP_SAVE_DIR", _name, None)
    """Directory that overrides the ``save_dir`` argument of ``wrap_optimizer``."""

    fallback_dir: str | None = _setting("TTP_FALLBACK_DIR", _absolute, None)
    """Directory for saves when ``save_dir`` fails or hangs. On other storage, visible to every host that saves."""

    stall_s: float = _setting("TTP_STALL_S", seconds, 60.0)
    """Time after which a save or commit that writes nothing counts as hanging. A slow disk does not count."""

    digest: str = _setting("TTP_DIGEST", _one_of("sample", "all", "off"), "sample")
    """How much of its state a rank digests when frozen, to find replicas that differ: sample, all or off."""

    stream_barrier: bool = _setting("TTP_STREAM_BARRIER", _switch, False)
    """Whether ranks of sharded layouts meet before an update on the GPU's training stream; the host does not wait."""

    mirror: bool = _setting("TTP_MIRROR", _switch, False)
    """Whether each rank-local page is also kept on another host: random streams then survive the loss of a host."""

    buddy_every: int = _setting("TTP_BUDDY_EVERY", _count, 10)
    """Number of updates between copies with ``buddy=True``. Losing a rank costs up to twice that number minus one."""

    stripes: int = _setting("TTP_STRIPES", _stripes, AUTO)
    """Number of parts of a shard, which different replicas write at the same time; 0: no parts, -1: as many as help."""

    run_dir: str | None = _setting("TTP_RUN_DIR", _path, None)
    """Directory in which the processes of one host keep leases, logs and (without shared memory) pages."""

    token: str = _setting("TTP_TOKEN", token_text, "")
    """Shared secret of the job; requests without it are refused. ``ttp run`` makes one when none is given."""

    token_file: str | None = _setting("TTP_TOKEN_FILE", _name, None)
    """File of mode 0600 that holds the token; used where ``TTP_TOKEN`` is not set."""

    insecure: bool = _setting("TTP_INSECURE", _switch, False)
    """Whether a job without a token serves everyone who reaches its ports; if not, it listens on loopback only."""

    tls_cert: str | None = _setting("TTP_TLS_CERT", _path, None)
    """File with the certificate (PEM) of this process. It switches on encryption and mutual authentication (TLS)."""

    tls_key: str | None = _setting("TTP_TLS_KEY", _path, None)
    """File with the private key (PEM) of ``tls_cert``."""

    tls_ca: str | None = _setting("TTP_TLS_CA", _path, None)
    """File with the certificate (PEM) of the authority that signed the certificates of the job."""

    tls_key_password: str | None = _setting("TTP_TLS_KEY_PASSWORD", _path, None)
    """File with the password of ``tls_key``; None: the key is not encrypted."""

    tls_crl: str | None = _setting("TTP_TLS_CRL", _path, None)
    """File with the revocation lists (PEM) of the authority and intermediate authorities; None: none are checked."""

    mindio: str = _setting("TTP_MINDIO", _mindio, "")
    """Whether ``ttp run`` provides a package ``mindio_ttp``: 1, force (even where the original is), or empty."""

    bind: str = _setting("TTP_BIND", lambda text: _name(text).strip("[]"), "")
    """Address that every service of the job binds to; empty: all addresses of the machine, loopback without a token."""

    host: str = _setting("TTP_HOST", _name, "")
    """Name of this host; empty: the machine's. Ranks of one host share memory, and are lost together."""

    address: str = _setting("TTP_ADDRESS", lambda text: _name(text).strip("[]"), "")
    """Address at which other hosts reach this one; empty: the address of the interface towards MASTER_ADDR."""

    controller_addr: str = _setting(CONTROLLER_ADDR, _name, "")
    """Host of the controller if it is not MASTER_ADDR; it then replaces MASTER_ADDR in ``RankEnv.master_addr``."""

    standbys: int = _setting("TTP_STANDBYS", _natural, 2)
    """Number of standby controllers on other hosts, which take over when the first controller or its host is lost."""

    saved_exit_code: int = _setting("TTP_SAVED_EXIT_CODE", saved_exit_code, EXIT_SAVED)
    """Exit code of ``ttp run`` for "saved: start me again", for launchers that take 75 for a permanent failure."""

    relay: str = _setting("TTP_RELAY", _one_of("auto", "on", "off"), "auto")
    """Whether the ranks of a host share one stream to the controller; auto: in jobs of 64 ranks and more."""
    elastic: bool = _setting("TTP_ELASTIC", _switch, False)
    """Whether a job that has lost a host goes on with the others; set by ``ttp run --elastic``."""

    continuity: str = _setting("TTP_CONTINUITY", _one_of(*CONTINUITY_MODES), "warm")
    """How ranks start after a failure: off (new interpreters), warm (forked), keep (only the dead, forked)."""

    continue_s: float = _setting("TTP_CONTINUE_S", seconds, 30.0)
    """With keep: seconds from the checkpoint to the next update of the ranks; after that, all are started anew."""

    continue_max: int = _setting("TTP_CONTINUE_MAX", _count, 10)
    """With keep: number of times that ranks go on in their processes before all are started anew."""

    shadow_s: float | None = _setting("TTP_SHADOW_S", _seconds_or_off, 1.0)
    """With keep, on one host: if a save would take longer, ranks go on from a copy in memory; None: never."""

    keep_cuda: bool = _setting("TTP_KEEP_CUDA", _switch, False)
    """With keep: whether ranks whose state is on a CUDA device go on, too. Only for tests: it never ran with NCCL."""

    warm_skip: tuple[str, ...] = _setting("TTP_WARM_SKIP", _modules, ())
    """Modules and packages that are not imported ahead for warm restarts."""

    reschedule_s: float = _setting("TTP_RESCHEDULE_S", seconds, 270.0)
    """Seconds that restarting hosts wait for a missing one, under a rendezvous that hosts may join later."""

    metrics_port: int | None = _setting("TTP_METRICS_PORT", port_number, None)
    """Port on which controllers serve metrics for Prometheus; None: no metrics are served."""

    log_level: str = _setting("TTP_LOG", _one_of(*LOG_LEVELS, like=str.upper), "INFO")
    """Level of the ``ttp`` logger in ranks and controller."""

    log_format: str = _setting("TTP_LOG_FORMAT", _one_of("text", "json"), "text")
    """Format of the log: text for people, or a JSON object on each line."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read and check ``TTP_*``.

        Raises:
            ConfigError: a name is unknown (the text has the nearest known one), or a value does not parse.
        """
        environ = os.environ if environ is None else environ
        known = {f.metadata["env"]: f for f in fields(cls)}
        values: dict[str, Any] = {}
        ignored = NAMES_OF_MINDIO if environ.get(MINDIO_SWITCH) else frozenset()
        services = [n.removesuffix("SERVICE_HOST") for n in environ if n.endswith("_SERVICE_HOST")]  # of Kubernetes
        links = tuple(service + part for service in services for part in ("SERVICE_", "PORT"))
        for name in sorted(n for n in environ if n.startswith(PREFIX) and n not in ignored):
            if name.startswith(links) and (name not in known or "://" in environ[name]):
                continue
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else f"; known names: {', '.join(sorted(known))}"
                raise ConfigError(f"unknown environment variable {name}{hint}")
            if environ[name] == "" and name != "TTP_TOKEN":
                continue
            try:
                values[known[name].name] = known[name].metadata["parse"](environ[name])
            except ValueError as problem:
                shown = "" if name == "TTP_TOKEN" else f"={environ[name]!r:.200}"  # a secret is not shown
                raise ConfigError(f"{name}{shown} is not valid: {problem!s:.200}") from None
        if environ.get(HCCL_WATCHDOG, "").strip() == "0":
            values.setdefault("hang_s", None)
        if not values.get("token") and "token_file" in values:
            values["token"] = _token_in(values["token_file"])
        return cls(**values)

    def resolved_run_dir(self) -> Path:
        """Return the run directory: ``TTP_RUN_DIR``, or one per user and port under the temporary directory."""
        return Path(self.run_dir or Path(tempfile.gettempdir()) / f"ttp-{os.getuid()}" / f"{self.port or 'solo'}")


@dataclass(frozen=True, slots=True)
class RankEnv:
    """The rank of this process, as its launcher sets it in the environment."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    run_id: str
    launch: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> RankEnv:
        """Read ``RANK``, ``WORLD_SIZE`` and the like, as torchrun or a launcher of ``ttp.launch.rank_names`` sets them.

        Raises:
            ConfigError: one is missing, or its value is no valid number.
        """
        environ = in_torchruns_names(os.environ if environ is None else environ)
        rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
        if world_size > WORLD_SIZE_MAX:
            raise ConfigError(f"WORLD_SIZE={world_size} is more than the maximum of {WORLD_SIZE_MAX} ranks")
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK={rank} is not in 0..{world_size - 1} (WORLD_SIZE={world_size})")
        home = CONTROLLER_ADDR if environ.get(CONTROLLER_ADDR) else "MASTER_ADDR"
        if not environ.get(home):
            problem = "TTP_PORT is set but MASTER_ADDR is not: start the job with `ttp run` or torchrun"
            raise ConfigError(f"{problem}, or set it to the address of rank 0's host")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=of_launcher(environ, "LOCAL_RANK", _natural, "0"),
            master_addr=of_launcher(environ, home, _name, ""),
            run_id=of_launcher(environ, "TORCHELASTIC_RUN_ID", _name, "none"),
            launch=of_launcher(environ, "TORCHELASTIC_RESTART_COUNT", _natural, "0"),
        )


def of_launcher(environ: Mapping[str, str], name: str, parse: Callable[[str], Any], default: str) -> Any:
    """Parse a variable of a launcher. Raises ``ConfigError``."""
    text = environ.get(name, default)
    try:
        return parse(text)
    except ValueError as problem:
        raise ConfigError(f"{name}={text!r:.200} is not valid: {problem!s:.200}") from None


def _integer(environ: Mapping[str, str], name: str) -> int:
    if (text := environ.get(name)) is None:
        problem = f"TTP_PORT is set but {name} is not"
        raise ConfigError(f"{problem}: start the job with `ttp run` or torchrun, or unset TTP_PORT")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number") from None
