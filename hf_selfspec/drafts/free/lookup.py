"""Free drafts: what followed the last tokens in the text, in earlier texts, and in the model's own logits."""

from dataclasses import dataclass

from ...learned.knowledge import ALL
from ...learned.saving import register
from ...validation import check_count
from ..controlled import ControlledDrafter, controller_of
from ..cost_curve import SIZES
from ..source import Drafter, DraftSource, Session
from .free import FreeDrafts
from .kept_texts import STORED, LookupFindings

# How many tokens of earlier texts are kept at most.
_MOST_STORED = 2**20


@register
@dataclass(frozen=True)
class Lookup(DraftSource):
    """Drafts without running any part of the model.

    A draft is one tree for each row, of as many tokens as are expected to pay by measured costs. Its tokens are those
    that followed the last tokens earlier in the text (prompt lookup, SAM-Decoding, arXiv 2411.10666) and in texts of
    earlier calls (SuffixDecoding, 2411.04975), and those that the model's own logits predicted after the same two
    tokens (Token Recycling, 2408.08696).

    Args:
        stored_tokens: tokens of earlier texts, prompts included, that this ``SelfSpec`` keeps in memory (and on disk
            with its ``cache_dir``); 0 for none. The oldest are dropped first; :meth:`SelfSpec.forget` drops all.
        max_nodes: maximum number of tokens in a tree, at most 31.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    stored_tokens: int = STORED
    max_nodes: int = SIZES[-1]

    fixed_because = "Lookup drafts as many tokens as pay by measured costs, in a tree"
    takes_forwards = False

    def __post_init__(self) -> None:
        check_count("Lookup(stored_tokens)", self.stored_tokens, least=0, most=_MOST_STORED)
        check_count("Lookup(max_nodes)", self.max_nodes, most=SIZES[-1])

    def free_drafts(self, session: Session) -> FreeDrafts:
        findings = session.knowledge.of("lookup", lambda _: LookupFindings(self.stored_tokens), ALL)
        return FreeDrafts(findings, session, controller_of(session), self.max_nodes)

    def start(self, session: Session) -> Drafter:
        return ControlledDrafter(session, self.free_drafts(session), {})
