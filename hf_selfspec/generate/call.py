"""One call of ``generate``, from what transformers has prepared to the decoded text: refuse, lay out, run the loop."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..batch import Text
from ..drafts.controlled import drafter_of
from ..drafts.grammar.rows import with_grammars
from ..drafts.growing import TopKTree
from ..drafts.scoring import Scorer, stateful
from ..drafts.source import Session
from ..errors import SelfSpecError, UnsupportedModelError, left_to_plain, only_warned, warn_once
from ..learned.knowledge import KnowledgeOfCall
from ..model.anatomy import Anatomy
from ..model.attention.exact import reduced_precision
from ..model.cache.handover import empty
from ..model.cache.speculative_cache import cache_for
from ..model.forks import cached_property
from ..model.graphs.graph_runner import GraphRunner
from ..model.inputs import Inputs
from ..model.internals import is_cast_by_accelerate, is_of_user, pad_token, sample
from ..model.module_tools import others_are_unfinished
from ..model.patching import without_checkpointing
from ..model.prompt import cache_name, given_cache
from ..model.target import Target
from ..settings import Settings
from ..stats import GenerationStats
from .decoder import Decoder
from .output import Output, Stopper
from .probation import TOKENS, compare, decoded_logits
from .refusals import check_call, check_exact, check_length
from .unseen import UNKNOWN, Unseen

# Initial cache slots where the final length of the text is not known.
FIRST_SLOTS = 1024
_GAPS = (
    "the prompts are padded on the right, or have masked columns between their tokens, and generation goes on after "
    "the last column. For faster results (and correct ones, where padding is on the right) set the tokenizer's "
    "padding_side='left', and leave no masked columns after a row's first token."
)


@dataclass(frozen=True)
class Call:
    """What ``generate`` has prepared, as it passes it to a callable that decodes (``custom_generate``)."""

    anatomy: Anatomy
    model: PreTrainedModel
    input_ids: torch.LongTensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    synced_gpus: bool
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]
    default_of: str = ""  # where the ``SelfSpec`` was set, if not by the caller

    @cached_property
    def inputs(self) -> Inputs:
        """The inputs, laid out."""
        return Inputs.of(self.model, self.anatomy, self.input_ids, self.model_kwargs, self.generation_config)

    @property
    def past(self) -> Any:
        return given_cache(self.model_kwargs)

    @property
    def has_own_cache(self) -> bool:
        return is_of_user(self.past)

    @property
    def keeps_rows(self) -> bool:
        """Whether the cache is handed back, with the rows that have ended."""
        return bool(self.generation_config.return_dict_in_generate) or self.has_own_cache

    @cached_property
    def stopper(self) -> Stopper:
        rows = 0 if self.keeps_rows else len(self.input_ids)
        return Stopper(self.stopping_criteria, rows, pad_token(self.generation_config) or 0)

    @property
    def max_new(self) -> int | None:
        """Maximum number of new tokens, ``None`` if unlimited."""
        return None if self.stopper.max_length is None else self.stopper.max_length - self.input_ids.shape[1]

    @property
    def has_static_cache(self) -> bool:
        """Whether transformers has made a static cache, which a call fills at its end."""
        return isinstance(self.past, StaticCache) and not self.has_own_cache

    def with_cache(self) -> Call:
        """The call with a dynamic cache, also where the model's own config switches it off: the ids are the same."""
        if self.model_kwargs.get("use_cache") is not False and not self.has_static_cache:
            return self
        cache = None if self.has_static_cache else self.past
        if cache is None:
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return replace(self, model_kwargs=self.model_kwargs | {cache_name(self.model): cache, "use_cache": True})


