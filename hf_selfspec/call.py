"""One call of ``generate``: from what transformers has prepared to the decoded text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from .batch import Text
from .decoding import Decoder, Record
from .draft.constrained import ConstrainedDrafter
from .draft.controlled import controlled
from .draft.source import DraftSource, Session
from .errors import UnsupportedOptionError, warn_once
from .grammar.rows import Constraint, with_grammars
from .learned.knowledge import KnowledgeOfCall
from .model.anatomy import Anatomy
from .model.given_cache import cache_for, cache_name, given_cache
from .model.inputs import Inputs, extra_arguments
from .model.linear import are_faster
from .model.modules import all_modules
from .model.parallel import is_tensor_parallel
from .model.patching import checkpoints, without_checkpointing
from .model.plan import LayerPlan
from .model.prompt import Prompt, is_right_padded
from .model.target import Target
from .refusals import check_call, check_length
from .stats import GenerationStats
from .stop.rules import StopRule
from .verify.scoring import Scorer
from .verify.stopping import Stopper
from .verify.tree import Tree

# Initial cache slots where the final length of the text is not known.
FIRST_SLOTS = 1024
# Why a call is left to plain ``generate``.
_NO_DRAFT_PAYS, _PADDED_ON_THE_RIGHT = "no draft pays", "its prompts are padded on the right"


@dataclass(frozen=True)
class Request:
    """What ``generate`` expects of a callable that decodes; see ``custom_generate``."""

    model: PreTrainedModel
    input_ids: torch.LongTensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    synced_gpus: bool
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]

    @property
    def do_sample(self) -> bool:
        """Whether tokens are sampled."""
        return bool(self.generation_config.do_sample)

    @property
    def past(self) -> Any:
        """The cache that ``generate`` passes on."""
        return given_cache(self.model_kwargs)

    @property
    def has_own_cache(self) -> bool:
        """Whether the cache is the caller's."""
        return bool(getattr(self.past, "_is_user_defined", False))

    def with_cache(self) -> Request:
        """The request with the cache on, also where the model's own config switches it off: the ids are the same."""
        given = self.past
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True)) if given is None else given
        return replace(self, model_kwargs=self.model_kwargs | {cache_name(self.model): cache, "use_cache": True})


