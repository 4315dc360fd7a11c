"""Real text for scripted rollouts: Python's own files, and a BPE that was trained on them."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_VOCABULARY_SIZE = 50_000
_FILE_MIN_BYTES = 2_000


class RealText:
    """Pieces of text, each given out once."""

    def __init__(self) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
        random.Random(0).shuffle(files)
        texts = (path.read_text("utf-8", errors="ignore") for path in files)
        self._texts = [text for text in texts if len(text) >= _FILE_MIN_BYTES]
        self._files = iter(self._texts)
        self._waiting: list[int] = []

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """A tokenizer as language models have, trained on the texts."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=_VOCABULARY_SIZE,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(self._texts, trainer)
        return tokenizer

    def draw(self, length: int) -> list[int]:
        """Return the ids of the next piece.

        Raises:
            StopIteration: all text was given out.
        """
        while len(self._waiting) < length:
            self._waiting += self.tokenizer.encode(next(self._files)).ids
        drawn, self._waiting = self._waiting[:length], self._waiting[length:]
        return drawn

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        text: str = self.tokenizer.decode(ids)
        return text

    def write_tokenizer(self, folder: Path) -> Path:
        """Write the tokenizer, and return where."""
        path = folder / "real-tokenizer.json"
        self.tokenizer.save(str(path))
        return path
