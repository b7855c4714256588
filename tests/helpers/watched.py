"""Draft sources that show what they draft."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from hf_selfspec.batch import Draft, Text
from hf_selfspec.drafts import Drafter, DraftSource, Session

Source = TypeVar("Source", bound=DraftSource)


def watched(source: Source, see: Callable[[Text, Draft], object]) -> Source:
    """The same source, of a class derived from its own, which shows each text and its draft to ``see``."""
    kind: Any = type(source)

    def start(self: Any, session: Session) -> Drafter:
        drafter: Any = kind.start(self, session)
        propose = drafter.propose

        def proposed(text: Text, max_new: list[int]) -> Draft:
            draft: Draft = propose(text, max_new)
            see(text, draft)
            return draft

        drafter.propose = proposed
        return drafter

    derived: Any = type(kind.__name__, (kind,), {"start": start})
    found: Source = derived(**{field.name: getattr(source, field.name) for field in fields(kind) if field.init})
    return found


class Proposing(DraftSource):
    """Drafts what a function of the text and the most new tokens of each row returns."""

    def __init__(self, propose: Callable[[Text, list[int]], Draft]) -> None:
        self.propose = propose

    def start(self, session: Session) -> Drafter:
        drafter: Any = Drafter()
        drafter.propose = self.propose
        return drafter


def drafts_into(found: list[Draft], source: Source) -> Source:
    """The same source, which adds its drafts to a list."""
    return watched(source, lambda text, draft: found.append(draft))
