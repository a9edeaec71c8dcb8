"""Real text that every machine has: the source files of the running Python's standard library.

Each file is a document.  Documents are packed into rows; segment ids keep them from seeing each other.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np

VOCABULARY = 256  # bytes


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of packed documents; a target of another document than its token is masked out of the loss.

    Attributes:
      tokens, targets: int32 [batch, length].
      segments: int32 [batch, length], which document of the row each token belongs to.
      positions: int32 [batch, length], counted from the start of the document.
      counted: bool [batch, length], targets that enter the loss.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    counted: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        return dataclasses.asdict(self)


class Corpus:
    """Bytes of all documents of one split, end to end, and where each starts."""

    def __init__(self, documents: list[bytes]):
        self.text = np.frombuffer(b"".join(documents), np.uint8)
        self.starts = np.cumsum([0] + [len(d) for d in documents])

    def batches(self, batch: int, length: int, seed: int) -> Iterator[Batch]:
        """Endless batches of rows that start at random places."""
        rng = np.random.default_rng(seed)
        while True:
            begins = rng.integers(0, len(self.text) - length, batch)
            places = begins[:, None] + np.arange(length + 1)[None, :]
            document = np.searchsorted(self.starts, places, side="right")
            inside = places - self.starts[document - 1]
            # A row starts in the middle of a file: positions count from there, as the model sees no more of it.
            inside = np.minimum(inside, np.arange(length + 1)[None, :])
            tokens = self.text[places].astype(np.int32)
            yield Batch(
                tokens=tokens[:, :-1],
                targets=tokens[:, 1:],
                segments=(document - document[:, :1])[:, :-1].astype(np.int32),
                positions=inside[:, :-1].astype(np.int32),
                counted=document[:, 1:] == document[:, :-1],
            )

    def unigram_bits(self) -> float:
        """Entropy of single bytes: no model that ignores the context gets below it on this text."""
        share = np.bincount(self.text, minlength=VOCABULARY) / len(self.text)
        share = share[share > 0]
        return float(-(share * np.log2(share)).sum())


def load(held_out: int = 20) -> tuple[Corpus, Corpus]:
    """Training and validation split: every ``held_out``-th file is held out."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
    documents = [text for f in files if (text := f.read_bytes())]
    if len(documents) < 2 * held_out:
        raise SystemExit(f"only {len(documents)} source files under {root}: is Python's standard library installed?")
    train = [d for i, d in enumerate(documents) if i % held_out]
    return Corpus(train), Corpus(documents[::held_out])
