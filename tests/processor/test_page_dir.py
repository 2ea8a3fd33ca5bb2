"""Page directories are made, shared, and removed with the last process, however it ends."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.making import making
from ttp.config import RankEnv
from ttp.processor.local_state import page_dir
from ttp.processor.local_state.page_dir import LOCK_FILE, PageDirectory, remove_abandoned
from ttp.processor.local_state.pages import PageWriter

Make = Callable[..., PageDirectory]
ENV = RankEnv(rank=0, world_size=2, local_rank=0, master_addr="host", run_id="run", launch=0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes page directories, in ``tmp_path`` as the shared memory."""

    def one(env: RankEnv = ENV, shared_memory: Path = tmp_path) -> PageDirectory:
        return PageDirectory(tmp_path / "run", env, 1, shared_memory)

    with making(one, PageDirectory.close) as make:
        yield make


def test_ranks_of_a_job_share_one_and_the_last_removes_it(tmp_path: Path, make: Make) -> None:
    first, second = (make() for _ in range(2))
    assert first.path == second.path and first.path.parent == tmp_path
    assert first.path.stat().st_mode & 0o777 == 0o700
    (first.path / "rank_0.page").write_bytes(b"x")
    first.close()
    assert second.path.exists()
    second.close()
    second.close()  # harmless
    assert not second.path.exists()


def test_a_page_that_was_removed_takes_up_memory_no_longer_than_it_is_written(tmp_path: Path) -> None:
    """Each rank whose page is removed makes another one."""
    removed = PageWriter(tmp_path / "pages", 0)
    removed.path.unlink()
    still_open = f"{removed.path} (deleted)"
    assert still_open in _opened()
    del removed
    gc.collect()
    assert still_open not in _opened()


def _opened() -> list[str]:
    return [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]


def test_other_jobs_have_others(tmp_path: Path, make: Make) -> None:
    one, two = (make(env) for env in (ENV, replace(ENV, run_id="another")))
    assert one.path != two.path


def test_containers_with_equal_settings_have_others(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``docker run --ipc=host`` two jobs share the memory, and on loopback not one of their settings differs.

    Otherwise each rank replaces the page of the same rank of the other job.
    """
    found: list[str] = []
    for address in ("127.0.0.1", "host"):
        env = replace(ENV, master_addr=address)
        for container in ("a", "b"):
            (tmp_path / container).touch()
            monkeypatch.setattr(page_dir, "NETWORK", tmp_path / container)
            pages = make(env)
            found.append(pages.path.name)
            pages.close()
    assert found[0] != found[1], "each container has a loopback of its own"
    assert found[2] == found[3], "containers of one job meet in memory"


def test_without_shared_memory_the_run_directory_serves(tmp_path: Path, make: Make) -> None:
    blocked = tmp_path / "no-directory"
    blocked.write_text("")
    assert make(shared_memory=blocked).path == tmp_path / "run" / "pages"
    with pytest.raises(OSError, match=rf"no place .*\({blocked}/.*: Not a directory; {blocked}/pages: Not a directory"):
        PageDirectory(blocked, ENV, 1, blocked)


@pytest.mark.parametrize(("blocks", "files"), [(10, 1000), (10_000, 3)])
def test_shared_memory_that_is_full_is_used_by_no_rank_or_by_all(
    blocks: int, files: int, tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = make()
    full = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_blocks=1000, f_favail=files, f_files=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    late = make()
    assert late.path == early.path
    early.close()
    late.close()
    assert make().path == tmp_path / "run" / "pages"


def test_a_name_that_somebody_else_prepared_is_not_used(tmp_path: Path, make: Make) -> None:
    honest = make()
    name = honest.path.name
    honest.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / name).symlink_to(elsewhere)
    assert make().path == tmp_path / "run" / "pages"


def test_a_process_that_was_stopped_while_it_removed_the_directory_is_not_waited_for(
    tmp_path: Path, make: Make
) -> None:
    first = make()
    with (first.path / LOCK_FILE).open() as lock:
        fcntl.flock(first._lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        found: list[PageDirectory] = []
        looking = threading.Thread(target=lambda: found.append(make()), daemon=True)
        looking.start()
        looking.join(60.0)
        assert [pages.path for pages in found] == [tmp_path / "run" / "pages"]


def test_after_a_crash_of_all_the_next_one_cleans_up(tmp_path: Path, make: Make) -> None:
    code = (
        "import sys, signal; from pathlib import Path; from ttp.config import RankEnv\n"
        "from ttp.processor.local_state.page_dir import PageDirectory\n"
        "env = RankEnv(0, 1, 0, 'a', 'crashed', 0)\n"
        f"pages = PageDirectory(Path({str(tmp_path / 'run')!r}), env, 1, Path({str(tmp_path)!r}))\n"
        "print(pages.path, flush=True); signal.pause()"
    )
    victim = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    left = Path(victim.stdout.readline().strip())
    assert left.exists() and remove_abandoned(tmp_path) == []  # it lives
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    make()
    assert not left.exists()


def test_a_directory_without_a_lock_is_left_alone(tmp_path: Path) -> None:
    being_made = tmp_path / f"ttp-{os.getuid()}-000000000000"
    being_made.mkdir()
    assert remove_abandoned(tmp_path) == [] and being_made.exists()
    (being_made / LOCK_FILE).touch()
    assert remove_abandoned(tmp_path) == [being_made]