def serve(prepared: Call, spec: Settings) -> Any:
    """Decodes a call: checks it, chooses who decodes, builds what does, and runs it. Where the caller did not choose
    the ``SelfSpec``, plain ``generate`` serves calls that it cannot serve."""
    call, unseen, decoder = prepared.with_cache(), UNKNOWN, None
    knowledge = spec._knowledge_of(call.model, bool(call.generation_config.do_sample), len(call.input_ids) > 1)
    try:
        if call.max_new == 1:  # which is the prompt's, so there is nothing to draft, nor to see of the model
            _check(call, spec, knowledge)
            return _decode_plainly(prepared, knowledge, "it makes one new token")
        unseen = Unseen.of(call.anatomy.view)
        _check(call, spec, knowledge)
        call, why = _choose(call, spec, unseen)
        if not why:
            decoder = _build(call, spec, knowledge, unseen)
            return _run(prepared, decoder, knowledge)
    except Exception as error:  # of any kind: where nothing has begun, plain generate serves the call
        has_begun = decoder is not None and (any(decoder.text.new) or decoder.target.cache.was_given)
        may_be_the_models = bool(unseen) and not isinstance(error, SelfSpecError)
        if has_begun or not (call.default_of or may_be_the_models):
            raise
        call, why = prepared, left_to_plain(call.anatomy.model_name, call.default_of, error)
    return _decode_plainly(prepared if prepared.has_static_cache else call, knowledge, why)


def _check(call: Call, spec: Settings, knowledge: KnowledgeOfCall) -> None:
    """Refuses what cannot be served, before anything runs."""
    source = spec._source
    knowledge.knowledge.check(call.model)
    check_call(call.anatomy, call.model, call.input_ids, call.model_kwargs)
    if call.synced_gpus:
        source.check_synced()
    source.check(call.anatomy)


def _choose(call: Call, spec: Settings, unseen: Unseen) -> tuple[Call, str]:
    """Returns the call, with what a comparison has left of what its model supports, and why transformers' own loop
    serves it; empty where we do."""
    name = call.anatomy.model_name
    if why := "" if spec.trust else unseen.why_plain:
        return call, left_to_plain(name, "", UnsupportedModelError(why))
    if call.inputs.prompt.has_gaps:
        warn_once(f"{_GAPS} This call is left to transformers' own loop, in which nothing is drafted.")
        return call, "its prompts have masked columns after their first tokens"
    if len(call.input_ids) > 1 and not call.inputs.anatomy.ragged:
        why = f"{name} cannot take rows at different lengths"
        warn_once(f"{why}. Its batches are left to transformers' own loop, in which nothing is drafted.")
        return call, why
    check_length(call.model, call.inputs, call.generation_config.max_length)
    _is_exact(call, spec)  # raises where results cannot be
    if not unseen:
        return call, ""
    if call.synced_gpus or (call.max_new is not None and call.max_new < TOKENS):
        reason = "several processes run" if call.synced_gpus else f"fewer than {TOKENS} new tokens are too few"
        return call, f"{unseen} was not seen before, and {reason}, so that it could not be checked"
    outcome = compare(call, unseen, partial(decoded_logits, lay_out=_build))
    if why := outcome.why_plain:
        why = left_to_plain(name, "", UnsupportedModelError(f"because of {unseen}: {why}"))
    return replace(call, anatomy=outcome.applied(call.anatomy)), why


def _build(call: Call, spec: Settings, knowledge: KnowledgeOfCall, unseen: Unseen) -> Decoder:
    """Makes what decodes a call: cache, target, drafts, and what was generated so far."""
    knowledge.write_others()
    batch_size, stopper, config, source = len(call.input_ids), call.stopper, call.generation_config, spec._source
    inputs = call.inputs
    anatomy, prompt = inputs.anatomy, inputs.prompt
    scorer = Scorer(with_grammars(call.logits_processor), batch_size, bool(config.do_sample))
    new_tokens = FIRST_SLOTS if call.max_new is None else min(call.max_new, FIRST_SLOTS)
    target = Target(
        call.model,
        anatomy,
        cache_for(call.model, anatomy, batch_size, prompt.width + new_tokens, call.past, moves=call.has_own_cache),
        reachable=None if stopper.max_length is None else stopper.max_length + max(prompt.base) - 1,
        following=inputs.following,
        is_exact=_is_exact(call, spec),
    )
    # Modules of others may treat rows by their place in the batch.
    target.cache.has_unknown_readers = bool(unseen)
    if spec.graphs is not False and not target.is_exact:
        GraphRunner.install(target, call.input_ids.device, compares=bool(unseen))
    # Others' streamers may change the model between two tokens.
    streamers = [] if call.streamer is None else [call.streamer]
    functions = (*scorer.stateful, *stopper.stateful, *stateful(streamers))
    session = Session(
        target=target,
        scorer=scorer.for_drafts,
        stop=spec.stop,
        tree=_usable_tree(spec.tree, anatomy),
        max_draft=spec.max_draft,
        eos_tokens=stopper.eos_tokens,
        new_tokens=new_tokens,
        knowledge=knowledge,
        is_synced=call.synced_gpus,
        grammars=scorer.grammars,
    )
    text = Text.of(call.input_ids, prompt.base, target.cache.capacity - prompt.width)
    stats = GenerationStats(together_for=", ".join(functions) if batch_size > 1 else "", checked=str(unseen))
    return Decoder(
        target=target,
        inputs=inputs,
        output=Output(text, stopper, config, pad_token(config) or 0, call.streamer, stats, in_step=bool(functions)),
        draft=drafter_of(source, session),
        scorer=scorer,
        vocabulary=session.vocabulary,
        checks_logits=not call.default_of,
        waits_for=others_are_unfinished(call.input_ids.device) if call.synced_gpus else None,
        keeps_rows=call.keeps_rows,
    )


