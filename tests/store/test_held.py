"""Checkpoints that are held in memory until the writer has copied them to the storage."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.damage import flip
from tests.store.conftest import World
from ttp.core.layout import Version
from ttp.launch import own_module, shadow
from ttp.launch.shadow import Shadows, Writer, serve
from ttp.store.catalog import find_whole
from ttp.store.choice import look_back
from ttp.store.held import Held, Order
from ttp.store.manifest import manifest_digest
from ttp.store.names import draft_name
from ttp.store.verify import verify_checkpoint


@pytest.fixture
def save_dir(tmp_path: Path) -> Path:
    found = tmp_path / "storage"
    found.mkdir()
    return found


@pytest.fixture
def held(tmp_path: Path, save_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Return the ``Held`` of ``save_dir``."""
    monkeypatch.setattr(shadow, "RETRY_MIN_S", 0.001)
    found = Held(tmp_path / "ttp-held-0-test")
    found.make()
    monkeypatch.setattr("ttp.store.choice.Held.of", lambda _: found)
    found.give(order_for(save_dir))
    return found


def order_for(save_dir: Path, fallback: str = "", incident: str = "first") -> Order:
    return Order(incident, draft_name(Version(12), incident), str(save_dir), fallback, 3, 5.0, 0.0)


def hold(held: Held, version: int = 12, incident: str = "first") -> Path:
    """Hold a checkpoint in memory."""
    return World(held.memory).make(version, incident)


def versions(place: Path) -> list[int]:
    return [candidate.version for candidate in find_whole(place)[0]]


def bring(held: Held) -> bool:
    order = held.order()
    assert order is not None
    return Writer(held, order).run()


def test_it_becomes_the_same_checkpoint(held: Held, save_dir: Path) -> None:
    """The digest is the same, so it does not matter which of the two a rank has found."""
    path = hold(held)
    digest = manifest_digest(path)
    assert held.unfinished() == 12
    assert bring(held)
    there = save_dir / path.name
    assert manifest_digest(there) == digest and versions(save_dir) == [12]
    assert (held.state().path, held.state().incident, held.state().problem) == (str(there), "first", "")
    assert held.unfinished() == 0 and not list(held.memory.iterdir())
    assert held.state().written >= held.state().size > 0 and held.speed() > 0
    assert [path.name for path in save_dir.iterdir()] == [there.name]


def test_it_is_restored_from_memory_before_that(held: Held, save_dir: Path) -> None:
    World(save_dir).make(11)
    path = hold(held)
    found = look_back(save_dir)
    assert [c.version for c in found.candidates] == [12, 11]
    assert found.where[found.candidates[0]] == path
    bring(held)
    again = look_back(save_dir)
    assert again.candidates == found.candidates and again.where[again.candidates[0]] == save_dir / path.name


def test_a_newer_checkpoint_takes_its_place(held: Held, save_dir: Path) -> None:
    hold(held)
    World(save_dir).make(13, "second")
    assert bring(held)
    assert versions(save_dir) == [13] and not list(held.memory.iterdir())


def test_a_newer_one_that_is_damaged_does_not(held: Held, save_dir: Path) -> None:
    """The ranks could not restore it either."""
    path = hold(held)
    newer = World(save_dir).make(13, "second")
    flip(newer / "__0_1.distcp")
    assert bring(held)
    assert held.state().path == str(save_dir / path.name) and versions(save_dir) == [12] and newer.exists()


def test_what_is_damaged_in_its_own_place_is_written_again(held: Held, save_dir: Path) -> None:
    hold(held)
    flip(World(save_dir).make(12) / "__0_1.distcp")
    assert bring(held)
    assert versions(save_dir) == [12] and not verify_checkpoint(save_dir / held.state().path)


def test_ranks_write_to_memory_although_a_newer_one_is_damaged(held: Held, save_dir: Path) -> None:
    """It is read once, while the ranks have not written theirs."""
    newer = World(save_dir).make(13, "second")
    flip(newer / "__0_1.distcp")
    order = replace(order_for(save_dir), patience_s=3600.0)
    writer = Writer(held, order)
    assert not writer._is_late()
    (newer / "__0_1.distcp").unlink()
    assert not writer._is_late()
    World(save_dir).make(14, "third")
    assert writer._is_late()


