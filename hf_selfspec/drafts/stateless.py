"""Which logits processors and stopping criteria are functions of what they are given.

One that keeps a state from step to step (a grammar matcher, a counter), or changes the ids or the model, is right only
if it is called as plain ``generate`` calls it: once for each emitted token, in order, on the whole text so far.
Drafting would call it for tokens that are never emitted. So all but those known to be stateless, and streamers, are
called that way, see :func:`.walk.verify_in_step`.
"""

from collections.abc import Iterable
from typing import Any

from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria

from ..errors import SettingTypeError
from ..model.internals import prefix_function

# Transformers' own for decoder-only models, without the ends of their names, if the installed version has them: first
# those that depend on the scores alone, so that any number of positions can be processed in one call, then those that
# depend on one row's prefix and scores, whichever row that is. UnbatchedClassifierFreeGuidance and SynthID are no such
# classes: they keep a cache of their own forwards, or the contexts that were hashed already.
_PREFIX_FREE = (
    "Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta", "SuppressTokens", "LogitNormalization",
    "InfNanRemove",
)  # fmt: skip
_ROW_BLIND = (
    "RepetitionPenalty", "ForcedBOSToken", "SuppressTokensAtBegin", "ExponentialDecayLengthPenalty", "NoRepeatNGram",
    "MinLength", "MinNewTokensLength", "NoBadWords", "SequenceBias", "ForcedEOSToken",
)  # fmt: skip
_OTHERS = ("TopH", "EncoderRepetitionPenalty", "EncoderNoRepeatNGram", "Watermark")
_CRITERIA = ("MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria", "ConfidenceCriteria")


def _processors(names: tuple[str, ...]) -> frozenset[type]:
    endings = ("", "LogitsProcessor", "LogitsWarper")
    classes = (getattr(lp, name + ending, None) for name in names for ending in endings)
    return frozenset(cls for cls in classes if isinstance(cls, type))


PREFIX_FREE = _processors(_PREFIX_FREE)
# Some of these only once they are bound to their row.
ROW_BLIND = PREFIX_FREE | _processors(_ROW_BLIND) | {lp.PrefixConstrainedLogitsProcessor}
_registered: set[type] = {getattr(stopping_criteria, name) for name in _CRITERIA}
_registered |= _processors(_PREFIX_FREE + _ROW_BLIND + _OTHERS)
_registered |= {TextStreamer, TextIteratorStreamer, AsyncTextIteratorStreamer}


def register_stateless(kind: type) -> None:
    """Declares that a class of logits processors or stopping criteria keeps no state from call to call.

    Its result has to follow from ``(input_ids, scores)`` alone, and it changes neither these nor the model. It may then
    be called for drafted tokens, for several positions in any order and for one row at a time, which makes drafts more
    often right and batches faster. All others, and streamers, are called once for each emitted token, as plain
    ``generate`` does. Your own class or function can have an attribute ``is_stateless = True`` instead.

    Args:
        kind: the class itself, also of streamers that do not change the model; subclasses are registered on their own.

    Raises:
        SettingTypeError: it is not a class.
    """
    if not isinstance(kind, type):
        raise SettingTypeError(
            f"register_stateless takes a class of logits processors or stopping criteria, got {kind!r}. Give an object "
            "the attribute `is_stateless = True` instead."
        )
    _registered.add(kind)


def stateful(functions: Iterable[Any]) -> tuple[str, ...]:
    """Names of those processors or criteria that may keep a state."""
    return tuple(getattr(each, "__name__", type(each).__name__) for each in functions if not is_stateless(each))


def is_stateless(function: Any) -> bool:
    """Whether a logits processor, a stopping criterion or a function of either is known to keep no state."""
    declared = getattr(function, "is_stateless", None)
    if isinstance(declared, bool):
        return declared
    if type(function) is lp.PrefixConstrainedLogitsProcessor:
        return is_stateless(prefix_function(function))
    return type(function) in _registered
