"""Which logits processors and stopping criteria are functions of what they are given.

One that keeps a state from step to step (a grammar matcher, a counter) is right only if it is called as plain
``generate`` calls it: once for each emitted token, in order, on the whole text so far. Drafting would call it for
tokens that are never emitted. So all but those known to be stateless are called that way, see
:func:`.walk.verify_in_step`.
"""

from collections.abc import Iterable
from typing import Any

from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria

from ..errors import SettingTypeError
from ..model.internals import prefix_function

# Transformers' own for decoder-only models, if the installed version has them. UnbatchedClassifierFreeGuidance and
# SynthID are not among them: they keep a cache of their own forwards, or the contexts that were hashed already.
_PROCESSORS = (
    "Temperature", "TopK", "TopP", "TopH", "MinP", "Typical", "Epsilon", "Eta", "LogitNormalization",
    "RepetitionPenalty", "EncoderRepetitionPenalty", "NoRepeatNGram", "EncoderNoRepeatNGram", "NoBadWords",
    "SequenceBias", "MinLength", "MinNewTokensLength", "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove",
    "ExponentialDecayLengthPenalty", "SuppressTokens", "SuppressTokensAtBegin", "Watermark",
)  # fmt: skip
_CRITERIA = ("MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria", "ConfidenceCriteria")

_registered: set[type] = {
    member
    for name in _PROCESSORS
    for ending in ("", "LogitsProcessor", "LogitsWarper")
    if isinstance(member := getattr(lp, name + ending, None), type)
} | {getattr(stopping_criteria, name) for name in _CRITERIA}


def register_stateless(kind: type) -> None:
    """Declares that a class of logits processors or stopping criteria keeps no state from call to call.

    Its result has to follow from ``(input_ids, scores)`` alone. It may then be called for drafted tokens, for several
    positions in any order and for one row at a time, which makes drafts more often right and batches faster. All
    others are called once for each emitted token, as plain ``generate`` does. Your own class or function can have an
    attribute ``is_stateless = True`` instead.

    Args:
        kind: the class itself; subclasses are registered on their own.

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
