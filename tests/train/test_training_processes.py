"""Processes that tests start: trainings in two of them are those of one, and so is generation with sharded weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM

from helpers.architectures import build
from helpers.calls import PAST
from helpers.distributed import CALLS, CASES, OPTIONS, WRAPPERS, tiny, train_once, trainer, weights
from helpers.models import ragged_batch, tiny_llama
from helpers.processes import in_two_processes
from helpers.train.by_hand import ByHand, assert_close, assert_equal, history, rotational_shares, stays
from hf_selfspec import Cascade, EarlyExit, Lookup, SelfSpec, UnsupportedOptionError
from hf_selfspec.generate import call as one_call
from hf_selfspec.model.anatomy import Anatomy

Results = dict[tuple[str, str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What two processes found, by wrapper, case and rank; both wrappers in one launch, for its start takes longest."""
    folder = tmp_path_factory.mktemp("distributed")
    in_two_processes("distributed.py", "trainings", folder)
    keys = [(wrapper, case, rank) for wrapper in WRAPPERS for case in CASES for rank in (0, 1)]
    return {(wrapper, case, rank): torch.load(folder / f"{wrapper}-{case}-{rank}.pt") for wrapper, case, rank in keys}


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", CASES)
def test_trainings(results: Results, tmp_path: Path, wrapper: str, case: str) -> None:
    """Exits: weights and logs of one process with batches twice as large. Dropout: both ranks drop the same of their
    two rows, also all of them; the weights are those of a training by hand."""
    first, other = ranks = [results[wrapper, case, rank] for rank in (0, 1)]
    if case.startswith("exits"):
        callbacks, options = CASES[case]
        run = trainer(tiny(), callbacks(), tmp_path, **({"per_device_train_batch_size": 4} | options))
        run.train()
        expected = weights(run.model)
        for key in ("loss", "loss/exit_2", "loss/exit_3", "loss/exit_4"):
            for rank in ranks:
                values = [entry[key] for entry in rank["logs"] if key in entry]
                assert values == pytest.approx(history(run, key), rel=1e-5)
                assert values
    else:
        shares = rotational_shares if "both" in case else lambda step: {4: 1.0}
        expected = ByHand(tiny(), shares, p_max=0.9, copies=2).weights
        kept = [stays(step, 2, 0.9).sum(0).tolist() for step in range(3)]
        assert any(0 in counts for counts in kept)
        assert "checkpointed" in case or first["rows"] == kept  # there layers run twice
        assert first["rows"] == other["rows"]
        assert_equal(first["weights"], other["weights"])
    for rank in ranks:
        assert rank["kind"] == {"ddp": "DistributedDataParallel", "fsdp": "FSDPLlamaForCausalLM"}[wrapper]
        assert_close(rank["weights"], expected)
        assert not rank["changed"]


@pytest.mark.slow
def test_rollouts_of_sharded_weights(tmp_path: Path) -> None:
    model = tiny_llama(layers=4, factor=0.5)
    model.save_pretrained(tmp_path / "model")
    in_two_processes("distributed.py", "rollouts", tmp_path)
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for moment in ("before", "after"):
        for (lengths, new), of_rank in zip(CALLS, of_ranks, strict=True):
            plain = model.generate(**ragged_batch(lengths), **OPTIONS, max_new_tokens=new).tolist()
            assert [of_rank[f"{name}, {moment}"][0] for name in ("lookup", "default", "mixed")] == [plain] * 3
            options = {**ragged_batch(lengths), **OPTIONS, "max_new_tokens": new, "eos_token_id": list(range(40, 60))}
            assert of_rank[f"uneven, {moment}"][0] == model.generate(**options).tolist()
        train_once(model)
    assert any(of_rank["uneven, before"][1] for of_rank in of_ranks)


def test_models_of_a_sharded_class_are_drafted_for() -> None:
    """As FSDP2 makes them; their methods are torch's, some of them marked as deprecated."""
    model, spec = tiny_llama(layers=2), SelfSpec.lookup()
    model.__class__ = type("FSDPLlamaForCausalLM", (FSDPModule, LlamaForCausalLM), {"__module__": "torch"})
    model.generate(**ragged_batch((9,)), **OPTIONS, max_new_tokens=4, assistant=spec)
    assert spec.stats.rounds


@pytest.mark.every_run("llama-0|gemma3_text-30")
@pytest.mark.parametrize("questions", [0, 30])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_cache_that_is_handed_back(name: str, questions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a row that ends early takes a forward, which others run along with; chats continue from it. A
    finished process runs along while others go on, here for so many questions: it asks as often as it runs a forward,
    and once more."""
    model, asked, forwards = build(name), list[bool](), list[bool]()

    def ask(is_unfinished: bool) -> bool:
        asked.append(is_unfinished)
        return is_unfinished or len(asked) < questions

    def count(*_: Any) -> None:
        forwards.append(True)

    count.__module__ = "torch"  # a hook of others would be checked, which several processes cannot do
    monkeypatch.setattr(one_call, "others_are_unfinished", lambda device: ask)
    prompts: dict[str, Any] = {**ragged_batch((9, 9), seed=3), "do_sample": False, "pad_token_id": 0}
    first = model.generate(**prompts, max_new_tokens=14)
    end = next(token for token in first[0, 12:16].tolist() if token not in first[1].tolist())
    options = prompts | {"max_new_tokens": 14, "eos_token_id": end, "return_dict_in_generate": True}
    plain = model.generate(**options)
    with Anatomy.of(model).layers[0].register_forward_pre_hook(count):
        ours = model.generate(**options, synced_gpus=True, assistant=SelfSpec.lookup())
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(forwards) == len(asked) - 1
    assert len(asked) >= questions
    assert asked == sorted(asked, reverse=True)
    more = torch.cat([plain.sequences, torch.tensor([[11, 12], [13, 14]])], dim=1)
    mask = torch.ones_like(more)
    mask[0, plain.sequences[0].tolist().index(end, 9) + 1 : plain.sequences.shape[1]] = 0
    options |= {"input_ids": more, "attention_mask": mask, "eos_token_id": None}
    ids = [model.generate(**options, **{PAST: each.past_key_values}).sequences for each in (plain, ours)]
    assert torch.equal(*ids)


def test_only_drafts_without_forwards(llama: LlamaForCausalLM) -> None:
    options = {**ragged_batch((9,)), "max_new_tokens": 12, "do_sample": False, "synced_gpus": True}
    with pytest.raises(UnsupportedOptionError, match=r"synced_gpus .* EarlyExit\(.*SelfSpec\.lookup\(\)"):
        llama.generate(**options, assistant=SelfSpec(EarlyExit(2)))
    spec = SelfSpec(Cascade([Lookup(), EarlyExit(2)]))
    with pytest.warns(UserWarning, match=r"EarlyExit.* is left out"), pytest.raises(ValueError, match="process group"):
        llama.generate(**options, assistant=spec)
