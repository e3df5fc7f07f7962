"""Text to learn from: the Python standard library's own source, found on this machine.

Shape letters: B batch, T context length.
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_CHARACTERS = 1_500_000
"""Enough that a few thousand steps see no character twice, and read in a fraction of a second."""
VOCABULARY_SIZE = 96
"""The most common characters; every other one becomes `UNKNOWN`."""
UNKNOWN = "\0"


class DemoError(RuntimeError):
    """The demo cannot run on this machine; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text as character numbers: `characters_N` int64 (N,), and what each number stands for."""

    characters_N: Tensor
    vocabulary: tuple[str, ...]

    def batch(self, *, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random pieces of text and the character that follows each position: two int64 tensors (B, T)."""
        last = len(self.characters_N) - context - 1
        start_B = torch.randint(0, last, (size,), generator=generator)
        index_BT = start_B[:, None] + torch.arange(context)[None, :]
        return self.characters_N[index_BT], self.characters_N[index_BT + 1]


def standard_library_text(max_characters: int = MAX_CHARACTERS) -> Text:
    """The first `max_characters` of the standard library's modules in alphabetical order.

    Raises:
        DemoError: this Python carries no source text of its standard library.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    missing = max_characters
    for path in sorted(folder.glob("*.py")):
        if missing <= 0:
            break
        text = path.read_text(encoding="utf-8", errors="replace")[:missing]
        parts.append(text)
        missing -= len(text)
    text = "".join(parts)
    if len(text) < 100_000:
        raise DemoError(
            f"the demo learns from the source text of Python's standard library, but {folder} holds only "
            f"{len(text)} characters of it; run the demo with a Python that was installed with its library sources"
        )
    return encode(text)


def encode(text: str) -> Text:
    """Number the characters of `text` by how common they are; ties are broken by code point."""
    common = sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))
    vocabulary = (UNKNOWN, *(char for char, _ in common if char != UNKNOWN))[:VOCABULARY_SIZE]
    number = {char: index for index, char in enumerate(vocabulary)}
    return Text(
        characters_N=torch.tensor([number.get(char, 0) for char in text], dtype=torch.int64),
        vocabulary=vocabulary,
    )
