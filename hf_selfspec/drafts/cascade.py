"""Several sources together: free drafts, combined with drafts by a part of the model where that pays."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from ..errors import SelfSpecError, SettingError, SettingTypeError, warn_once
from ..learned.saving import register
from ..modules.shipped import attached_head
from .attached import source_of
from .controlled import ControlledDrafter
from .free.lookup import Lookup
from .source import Drafter, DraftSource, Session


@register
@dataclass(frozen=True)
class Cascade(DraftSource):
    """Drafts each round with the source that is expected to yield the most tokens per second.

    Free drafts are the default, and another source drafts where it is currently expected to be faster. A source that
    cannot draft for a model is left out. A head that is attached to the model (:func:`hf_selfspec.load_mtp`,
    :func:`hf_selfspec.load_head`) drafts as well.

    Args:
        sources: one :class:`Lookup`, and any others.

    Raises:
        SettingError, SettingTypeError: ``sources`` are anything else, or one of them changes the output.
    """

    sources: tuple[DraftSource, ...]

    takes_forwards = False

    def __post_init__(self) -> None:
        example = "Example: Cascade([Lookup(), EarlyExit(8)])."
        sources = tuple(self.sources) if isinstance(self.sources, Iterable) else ()
        if not sources or not all(isinstance(source, DraftSource) for source in sources):
            raise SettingTypeError(f"Cascade(sources) must be a list of draft sources, got {self.sources!r}. {example}")
        if sum(isinstance(source, Lookup) for source in sources) != 1 or len(sources) != len(set(map(repr, sources))):
            raise SettingError(f"Cascade(sources) needs one Lookup and different others, got {sources!r}. {example}")
        for source in sources:
            if isinstance(source, Cascade):
                raise SettingError(f"Cascade(sources) cannot hold {source!r}: it takes single sources.")
        object.__setattr__(self, "sources", sources)

    def _attached(self, session: Session) -> Iterator[DraftSource]:
        """What drafts with the head that is attached to the model, unless a source that has begun has such a head
        already, or reads the prompt's states, as adapters do."""
        head = attached_head(session.target.model)
        if head is not None and session.target.prefill_observer is None:
            source = source_of(head)
            if type(source) not in map(type, self.sources):
                yield source

    def start(self, session: Session) -> Drafter:
        """See :meth:`DraftSource.start`. Warns of a source that is left out."""
        lookup = next(source for source in self.sources if isinstance(source, Lookup))
        free = lookup.free_drafts(session)
        others: dict[str, Drafter] = {}
        for source in chain(self.sources, self._attached(session)):
            if source is lookup:
                continue
            try:
                if session.is_synced:
                    source.check_synced()
                source.check(session.anatomy)
                for arm in source.arms(session.anatomy):
                    others[repr(arm)] = arm.start(replace(session, name=repr(arm)))
            except SelfSpecError as error:
                warn_once(f"{source!r} is left out of the drafts of this model: {error}")
        return ControlledDrafter(session, free, others)
