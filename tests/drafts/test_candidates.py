"""A user's own ``CandidateGenerator``: what it is given, for each row, against transformers' own loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation import candidate_generator as theirs
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator

from helpers.models import BATCH, ROW, VOCABULARY, tiny_llama
from hf_selfspec import SelfSpec, SettingError, UnsupportedOptionError
from hf_selfspec.drafts.candidates import one_for_each_row


class Recording(PromptLookupCandidateGenerator):
    """Transformers' own, with what it is told; ``family`` has its copies. In its first calls it may draft nothing."""

    def __init__(self, idle: int = 0) -> None:
        super().__init__(num_output_tokens=4, max_matching_ngram_size=1, max_length=62)
        self.idle, self.family, self.reports = idle, [self], list[Any]()

    def __deepcopy__(self, memo: Any) -> Recording:
        self.family.append(Recording())
        return self.family[-1]

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        self.idle -= 1
        return (input_ids, None) if self.idle >= 0 else super().get_candidates(input_ids, **kwargs)

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        assert (scores.shape[0], scores.shape[2], scores.dtype) == (1, VOCABULARY, torch.float32)
        self.reports.append((input_ids.clone(), scores.clone(), num_matches))


@pytest.mark.parametrize("options", [{"eos_token_id": 43}, {"suppress_tokens": [17, 20]}], ids=str)
def test_reports_are_those_of_transformers_own_loop(
    fresh_llama: LlamaForCausalLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_new_tokens": 50, **options}
    ours, reference = Recording(), Recording(idle=1)
    monkeypatch.setattr(fresh_llama, "_get_candidate_generator", lambda **kwargs: reference)
    plain = fresh_llama.generate(**ROW, **options, assistant_model=fresh_llama)
    assert torch.equal(fresh_llama.generate(**ROW, **options, assistant=SelfSpec(draft=ours)), plain)
    # Theirs begins with the prompt, ours with the first token, and does not ask where there is room for none.
    expected = reference.reports[1:][: len(ours.reports)]
    assert len(reference.reports) - len(ours.reports) in (1, 2)
    assert len(ours.reports) > 5
    for (ids, scores, matches), (their_ids, their_scores, their_matches) in zip(ours.reports, expected, strict=True):
        assert torch.equal(ids, their_ids)
        assert matches == their_matches
        torch.testing.assert_close(scores, their_scores[:, : scores.shape[1]])  # at the end theirs has no limit
    assert len({matches for _, _, matches in ours.reports}) > 1


@pytest.mark.parametrize("eos", [None, 43], ids=["no end", "rows end"])
def test_each_row_has_a_generator(eos: int | None) -> None:
    model, first = tiny_llama(factor=0.5), Recording()
    options = {"max_new_tokens": 30, "eos_token_id": eos}
    plain = model.generate(**BATCH, **options)
    spec = SelfSpec(draft=first)
    assert torch.equal(model.generate(**BATCH, **options, assistant=spec), plain)
    assert spec.stats is not None
    assert len(first.family) == 3
    assert all(one.reports for one in first.family)
    for row, one in enumerate(first.family):
        ids = one.reports[-1][0]
        start = int(BATCH["attention_mask"][row].argmax())
        assert torch.equal(ids, plain[row : row + 1, start : start + ids.shape[1]])


class WithModel(CandidateGenerator):
    """Holds a model and a state of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.counts = {"rows": 0}

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        self.counts["rows"] += 1
        return input_ids, None


def test_copies_share_models_and_nothing_else(fresh_llama: LlamaForCausalLM) -> None:
    """What cannot be copied drafts for one row."""
    generator, forwards = WithModel(fresh_llama), list[Any]()
    copies = one_for_each_row(generator, 3)
    assert copies[0] is generator
    assert len({id(one.counts) for one in copies}) == 3
    assert all(one.model is fresh_llama for one in copies)
    spec = SelfSpec(draft=generator)
    fresh_llama.generate(**BATCH, max_new_tokens=8, assistant=spec)
    assert generator.counts["rows"] == 6
    generator.lock = threading.Lock()
    fresh_llama.register_forward_pre_hook(lambda *args: forwards.append(args))
    words = r"WithModel cannot draft for a batch of 3 rows: .*cannot pickle .*__deepcopy__, or generate for one row"
    with pytest.raises(UnsupportedOptionError, match=words):
        fresh_llama.generate(**BATCH, max_new_tokens=8, assistant=spec)
    assert not forwards
    fresh_llama.generate(**ROW, max_new_tokens=8, assistant=spec)


NEEDY = [
    kind
    for kind in vars(theirs).values()
    if isinstance(kind, type) and issubclass(kind, CandidateGenerator) and kind.requires_model_outputs
]


@pytest.mark.parametrize("kind", NEEDY)
def test_generators_that_need_hidden_states(kind: type[CandidateGenerator]) -> None:
    words = rf"SelfSpec\(draft={kind.__name__}\) .*requires_model_outputs.* transformers' own loop"
    with pytest.raises(SettingError, match=words):
        SelfSpec(draft=object.__new__(kind))
