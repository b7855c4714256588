"""The ways of generating that are compared; one more line adds another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import CompileConfig, PreTrainedModel

from ...draft.skip_layers import SkipLayers
from ...errors import SelfSpecError, SettingError, SettingTypeError, brief
from ...notices import muted
from ...search.on_the_fly import ClosestLayers
from ...selfspec import SelfSpec
from ...spec_text import read_spec, split
from .prompts import Batch

PLAIN = "plain"
# How tables group ways.
PLAIN_GROUP, LOOKUP_GROUP, COMPILED_GROUP, OURS_GROUP = "plain", "prompt lookup", "compiled", "ours"
_LOOKUP = re.compile(r"prompt-lookup\((\d+)(?:, ?(\d+))?\)")
# The address in Python's default ``repr`` of an object, which differs between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)
# Tokens that prompt lookup drafts unless another number is given: transformers' own default.
_LOOKUP_TOKENS = 10
# New tokens of a call that shows whether a preset fits the model.
_TRIED = 3
# What this package and transformers raise for a way that does not fit a model.
_REFUSALS = (SelfSpecError, ValueError, NotImplementedError)


@dataclass(frozen=True)
class Way:
    """One way of generating.

    Attributes:
        name: name in tables.
        group: group of similar ways.
        call: the arguments of ``generate`` that a user writes for it.
        options: its own arguments of ``generate``.
        make: creates its ``SelfSpec``, ``None`` for transformers' ways.
        is_static: whether it has a static cache, whose size is the same in all calls so that graphs can be reused.
        takes_batches: whether it supports several prompts at once.
    """

    name: str
    group: str
    call: str
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[], SelfSpec] | None = None
    is_static: bool = False
    takes_batches: bool = True

    @property
    def settings(self) -> str:
        """The settings that figures depend on: two ways of the same name may differ in them."""
        return self.call if self.make is None else _ADDRESS.sub("", repr(self.make()))

    @property
    def is_lossless(self) -> bool:
        """Whether the way's settings promise the model's own text."""
        return self.make is None or getattr(self.make().draft, "lossless", True)


@dataclass(frozen=True)
class LeftOut:
    """A way that is not measured, and why."""

    name: str
    why: str


def compiled() -> CompileConfig:
    """How graphs are compiled, also on a CPU, where transformers compiles only when told to."""
    config = CompileConfig(mode="default")
    config._compile_all_devices = True
    return config


def prompt_lookup(size: int, tokens: int = _LOOKUP_TOKENS) -> Way:
    """Returns transformers' prompt lookup with n-grams of up to ``size`` tokens and ``tokens`` drafted ones."""
    options = {"max_matching_ngram_size": size, "prompt_lookup_num_tokens": tokens}
    call = f"prompt_lookup_num_tokens={tokens}, max_matching_ngram_size={size}"
    name = f"prompt-lookup({size})" if tokens == _LOOKUP_TOKENS else f"prompt-lookup({size}, {tokens})"
    return Way(name, LOOKUP_GROUP, call, options, takes_batches=False)


def ours(name: str, make: Callable[[], SelfSpec], group: str = OURS_GROUP) -> Way:
    """Returns a way with a ``SelfSpec``."""
    return Way(name, group, f"assistant={name}", make=make)


_FIT = "it needs a part that was fitted to the model: `hf-selfspec fit {0} ...`, then name the {1} in --methods"
_ON_CPU = "it compiles, which transformers does on a CPU only when told to; name it in --methods to measure it"
PRESETS = (
    ours("SelfSpec()", SelfSpec),
    ours("SelfSpec.lookup()", SelfSpec.lookup),
    ours("SelfSpec.layerskip()", SelfSpec.layerskip),
    ours("SelfSpec.swift()", SelfSpec.swift),
    ours("SelfSpec.adaspeed()", SelfSpec.adaspeed),
    ours("SelfSpec(SkipLayers(search=ClosestLayers()))", lambda: SelfSpec(SkipLayers(search=ClosestLayers()))),
)
_WITH_PARTS = (
    LeftOut("SelfSpec.kangaroo(adapter)", _FIT.format("adapter", "folder")),
    LeftOut("SelfSpec.dssd(heads)", _FIT.format("heads", "folder")),
    LeftOut("SelfSpec(EarlyExitLora(lora))", _FIT.format("lora", "folder")),
    LeftOut("SelfSpec.early_exit_only(layer)", "its text is not the model's own"),
)
_COMPILED = (
    Way(
        "static-compiled",
        COMPILED_GROUP,
        'cache_implementation="static"',
        {"cache_implementation": "static", "compile_config": compiled()},
        is_static=True,
    ),
    ours("SelfSpec(compile=True)", lambda: SelfSpec(compile=True), COMPILED_GROUP),
)
_LOOKUPS = (prompt_lookup(2), prompt_lookup(3), prompt_lookup(2, 5))
KNOWN = {way.name: way for way in (Way(PLAIN, PLAIN_GROUP, "(nothing)"), *_LOOKUPS, *_COMPILED, *PRESETS)}

