"""The toy training state of simulated jobs, and the toy storage, on which an unfinished file has no content.

The state of a shard is two words that an update writes one after the other, so that a copy taken during an update is
seen to be torn. Each rank has one more word, its random stream, which each forward pass advances. The gradient depends
on every word of every rank, so a resume that is wrong anywhere leads to other bits in the end.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.stripes import Part, base_of, lacking

Words = tuple[int, int]
Pages = dict[tuple[Rank, int], tuple[Version, int]]
"""The pages in the shared memory of one host: (rank, slot) -> (version, random stream)."""
SLOTS = 3
"""Slots of a page: a rank may write version n + 1 while a neighbour is still at n - 1."""


class InvariantBroken(AssertionError):  # noqa: N818 - the name says it
    """An invariant was broken; the text says which."""


def hello(rank: int, layout: Layout, **more: Any) -> m.Hello:
    """Return the ``Hello`` of a rank that starts in a made-up job, with the fields ``more`` replaced."""
    facts: dict[str, Any] = {
        "protocol_major": m.PROTOCOL_MAJOR, "protocol_minor": m.PROTOCOL_MINOR, "ttp_version": "0", "run_id": "job",
        "launch": 0, "incarnation": 0, "nonce": f"n{rank}", "world_size": layout.world_size,
        "layout_digest": layout.digest, "host": "h", "pid": 100 + rank, "local_rank": rank, "save_dir": "/save",
        "framework": "toy",
    }  # fmt: skip
    return m.Hello(rank=Rank(rank), **{**facts, **more})


def mix(*words: int | str) -> int:
    """Return a 32-bit hash of the arguments; it is the same on every machine."""
    return zlib.crc32(repr(words).encode())


@dataclass(slots=True)
class ToyState:
    """The state of the whole job at one version."""

    version: Version
    shards: dict[Shard, Words]
    random: dict[Rank, int]

    @classmethod
    def initial(cls, layout: Layout) -> ToyState:
        """Return the state of version 0."""
        shards = {s: (mix("a", s), mix("b", s)) for s in layout.groups}
        return cls(Version(0), shards, {Rank(r): mix("rng", r) for r in range(layout.world_size)})

    def advanced(self, layout: Layout) -> ToyState:
        """Return the state one update later, computed without ttp."""
        drawn = {r: draw(word) for r, word in self.random.items()}
        parts = (contribution([self.shards[s] for s in layout.shards_of(r)], drawn[r]) for r in self.random)
        gradient = reduce(parts)
        shards = {s: (update(a, gradient), update(b, gradient)) for s, (a, b) in self.shards.items()}
        return ToyState(Version(self.version + 1), shards, drawn)


def words_of(words: Words, part: Part, *, uneven: bool = False) -> tuple[tuple[int, int], ...]:
    """Return the words of a shard that belong to one part of it, as (place, word).

    Args:
        words: the words of the shard.
        part: the part.
        uneven: divide the words in reverse order, unlike other replicas.
    """
    placed = list(enumerate(words))
    return tuple(placed[::-1] if uneven else placed)[part.index - 1 :: part.count]


def draw(random: int) -> int:
    """Return the random stream after a forward pass."""
    return mix("draw", random)


def contribution(words: list[Words], random: int) -> int:
    """Return one rank's part of the all-reduce: a hash of its shards' words and its random stream."""
    return mix(*(w for pair in words for w in pair), random)


def reduce(parts: Iterable[int]) -> int:
    """Return the result of the all-reduce: a 32-bit sum, so the order does not matter."""
    return sum(parts) & 0xFFFFFFFF


def update(word: int, gradient: int) -> int:
    """Return a word of a shard after an update with ``gradient``."""
    return mix(word, gradient)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint."""

    version: Version
    incident: str
    incarnation: int
    shards: Mapping[Shard, Words]
    random: Mapping[Rank, int]


@dataclass(slots=True)
class File:
    """A file of a draft; ``content`` is None until its writer has synced it."""

    writer: Rank
    content: tuple[object, ...] | None = None