def _is_exact(call: Call, spec: Settings) -> bool:
    """Whether forwards must have the results of plain ``generate``, bit for bit; raises where they cannot."""
    # accelerate puts its mixed precision around a model's forward.
    casts = torch.is_autocast_enabled(call.input_ids.device.type) or is_cast_by_accelerate(call.model)
    if not spec.exact or not (casts or _is_rounded(call.model)):
        return False
    reasons = {
        "autocast is on": casts,
        "a cache of your own is given": call.has_own_cache,
    }
    check_exact(call.model, call.inputs, call.generation_config, reasons)
    return True


def _promise(decoder: Decoder) -> str:
    """How far ids are those of plain ``generate``, see :class:`GenerationStats`."""
    target = decoder.target
    if decoder.scorer.do_sample:
        return "distribution"
    if target.is_exact:
        return "bit for bit"
    is_rounded = target.autocast is not None or _is_rounded(target.model)
    return "near-ties" if is_rounded else "token for token"


def _is_rounded(model: PreTrainedModel) -> bool:
    """Whether matrices may be multiplied in less than float32's precision."""
    size = model.dtype.itemsize
    return size <= 2 or (size == 4 and bool(reduced_precision(model.device)))


def _usable_tree(tree: TopKTree | None, anatomy: Anatomy) -> TopKTree | None:
    if tree is None or anatomy.tree:
        return tree
    warn_once(
        f"{anatomy.model_name} cannot take a tree mask, so siblings are not used and drafts are linear. The output "
        "is exact all the same."
    )
    return None


def _run(call: Call, decoder: Decoder, knowledge: KnowledgeOfCall) -> Any:
    """Decodes, hands back what the caller gets beside the ids, and keeps what was learned."""
    cache = call.past
    try:
        with decoder.target.prepared():
            ids = decoder.run()
            if cache is not None and decoder.keeps_rows:
                with only_warned("handing back a cache, which is empty now,", partial(empty, cache)):
                    decoder.hand_back(cache)
    except BaseException:  # an interrupt, too, leaves the given cache half written
        if decoder.target.cache.was_given:
            empty(cache)
            warn_once("the cache that was given is empty now, since its call ended with an error.")
        raise
    finally:
        decoder.target.cache.free()  # frees memory now, not when Python next looks for reference cycles
        knowledge.knowledge.keep(knowledge.model)
    with only_warned("keeping a call's statistics"):
        decoder.stats.promise = _promise(decoder)
        knowledge.knowledge.add_call(decoder.stats)
    return decoder.output.returned(ids, cache) if call.generation_config.return_dict_in_generate else ids


def _decode_plainly(call: Call, knowledge: KnowledgeOfCall, why: str) -> Any:
    names = [field.name for field in fields(call) if field.name not in ("anatomy", "model_kwargs", "default_of")]
    options = {name: getattr(call, name) for name in names} | call.model_kwargs
    begun = perf_counter()
    with without_checkpointing(call.model, call.anatomy.view.modules):
        output = sample(**options)
    with only_warned("keeping a call's statistics"):
        knowledge.knowledge.add_call(GenerationStats.of_plain(perf_counter() - begun, why))
    return output
