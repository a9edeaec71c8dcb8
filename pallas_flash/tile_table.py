"""Tables of tiles: which one was the fastest where, on one GPU architecture."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import pathlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

# Kinds of masks, and whose tile to take where one has none of its own.
_LIKE = {
    "full": ("full", "masked", "packed", "window"),
    "masked": ("masked", "packed", "full", "window"),
    "packed": ("packed", "masked", "window", "full"),
    "window": ("window", "packed", "masked", "full"),
}

KERNELS = ("forward", "dq", "dkv", "dk", "dv", "dscore")

Fields = tuple[tuple[str, int], ...]  # of a tier's own class of tiles: names and values, in order of the names


class Situation(NamedTuple):
    """What of a problem decides the tile of one kernel.

    Attributes:
      tier: who runs it, as in ``implementation``.
      kernel: "forward", "dq", "dkv" ("dk" and "dv" for wide heads) or "dscore".
      bits: of an element of q, k and v: 16 or 32.
      dim: channels of the larger of the two head dims, as a tile holds them.
      mask: "full" (none), "masked", "packed" (documents) or "window".
      grouped: whether a program loops over the query heads of a group.
      length: tokens of the side that a program walks.
    """

    tier: str
    kernel: str
    bits: int
    dim: int
    mask: str
    grouped: bool
    length: int

    def __str__(self) -> str:
        group = ", grouped heads" if self.grouped else ""
        return f"{self.tier} {self.kernel}, {self.bits} bits, D={self.dim}, {self.mask}{group}, {self.length} tokens"


class Entry(NamedTuple):
    """The fastest tile of a situation, and the microseconds of the call that was timed with it; None if none was."""

    situation: Situation
    tile: Fields
    us: float | None = None


class TileTable:
    """Tiles by situation; ``with table:`` kernels traced inside take theirs from it, before those that we ship.

    A table that :func:`pallas_flash.autotune` gave serves calls like those that it saw: the same kernels, element
    size, head dim and kind of mask, and lengths from half to twice. JAX compiles anew what was compiled outside. Tables
    may be nested: the inner one is asked first. No tile changes a result beyond rounding.

    Args:
      entries: an :class:`Entry` for each situation.
      origin: where the numbers are from, in words; ``explain`` shows it.

    >>> import pallas_flash
    >>> table = pallas_flash.TileTable([], "nothing yet")
    >>> with table:
    ...     pass
    >>> table.save("/tmp/pallas_flash_table.json")
    >>> len(pallas_flash.TileTable.load("/tmp/pallas_flash_table.json").entries)
    0
    """

    def __init__(self, entries: Iterable[Entry] = (), origin: str = "tuned here"):
        self.entries = tuple(entries)
        for entry in self.entries:
            _check(entry)
        if not isinstance(origin, str):
            raise ValueError(f"origin must be a text, got {origin!r}")
        self.origin = origin
        self._entered: dict[int, list[Any]] = collections.defaultdict(list)  # by thread

    def __enter__(self) -> TileTable:
        context = _active((self, *_active.value))
        context.__enter__()
        self._entered[threading.get_ident()].append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered[threading.get_ident()].pop().__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TileTable) and (self.entries, self.origin) == (other.entries, other.origin)

    def __hash__(self) -> int:
        return hash((self.entries, self.origin))

    def __repr__(self) -> str:
        rows = [f"  {entry.situation}: {dict(entry.tile)}" for entry in self.entries]
        return "\n".join([f"TileTable, {self.origin}:", *rows])

    def __or__(self, other: TileTable) -> TileTable:
        """Both tables' entries; this one's where both know a situation."""
        own = {entry.situation for entry in self.entries}
        return TileTable([*self.entries, *(e for e in other.entries if e.situation not in own)], self.origin)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the table as JSON, an entry a line."""
        lines = [
            json.dumps({**entry.situation._asdict(), "tile": dict(entry.tile), "us": entry.us})
            for entry in sorted(self.entries, key=lambda entry: entry.situation)
        ]
        body = ",\n  ".join(lines)
        pathlib.Path(path).write_text(f'{{"origin": {json.dumps(self.origin)},\n "entries": [\n  {body}\n ]}}\n')

    @classmethod
    def load(cls, path: str | pathlib.Path) -> TileTable:
        """Reads what :meth:`save` wrote.

        Raises:
          ValueError: the file is not such a table.
        """
        try:
            read = json.loads(pathlib.Path(path).read_text())
            return cls([_entry(row) for row in read["entries"]], read["origin"])
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a table of tiles that TileTable.save wrote: {error!r}") from None

    def nearest(self, wanted: Situation) -> Entry | None:
        """The entry most like a situation: of its kernel, then of its dim, group, mask and length, in this order."""
        alike = [entry for entry in self.entries if _comparable(entry.situation, wanted)]
        return min(alike, key=lambda entry: _distance(entry.situation, wanted), default=None)

    def close(self, wanted: Situation) -> Entry | None:
        """The entry that was made for such calls, if there is one."""
        entry = self.nearest(wanted)
        if entry is None or entry.situation._replace(length=wanted.length) != wanted:
            return None
        return entry if abs(_octaves(entry.situation.length, wanted.length)) <= 1 else None