@dataclass(frozen=True)
class Generation:
    """Decodes one call of ``generate``.

    Attributes:
        source: what drafts.
        stop, tree, max_draft: see ``SelfSpec``.
        knowledge: what is known of the model for this kind of call.
        checks_logits: see :class:`Decoder`.
        compile_config: how forwards are compiled, ``None`` to not compile them.
    """

    source: DraftSource
    stop: StopRule | None
    tree: Tree | None
    max_draft: int
    knowledge: KnowledgeOfCall
    checks_logits: bool = True
    compile_config: CompileConfig | None = None

    def ready(self, request: Request) -> Callable[[], Any]:
        """Checks the call and prepares it; returns a function that generates and returns what ``generate`` does.

        Raises:
            SelfSpecError: the call cannot be served. Nothing was generated yet, so another loop can serve it.
        """
        anatomy = Anatomy.of(request.model)
        has_cache = request.model_kwargs.get("use_cache") is not False
        request = request if has_cache else request.with_cache()
        max_new = self._check(request, anatomy)
        if why := self._left_to_generate(request):
            return partial(self._plain, why, request)
        whole = self.source.whole_model(anatomy)
        if whole is not None and request.has_own_cache:
            raise UnsupportedOptionError(
                "early_exit_only leaves the later layers' keys and values out, so a cache of your own could not be "
                "used again. Leave out `past_key_values`."
            )
        ids, config = request.input_ids, request.generation_config
        inputs = Inputs.of(request.model, anatomy, ids, request.model_kwargs, config)
        check_length(request.model, anatomy, inputs.prompt, config.max_length, ids.shape[1])
        decoder = self._start(request, inputs, max_new)
        returned = bool(request.generation_config.return_dict_in_generate)
        cache = request.past if whole is None and (has_cache or request.has_own_cache) else None
        return partial(self._decode, decoder, cache, returned, request.has_own_cache)

    def _check(self, request: Request, anatomy: Anatomy) -> int | None:
        """Checks what can be checked in advance; returns the maximum number of new tokens, ``None`` if unlimited."""
        self.knowledge.knowledge.check(request.model)
        check_call(request.model, request.input_ids, request.generation_config, request.model_kwargs)
        if request.synced_gpus:
            self.source.check_synced()
        extra_arguments(request.model, request.model_kwargs)
        _warn_of_checkpointing(request.model)
        longest = Stopper(request.stopping_criteria).max_length
        max_new = None if longest is None else longest - request.input_ids.shape[1]
        self.source.check(anatomy, max_new)
        return max_new

    def _start(self, request: Request, inputs: Inputs, max_new: int | None) -> Decoder:
        """Lays out the text and the cache, and starts the drafter.

        Raises:
            SelfSpecError: the source cannot draft for this call.
        """
        batch_size, config = len(request.input_ids), request.generation_config
        anatomy, prompt = inputs.anatomy, inputs.prompt
        scorer = Scorer(with_grammars(request.logits_processor), batch_size, request.do_sample)
        stopper = Stopper(request.stopping_criteria)
        stateful = (*scorer.stateful, *stopper.stateful)
        constraint = Constraint(scorer.grammars, stopper.eos_tokens)
        new_tokens = FIRST_SLOTS if max_new is None else min(max_new, FIRST_SLOTS)
        target = Target(
            request.model,
            anatomy,
            cache_for(request.model, batch_size, prompt.width + new_tokens, request.past),
            padding=prompt.padding,
            holes=prompt.holes,
            reachable=None if stopper.max_length is None else [stopper.max_length + base - 1 for base in prompt.base],
            following=inputs.following,
            plan=self.source.whole_model(anatomy),
        )
        if self.compile_config is not None:
            target.compile(self.compile_config)
        session = Session(
            target=target,
            scorer=scorer.for_drafts,
            stop=self.stop,
            tree=self._usable_tree(anatomy, prompt),
            max_draft=self.max_draft,
            eos_tokens=stopper.eos_tokens,
            new_tokens=new_tokens,
            max_new=max_new,
            stateful=(*stateful, *(grammar.name for grammar in scorer.grammars)),
            knowledge=self.knowledge,
            is_synced=request.synced_gpus,
            constraint=constraint,
        )
        drafter = controlled(self.source.start(session), session, repr(self.source))
        return Decoder(
            target=target,
            inputs=inputs,
            text=Text.of(request.input_ids, prompt.base, target.cache.capacity - prompt.width, inputs.fixed),
            draft=ConstrainedDrafter(drafter, constraint) if constraint else drafter,
            scorer=scorer,
            stopper=stopper,
            record=Record.of(config, batch_size, bool(stateful)),
            pad_token=_pad_token(config),
            vocabulary=session.vocabulary,
            streamer=request.streamer,
            checks_logits=self.checks_logits,
            waits_for=_others_are_unfinished(request.input_ids.device) if request.synced_gpus else None,
            keeps_rows=bool(config.return_dict_in_generate) or request.has_own_cache,
        )

    def _decode(self, decoder: Decoder, cache: Any, returned: bool, own_cache: bool) -> Any:
        """Generates.

        Args:
            decoder: the decode loop.
            cache: filled at the end if the caller will see it; ``None`` where there is nothing to fill it with.
            returned: whether the output holds more than ids.
            own_cache: whether ``cache`` is the caller's.
        """
        try:
            with decoder.target.prepared():
                ids = decoder.run()
                if (returned or own_cache) and cache is not None:
                    decoder.hand_back(cache, ids)
        finally:
            decoder.target.cache.layers.clear()  # memory, now rather than when Python next looks for reference cycles
            self.knowledge.write()
        self.knowledge.knowledge.add_call(decoder.stats)
        _remind_of_length(decoder.stopper.criteria, ids)
        return decoder.output(ids, cache) if returned else ids

    def _left_to_generate(self, request: Request) -> str:
        """Why the call is left to transformers' own loop, empty where it is not.

        Where no draft pays, our loop is as fast as theirs, and faster with faster linear layers (float32 on a CPU).
        """
        if not self.source.lossless:
            return ""
        findings = self.knowledge.all_findings()
        is_idle = bool(findings) and all(found.is_idle for found in findings)
        if is_idle and (
            is_tensor_parallel(request.model)  # whose processes have timings of their own
            or not are_faster(all_modules(request.model), len(request.input_ids))
        ):
            return _NO_DRAFT_PAYS
        mask = request.model_kwargs.get("attention_mask")
        if mask is None or not is_right_padded(mask):
            return ""
        warn_once(
            "the prompts are padded on the right, so this call is left to transformers' own loop, which continues "
            "after the padding: nothing is drafted. For correct and faster results set the tokenizer's "
            "padding_side='left'."
        )
        return _PADDED_ON_THE_RIGHT

    def _plain(self, why: str, request: Request) -> Any:
        """Runs transformers' own loop, without any part of ours, and records the call in what is known of the model."""
        options: dict[str, Any] = {
            "logits_processor": request.logits_processor,
            "stopping_criteria": request.stopping_criteria,
            "generation_config": request.generation_config,
            "synced_gpus": request.synced_gpus,
            "streamer": request.streamer,
        }
        with without_checkpointing(request.model):
            output, stats = decode_plainly(request.model, request.input_ids, options | request.model_kwargs, why)
        for found in self.knowledge.all_findings():
            if found.is_idle:
                found.add_idle_call(stats.tokens, stats.total_seconds)
                found.report(stats)
        self.knowledge.knowledge.add_call(stats)
        return output

    def _usable_tree(self, anatomy: Anatomy, prompt: Prompt) -> Tree | None:
        if prompt.padding is not None:
            warn_once(
                f"{anatomy.model_name} cannot take rows at different lengths: all rows of a batch advance by the "
                "shortest acceptance. The output is exact; small batches are faster."
            )
        if self.tree is None or (anatomy.tree and prompt.padding is None):
            return self.tree
        warn_once(
            f"{anatomy.model_name} cannot take a tree mask, so siblings are not used and drafts are linear. The output "
            "is exact all the same."
        )
        return None


