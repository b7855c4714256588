"""What free drafts learn about a model, shared by all calls and threads of a ``SelfSpec``."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from ...learned.knowledge import Findings
from ...model.forks import new_lock
from .row import Rates
from .successors import Successors
from .suffix import LONGEST_MATCH, SEPARATOR, SuffixIndex

# How many tokens of earlier texts are kept by default.
STORED = 65_536


class LookupFindings(Findings):
    """Successors of pairs, earlier texts and ``rates`` by kind of call; ``lock`` is held while they are used."""

    def __init__(self, most_stored: int = STORED) -> None:
        self.lock = new_lock()
        self.successors = Successors()
        self.store = SuffixIndex()
        self._adding = new_lock()  # held while the store changes, before ``lock``
        self._most_stored = most_stored
        self.rates = defaultdict[str, Rates](Rates)
        self._texts = 0

    def next_text(self) -> int:
        with self.lock:
            self._texts += 1
            return self._texts

    def add_texts(self, texts: Sequence[Sequence[int]]) -> None:
        """Adds texts to the store, without beginnings that it or a later text has already (in chats)."""
        most, pieces, kept = self._most_stored, set[tuple[int, ...]](), list[list[int]]()
        with self._adding:
            for text in reversed(texts):
                if sum(map(len, kept)) >= most:
                    break
                if new := self._unknown_end(text, pieces):
                    kept.append([SEPARATOR, *new[-(most // 2) :]])
            added = list(chain(*reversed(kept)))
            if len(self.store.tokens) + len(added) > most:
                # The older half goes; others draft from what there is, until the rest is indexed.
                count, store = max(most // 2, min(len(added), most)), SuffixIndex()
                store.extend([*self.store.tokens, *added][-count:])
                self.store = store
                return
            with self.lock:
                self.store.extend(added)

    def _unknown_end(self, text: Sequence[int], pieces: set[tuple[int, ...]]) -> Sequence[int]:
        """The end of a text that is neither in the store nor among ``pieces``, to which those of the text are added."""
        new = None
        for start in range(0, len(text), LONGEST_MATCH):
            piece = tuple(text[start : start + LONGEST_MATCH])
            match = self.store.match(piece) if new is None else None
            is_stored = match is not None and match.length == LONGEST_MATCH
            if new is None and not (piece in pieces or is_stored):
                # The rest is stored with the tokens before it, by which it is found.
                new = max(0, start - LONGEST_MATCH)
            if len(piece) == LONGEST_MATCH:
                pieces.add(piece)
        return () if new is None else text[new:]

    def forget(self) -> None:
        with self._adding, self.lock:
            self.successors.forget()
            self.store = SuffixIndex()
            self.rates.clear()

    def state(self) -> dict[str, Any]:
        with self.lock:
            # Texts could be reconstructed from successors, so they are left out where texts are not kept.
            successors = (self.successors if self._most_stored else Successors(0)).state()
            arrays = {"store": np.array(self.store.tokens, np.int32), **successors}
            rates = {mode: rates.state() for mode, rates in self.rates.items()}
            return {"arrays": base64.b64encode(save(arrays)).decode("ascii"), "rates": rates}

    def restore(self, state: dict[str, Any]) -> None:
        arrays = load(base64.b64decode(state["arrays"]))
        store = SuffixIndex()
        store.extend(arrays["store"].tolist()[-self._most_stored :] if self._most_stored else [])
        rates = {mode: Rates.of(of_mode) for mode, of_mode in state["rates"].items()}
        with self._adding, self.lock:
            self.successors.restore(arrays)
            self.store, self.rates = store, defaultdict(Rates, rates)