_active = jax.make_user_context(())  # of tables, the innermost first


def active() -> tuple[TileTable, ...]:
    """The tables whose ``with`` this thread is in, the innermost first."""
    return _active.value


class Asked:
    """Which kernels run: ``candidates``, the tiles of each by situation."""

    def __init__(self) -> None:
        self.candidates: dict[Situation, tuple[Fields, ...]] = {}


_listener = jax.make_user_context(None)


@contextlib.contextmanager
def asking() -> Iterator[Asked]:
    """Collects the kernels of what is traced inside; being another :class:`Asked`, JAX traces compiled code anew."""
    asked = Asked()
    with _listener(asked):
        yield asked


def listener() -> Asked | None:
    """Who wants to know which tiles are asked for."""
    return _listener.value


def _entry(row: dict[str, Any]) -> Entry:
    fields = {name: row[name] for name in Situation._fields}
    return Entry(Situation(**fields), tuple(sorted(row["tile"].items())), row["us"])


def _check(entry: Entry) -> None:
    """What every tier can count on; which sizes of tiles a kernel takes, its tier says where the tile is used."""
    if not isinstance(entry, Entry):
        raise TypeError(f"entries must be pallas_flash.tile_table.Entry, got {entry!r}")
    s = entry.situation
    sound = {
        "tier": isinstance(s.tier, str),
        "kernel": s.kernel in KERNELS,
        "bits": s.bits in (16, 32),
        "dim": isinstance(s.dim, int) and s.dim > 0,
        "mask": isinstance(s.mask, str) and s.mask in _LIKE,
        "grouped": isinstance(s.grouped, bool),
        "length": isinstance(s.length, int) and s.length >= 0,
    }
    for name, is_sound in sound.items():
        if not is_sound:
            raise ValueError(f"an entry of a table of tiles has {name}={getattr(s, name)!r}")
    for name, value in entry.tile:
        if not isinstance(value, int):
            raise ValueError(f"an entry of a table of tiles has {name}={value!r}, which must be a whole number")
    if not isinstance(entry.us, int | float | None):
        raise ValueError(f"an entry of a table of tiles has us={entry.us!r}")


def _comparable(a: Situation, wanted: Situation) -> bool:
    return a[:3] == wanted[:3] and a.dim >= wanted.dim


def _distance(a: Situation, wanted: Situation) -> tuple[Any, ...]:
    mask = _LIKE[wanted.mask].index(a.mask)
    return a.dim, a.grouped != wanted.grouped, mask, abs(_octaves(a.length, wanted.length)), a.length


def _octaves(a: int, b: int) -> float:
    return math.log2(max(a, 1) / max(b, 1))