# Short names on the command line for one or several of them.
SHORT = {
    "prompt-lookup": tuple(way.name for way in _LOOKUPS),
    "selfspec": ("SelfSpec()",),
    "selfspec-compiled": ("SelfSpec(compile=True)",),
    **{name: (f"SelfSpec.{name}()",) for name in ("lookup", "layerskip", "swift", "adaspeed")},
}


def methods_of(texts: Iterable[str]) -> dict[str, str | SelfSpec]:
    """Returns the methods that a command line names, by their names in tables.

    Args:
        texts: names of ways, also short ones, or values of ``--spec`` of other commands.

    Raises:
        SettingError: there is no such method.
    """
    found: dict[str, str | SelfSpec] = {}
    for text in split(texts):
        if text in SHORT or known_way(text) is not None:
            found |= {name: name for name in SHORT.get(text, (text,))}
        else:
            found[text] = _read(text)
    return found


def _read(text: str) -> SelfSpec:
    try:
        return read_spec(text, "--methods")
    except SettingError as error:
        raise SettingError(f"{error} Other methods are {', '.join([PLAIN, 'static-compiled', *SHORT])}.") from error


def known_way(name: str) -> Way | None:
    """Returns the way of that name, ``None`` if there is none."""
    if found := _LOOKUP.fullmatch(name):
        return prompt_lookup(int(found[1]), int(found[2] or _LOOKUP_TOKENS))
    return KNOWN.get(name)


def fresh(spec: SelfSpec) -> SelfSpec:
    """Returns a ``SelfSpec`` of the same settings, which knows only what was loaded from the original's file."""
    made = SelfSpec(spec.draft, spec.stop, spec.tree, spec.max_draft, None, spec.task, spec.compile)
    made._knowledge.saved = spec._knowledge.saved
    return made


def ways_of(methods: Iterable[str | SelfSpec] | Mapping[str, str | SelfSpec]) -> list[Way]:
    """Returns plain generate and the named ways.

    Args:
        methods: names of ways or ``SelfSpec``s, or a mapping to them from names for tables.

    Raises:
        SettingError, SettingTypeError: there is no such way.
    """
    given = list(methods.items()) if isinstance(methods, Mapping) else [(None, method) for method in methods]
    ways = [_way(name, method) for name, method in given]
    named = [way.name for way in ways]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise SettingError(f"methods: {', '.join(twice)} is given twice. Give each a name of its own: {{name: spec}}.")
    return list({way.name: way for way in (KNOWN[PLAIN], *ways)}.values())


def _way(name: str | None, method: Any) -> Way:
    if isinstance(method, SelfSpec):
        group = OURS_GROUP if method.compile is False else COMPILED_GROUP
        return ours(name or _shown(method), lambda: fresh(method), group)
    if not isinstance(method, str):
        raise SettingTypeError(f"methods must be names or SelfSpec objects, got {method!r}.")
    way = known_way(method)
    if way is None:
        raise SettingError(
            f"methods: {method!r} is not known. Give a SelfSpec, prompt-lookup(N, K), or one of "
            f"{', '.join(repr(known) for known in KNOWN)}."
        )
    return way


def _shown(spec: SelfSpec) -> str:
    """The settings that differ from the default."""
    usual = SelfSpec()
    names = ("draft", "stop", "tree", "max_draft", "compile")
    shown = [f"{name}={getattr(spec, name)!r}" for name in names if getattr(spec, name) != getattr(usual, name)]
    return f"SelfSpec({', '.join(shown)})"


def usual_ways(model: PreTrainedModel, batch: Batch) -> tuple[list[Way], list[LeftOut]]:
    """Finds by calls of a few tokens all ways that fit the model, and those that do not, with reasons."""
    ways, left_out = [], list(_WITH_PARTS)
    for way in KNOWN.values():
        why = _ON_CPU if way.group == COMPILED_GROUP and model.device.type == "cpu" else _why_not(model, way, batch)
        if why:
            left_out.append(LeftOut(way.name, why))
        else:
            ways.append(way)
    return ways, left_out


def check_ways(model: PreTrainedModel, ways: Iterable[Way], batch: Batch) -> None:
    """Checks by calls of a few tokens that named ways fit the model.

    Raises:
        SettingError: a way does not fit.
    """
    for way in ways:
        if why := _why_not(model, way, batch):
            raise SettingError(f"methods: {way.name} does not fit this model: {why}. Leave it out.")


def _why_not(model: PreTrainedModel, way: Way, batch: Batch) -> str:
    if way.name == PLAIN:
        return ""
    given: dict[str, Any] = dict(way.options) if way.make is None else {"assistant": way.make()}
    if way.is_static:
        given["disable_compile"] = True  # graphs for so short a cache would be found again by calls that count
    ids, mask = batch.ids[:1], batch.mask[:1]
    try:
        with muted():
            model.generate(ids, attention_mask=mask, max_new_tokens=_TRIED, do_sample=False, **given)
    except _REFUSALS as error:
        return brief(error).removesuffix(".")
    return ""


def that_take(ways: Sequence[Way], batch_size: int) -> list[Way]:
    """Returns the ways that support a batch size."""
    return [way for way in ways if way.takes_batches or batch_size == 1]