def _remind_of_length(criteria: StoppingCriteriaList, ids: torch.Tensor) -> None:
    """Issues transformers' warning, where it has one, that the text is longer than the model was made for."""
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            criterion(ids[:, :-1], None)


def _warn_of_checkpointing(model: PreTrainedModel) -> None:
    if checkpoints(model):
        warn_once(
            f"{type(model).__name__} is in training mode with gradient checkpointing, where its layers drop the KV "
            "cache and generate alone sees only the last token. With `assistant`, checkpointing is suspended "
            "meanwhile, so the tokens are those of generate(use_cache=False). Call model.eval() before you generate."
        )


def _pad_token(config: GenerationConfig) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)


def _others_are_unfinished(device: torch.device) -> Callable[[bool], bool]:
    """Whether any process is unfinished, given whether this one is; all have to ask together, as in plain generate."""

    def ask(is_unfinished: bool) -> bool:
        count = torch.tensor(float(is_unfinished), device=device)
        torch.distributed.all_reduce(count)
        return bool(count.item())

    return ask


def decode_plainly(
    model: PreTrainedModel, input_ids: torch.Tensor, options: dict[str, Any], why: str
) -> tuple[Any, GenerationStats]:
    """Decodes without any part of ours.

    Args:
        model: the model.
        input_ids: ``[b, s]`` the prompts.
        options: all other arguments that a ``custom_generate`` callable gets.
        why: why the call is left to transformers.

    Returns:
        What ``generate`` returns, and the statistics.
    """
    begun = perf_counter()
    output = type(model)._sample(model, input_ids, **options)
    seconds, eos_tokens = perf_counter() - begun, Stopper(options["stopping_criteria"]).eos_tokens
    ids, width = output if isinstance(output, torch.Tensor) else output.sequences, input_ids.shape[1]
    pad = getattr(options["generation_config"], "_pad_token_tensor", None)
    padding = None if pad is None or not eos_tokens else int(pad)
    counts = [_generated(row, eos_tokens, padding) for row in ids[:, width:].tolist()]
    tokens, rounds = sum(counts), sum(counts) - len(counts)
    return output, GenerationStats(
        tokens=tokens,
        rounds=rounds,
        accepted_lengths=Counter({0: rounds}),
        total_seconds=seconds,
        from_draft=[[False] * count for count in counts],
        plan=LayerPlan(Anatomy.of(model).num_layers).picture(),
        drafts=False,
        left_to_generate=why,
        timeline=[(tokens, seconds)],
    )


def _generated(row: list[int], eos_tokens: frozenset[int], padding: int | None) -> int:
    """Returns how many tokens of a row were generated: up to its end-of-text token, or to the padding after it."""
    for index, token in enumerate(row, start=1):
        if token in eos_tokens:
            return index
    count = len(row)
    while count and row[count - 1] == padding:
        count -= 1
    return count