def test_what_the_storage_has_changed_is_written_once_more(
    held: Held, save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hold(held)
    spoilt: list[Path] = []
    write = Writer._write

    def and_spoil(self: Writer, *args: object) -> None:
        write(self, *args)  # type: ignore[arg-type]
        if not spoilt:
            flip(save_dir / path.name / "__0_1.distcp")
            spoilt.append(path)

    monkeypatch.setattr(Writer, "_write", and_spoil)
    assert bring(held)
    assert spoilt and versions(save_dir) == [12] and not held.unfinished()


def test_what_is_verified_comes_from_the_storage_and_not_from_the_page_cache(
    held: Held, save_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hold(held)
    dropped: set[Path] = set()
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: dropped.add(Path(f"/proc/self/fd/{fd}").readlink()))
    assert bring(held)
    assert save_dir / path.name / "__0_1.distcp" in dropped


def test_damaged_memory_is_said_and_never_saved(held: Held, save_dir: Path) -> None:
    flip(hold(held) / "__0_1.distcp")
    held.give(replace(order_for(save_dir), patience_s=0.1))
    assert not bring(held)
    assert "damaged in memory" in held.state().problem and versions(save_dir) == []


def test_the_fallback_is_tried_where_the_storage_refuses(held: Held, tmp_path: Path) -> None:
    hold(held)
    (tmp_path / "file").write_text("no directory")
    spare = tmp_path / "spare"
    held.give(order_for(tmp_path / "file" / "checkpoints", str(spare)))
    assert bring(held)
    assert versions(spare) == [12] and held.state().path.startswith(str(spare))


def test_what_was_given_up_leaves_nothing(held: Held, save_dir: Path) -> None:
    """Ranks could not write it to memory, and have saved it to the storage."""
    World(held.memory).write_draft(12)
    World(save_dir).make(12)
    assert bring(held)
    assert not list(held.memory.iterdir())


def test_what_is_never_written_is_not_looked_for_all_the_time(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm was false, so ranks train on and have saved nothing; each look also reads the slow storage."""
    now, pauses = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(shadow, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    order = held.order()
    assert order is not None
    World(held.memory).write_draft(12)
    assert Writer(held, replace(order, patience_s=360.0)).run()
    assert len(pauses) < 1000 and max(pauses[:10]) < 0.05
    assert not list(held.memory.iterdir())


def test_what_others_have_left_is_removed(held: Held, save_dir: Path) -> None:
    World(held.memory).write_draft(10, "older")
    hold(held, 12)
    assert bring(held) and not list(held.memory.iterdir())


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "draft"])
def test_the_next_one_is_copied_too_which_ranks_write_while_old_ones_are_removed(
    held: Held, save_dir: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """That may take long, and the first one is durable, so another death may let ranks hold a second one."""
    hold(held)
    copied: list[str] = []

    def tidy(*_: object, **__: object) -> None:
        copied.append(held.state().incident)
        second = replace(order_for(save_dir), incident="second", draft=draft_name(Version(13), "second"))
        held.give(replace(second, began_unix_s=len(copied)))  # each rank gives the order, at its own time
        if copied == ["first"]:
            World(held.memory).make(13, "second") if whole else World(held.memory).write_draft(13, "second")

    def run(self: Writer) -> bool:
        runs.append(self._order.incident)
        return stock(self)

    stock, runs = Writer.run, list[str]()
    monkeypatch.setattr(Writer, "run", run)
    monkeypatch.setattr("ttp.launch.shadow.catalog.tidy", tidy)
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr("ttp.launch.shadow.time.sleep", lambda _: None if whole else hold(held, 13, "second"))
    assert shadow.main(held.root) == 0
    assert versions(save_dir) == [13, 12] and not list(held.memory.iterdir())
    assert runs == copied == ["first", "second"], "none is read again"


def test_it_stays_while_somebody_restores_it(held: Held, save_dir: Path) -> None:
    path = hold(held)
    through = threading.Thread(target=bring, args=(held,))
    with held.reading():
        through.start()
        while held.unfinished():
            pass
        assert path.is_dir() and versions(save_dir) == [12]
    through.join()
    assert not path.exists()


def test_without_the_lock_a_restore_goes_on(held: Held) -> None:
    """The file system in memory may be full, or a launcher may have removed the directory just now."""
    with pytest.raises(FileExistsError), held.reading():
        raise FileExistsError("of the restore itself")
    (held.root / "readers").unlink()
    (held.root / "readers").symlink_to("elsewhere")
    with held.reading():
        held.root.rename(held.root.with_name("gone"))
    with held.reading():
        pass


def test_a_place_whose_name_is_not_utf_8_has_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(os.fsdecode(b"caf\xe9"))
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    assert Held.of(tmp_path / "link").root == Held.of(tmp_path / os.fsdecode(b"caf\xe9")).root


def ended(shadows: Shadows) -> bool:
    """Wait as a launcher does before it ends, and for its thread: unlike a launcher, this process goes on."""
    durable = shadows.wait(60.0)
    if shadows._starts is not None:
        shadows._starts.join()
    return durable


def test_a_process_does_it_and_there_is_one(held: Held, save_dir: Path, tmp_path: Path) -> None:
    """The launcher, which finds the file, starts a writer if none lives."""
    hold(held)
    folder = tmp_path / "run" / shadow.FOLDER
    folder.mkdir(parents=True)
    (folder / "it").write_text(str(held.root))
    with held.serving() as mine:
        assert mine and held.is_served()
        serve(held)  # one lives: nothing is started
        assert not Shadows(tmp_path / "run").wait(0.05)
    assert ended(Shadows(tmp_path / "run"))
    assert versions(save_dir) == [12] and not held.unfinished() and not held.root.exists()


def test_a_writer_that_has_ended_before_it_was_seen_is_not_waited_for(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is durable: the storage was faster than the rank that committed to memory."""
    monkeypatch.setattr(shadow, "own_module", lambda _: ["true"])
    monkeypatch.setattr(shadow, "START_S", 60.0)
    hold(held)
    serve(held, lambda: not held.unfinished() or not bring(held))
    monkeypatch.setattr(shadow, "START_S", 0.01)
    with pytest.raises(OSError, match="did not start"):
        serve(held)


def test_a_process_that_was_forked_meanwhile_keeps_no_lock(held: Held) -> None:
    held.make()
    with held.serving():
        (lock,) = [each for each in Path("/proc/self/fd").iterdir() if each.resolve() == held.root / "writer"]
        theirs = os.dup(int(lock.name))
    assert not held.is_served()
    os.close(theirs)


def test_a_launcher_does_not_wait_for_a_writer_that_does_not_start(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may hang on the storage, and the launcher has ranks to watch."""
    hold(held)
    folder = tmp_path / "run" / shadow.FOLDER
    folder.mkdir(parents=True)
    (folder / "it").write_text(str(held.root))
    hangs = tmp_path / "python"
    hangs.write_text(f"#!/bin/sh\n: > {tmp_path}/asked\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.1; done\n")
    hangs.chmod(0o755)
    shadows = Shadows(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(own_module, "sys", SimpleNamespace(executable=str(hangs)))
        patch.setattr(shadow, "START_S", 60.0)
        assert not shadows.wait(0.2)
        assert shadows._starts is not None and shadows._starts.is_alive()
        patch.setattr(shadow, "START_S", 0.0)
        (tmp_path / "go").touch()
        shadows._starts.join()
        assert (tmp_path / "asked").exists()
    assert ended(shadows)


def test_what_belongs_to_somebody_else_is_not_read(tmp_path: Path, save_dir: Path) -> None:
    held = Held(tmp_path / "memory")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    held.root.symlink_to(elsewhere)
    with pytest.raises(OSError, match="belongs to another user"):
        held.make()
    assert held.checkpoint() is None and held.unfinished() == 0
    with held.reading():
        assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("wrong", [b"", b"{", b"[1]", b'{"incident": 1, "more": 2}'])
def test_half_a_word_is_none(held: Held, wrong: bytes) -> None:
    (held.root / "state.json").write_bytes(wrong)
    (held.root / "order.json").write_bytes(wrong)
    (held.root / "speed").write_bytes(wrong)
    assert held.order() is None and held.state().path == "" and held.speed() == 0


def test_the_speed_of_the_storage_is_measured(held: Held, save_dir: Path) -> None:
    assert held.speed() == 0
    held.measure(save_dir)
    assert held.speed() > 0 and not list(save_dir.iterdir())
    held.measure(save_dir / "not there")
    assert held.speed() > 0


def test_a_look_whether_there_is_a_writer_makes_no_file(tmp_path: Path) -> None:
    """The launcher may be removing the directory."""
    held = Held(tmp_path / "held")
    held.make()
    assert not held.is_served() and list(held.root.iterdir()) == [held.memory]


def test_a_look_whether_there_is_a_writer_does_not_turn_one_away(tmp_path: Path) -> None:
    """The rank that starts the writer polls all the time whether it runs."""
    held = Held(tmp_path / "held")
    held.make()
    with contextlib.ExitStack() as look:
        look.enter_context(held._locked("writer", fcntl.LOCK_EX | fcntl.LOCK_NB))
        threading.Timer(0.05, look.pop_all().close).start()
        with held.serving() as mine:
            assert mine