@dataclass(slots=True)
class ToyStorage:
    """The drafts and checkpoints in all directories. Methods raise ``InvariantBroken`` on a breach of I1 or I4.

    Args:
        layout: each of its shards must be in a checkpoint exactly once.
        keep: number of checkpoints that retention keeps.
        drafts: the files of each draft, by name.
        checkpoints: the committed checkpoints.
    """

    layout: Layout
    keep: int = 3
    drafts: dict[str, dict[str, File]] = field(default_factory=dict)
    checkpoints: dict[Version, Checkpoint] = field(default_factory=dict)

    def begin(self, draft: str, file: str, writer: Rank) -> None:
        """Create a file of a draft."""
        files = self.drafts.setdefault(draft, {})
        if file in files:
            raise InvariantBroken(f"I4: ranks {files[file].writer} and {writer} write one file, {draft}/{file}")
        files[file] = File(writer)

    def finish(self, draft: str, file: str, content: tuple[object, ...]) -> None:
        """Make a file durable."""
        self.drafts[draft][file].content = content

    def commit(self, order: m.Commit) -> None:
        """Commit a draft. Raises ``InvariantBroken`` where a real store would make a bad checkpoint."""
        there = self.checkpoints.get(order.version)
        pages = {Rank(r) for r in range(self.layout.world_size)}.difference(order.missing_pages)
        lent = there.random if there is not None and there.incarnation == order.incarnation else {}
        if there is not None and there.incident == order.incident and pages <= lent.keys():
            return  # this rank or another one has committed it before, not without pages that are there now
        words: dict[Shard, dict[int, int]] = {}
        random: dict[Rank, int] = {}
        files = self.drafts.get(f"{order.directory}/{order.draft}", {})
        for piece in order.pieces:
            file = files.get(piece.file)
            if file is None or file.content is None or piece.digest != digest(file.content):
                raise InvariantBroken(f"I4: {order.draft}/{piece.file} is unfinished or differs from its digest")
            self._take(piece, file.content, words, random)
        absent_shards = lacking(self.layout.groups.keys(), {Shard(piece.shard) for piece in order.pieces})
        if absent_shards or any(set(places) != {0, 1} for places in words.values()):
            raise InvariantBroken(f"I1: version {order.version} lacks {absent_shards or 'words'}")
        shards = {shard: (words[shard][0], words[shard][1]) for shard in self.layout.groups}
        absent = {Rank(r) for r in range(self.layout.world_size)} - set(random)
        if not absent >= set(order.missing_pages):
            raise InvariantBroken(f"I1: the order calls pages {order.missing_pages} missing, but {sorted(absent)} are")
        if there is not None and there.incarnation > order.incarnation:
            raise InvariantBroken(f"I1: version {order.version} of a later incarnation is replaced by an earlier one")
        checkpoint = Checkpoint(order.version, order.incident, order.incarnation, shards, {**lent, **random})
        self.checkpoints[order.version] = checkpoint
        for old in sorted(self.checkpoints)[: -self.keep]:
            del self.checkpoints[old]

    def _take(
        self, piece: m.Piece, content: tuple[object, ...], words: dict[Shard, dict[int, int]], random: dict[Rank, int]
    ) -> None:
        entries = cast("tuple[tuple[Rank, int], ...]", content)
        if piece.kind == "shard":
            places = words.setdefault(base_of(Shard(piece.shard)), {})
            if not places.keys().isdisjoint(dict(entries)):
                raise InvariantBroken(f"I1: shard {piece.shard} is in the checkpoint twice")
            places.update(entries)
            return
        for rank, word in entries:
            if random.get(rank, word) != word:  # a page and its mirror may both be in the checkpoint
                raise InvariantBroken(f"I1: two different pages of rank {rank} are in the checkpoint")
            random[rank] = word

    @property
    def newest(self) -> Checkpoint | None:
        """The newest checkpoint, from which a restart resumes."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None


def digest(content: tuple[object, ...]) -> str:
    """Return the digest of a file's content."""
    return f"{mix(repr(content)):08x}"
