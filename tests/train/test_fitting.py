"""What is fitted to a frozen model, to text and to what it writes itself: fits, what they keep, drafts, and speed."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.utils.data import Subset
from transformers import EarlyStoppingCallback, LlamaForCausalLM

from helpers.architectures import build
from helpers.calls import check_lossless
from helpers.fitted import EXIT, Recording, adapter_of, arguments, ids_of, mtp_of, probe_of, rows, weights
from helpers.models import VOCABULARY, character_tokenizer, ragged_batch, tiny_llama
from helpers.processes import in_two_processes
from helpers.train.by_hand import attributes_of
from hf_selfspec import Adapter, ReducedHead, SelfSpec, fit_adapter, fit_exit_heads, fit_mtp, fit_probe, load_mtp
from hf_selfspec.drafts import MTP, Cascade, EarlyExit, EarlyExitAdapter, Lookup
from hf_selfspec.errors import SelfSpecError, SettingError, UnsupportedOptionError
from hf_selfspec.modules import shipped
from hf_selfspec.modules.draft_module import DraftModule
from hf_selfspec.modules.mtp import MtpHead
from hf_selfspec.train import exits, loading, texts, write_answers
from hf_selfspec.train.exits import FrozenModel, cross_entropy
from hf_selfspec.train.texts import divided, packed

# Too few rows for any to be held out, so that fits are not evaluated.
FEW = 19
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore:`is_gradient_checkpointing`:FutureWarning")


def adapter_fit(model: Any, text: Any = None, **changed: Any) -> Adapter:
    options: dict[str, Any] = {"exit_layer": EXIT, "block_size": 32} | changed
    return fit_adapter(model, None, rows(FEW) if text is None else text, **options)


def test_a_fit_of_an_adapter_learns_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny_llama(4, factor=2.0).train()
    model.lm_head.weight.requires_grad_(False)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    before, learning = weights(model), [parameter.requires_grad for parameter in model.parameters()]
    attributes = attributes_of(model)
    args = arguments(tmp_path, num_train_epochs=3, learning_rate=1e-2)
    args._n_gpu = 2  # of which a fit takes one
    with torch.no_grad():
        adapter = adapter_fit(model, rows(), args=args, output_dir=tmp_path / "out")
        assert not torch.is_grad_enabled()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == learning
    assert all(parameter.grad is None for parameter in model.parameters())
    assert attributes_of(model) == attributes
    assert (model.training, adapter.training, args.n_gpu) == (True, False, 2)
    figures, recipe = adapter.about["figures"], adapter.about["recipe"]
    assert figures["last loss"] < figures["first loss"] - 0.01
    kept = {"exit layer": 2, "blocks": "attention", "heads": 4, "tokens": 57 * 32}
    assert {name: value for name, value in recipe.items() if name != "steps"} == kept
    ids = ids_of(rows()[:30])
    assert loss_of(model, adapter, ids) < loss_of(model, adapter_fit(model, args=arguments(tmp_path, max_steps=1)), ids)
    assert "## Figures\n\n- first loss" in (tmp_path / "out" / "README.md").read_text()


def loss_of(model: LlamaForCausalLM, adapter: Adapter, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy against the whole model's distribution, by hand."""
    with torch.no_grad():
        output = model.eval()(ids, output_hidden_states=True)
    drafted = model.lm_head(adapter(output.hidden_states[EXIT]))
    return -(output.logits.softmax(-1) * drafted.log_softmax(-1)).sum(-1).mean()


def test_the_loss_is_that_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equation 3 over all positions and its gradient, whatever the chunks."""
    model = tiny_llama()
    adapter, ids = adapter_of(model), torch.randint(2, VOCABULARY, (2, 9))
    expected = loss_of(model, adapter, ids)
    gradient = torch.autograd.grad(expected, adapter.qkv.weight)
    with (frozen := FrozenModel(model, (EXIT,))).frozen():
        states = frozen.hidden_states(ids)
        for elements in (10**9, 4 * VOCABULARY):
            monkeypatch.setattr(exits, "LOGIT_ELEMENTS", elements)
            drafted = adapter(states[f"states_{EXIT}"])
            losses = frozen.per_token(cross_entropy, frozen.own_head, drafted, states["final"])
            assert losses.shape == (18,)
            torch.testing.assert_close(losses.mean(), expected, atol=1e-5, rtol=0)
            found = torch.autograd.grad(losses.mean(), adapter.qkv.weight)
            torch.testing.assert_close(found, gradient, atol=1e-6, rtol=1e-4)


def test_a_fit_of_a_probe_learns_acceptance(tmp_path: Path) -> None:
    """Better than always saying the more frequent of both."""
    model = tiny_llama(factor=0.6)
    args = arguments(tmp_path, num_train_epochs=10, learning_rate=6e-2)
    text = [{"input_ids": row} for row in torch.randint(2, VOCABULARY, (40, 32)).tolist()]
    probe = fit_probe(model, None, text, exit_layer=EXIT, block_size=32, args=args)
    figures = probe.about["figures"]
    assert figures["last loss"] < figures["first loss"] - 0.002
    ids = ids_of(text[:38])
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
        exits = model.lm_head(model.model.norm(output.hidden_states[EXIT]))
        label = (exits.argmax(-1) == output.logits.argmax(-1)).float()
        sure = probe(exits.flatten(0, 1), output.hidden_states[EXIT].flatten(0, 1)).view(label.shape)
    share = label.mean()
    constant = F.binary_cross_entropy(share.expand_as(label), label)
    assert F.binary_cross_entropy(sure, label) < constant - 0.002
    assert sure.mean().item() == pytest.approx(share.item(), abs=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*reach none of the accuracies:UserWarning")
def test_two_processes_fit_as_one_does(tmp_path: Path) -> None:
    """The same parts on both ranks, which are those of one process with batches twice as large."""
    from helpers.distributed import fit_all

    in_two_processes("distributed.py", "fits", tmp_path)
    first, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    args = arguments(tmp_path, per_device_train_batch_size=8, max_steps=5, learning_rate=1e-2, seed=3)
    begun = fit_all(arguments(tmp_path, max_steps=1, learning_rate=1e-9, seed=3))
    for name, part in fit_all(args).items():
        saved = type(part).from_pretrained(tmp_path / name)
        for key, value in part.state_dict().items():
            value_of_first = first[name][key]
            assert torch.equal(value_of_first, other[name][key])
            assert torch.equal(value_of_first, saved.state_dict()[key])
            torch.testing.assert_close(value_of_first, value, atol=1e-5, rtol=1e-3)
        start = begun[name].state_dict()
        assert any(not torch.allclose(value, start[key], atol=1e-3) for key, value in first[name].items())


def test_rows_of_text() -> None:
    class Tokens:
        eos_token_id = 1

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    text_rows = packed(Tokens(), ["abc", {"text": "de"}, {"input_ids": [5, 6]}], 4)
    assert text_rows.tolist() == [[97, 98, 99, 1], [100, 101, 1, 5]]
    assert packed(Tokens(), [{"input_ids": [5, 1]}, "ab"], 1).flatten().tolist() == [5, 1, 97, 98, 1]  # ends once
    assert packed(None, Subset([{"input_ids": [5, 6]}, {"input_ids": [7]}], [0]), 1).tolist() == [[5], [6]]
    parts = divided(many := packed(None, rows(40), 32))
    assert torch.equal(torch.cat(parts), many)
    assert len(parts[1]) == 2


def fit_in(folder: Path, callbacks: Sequence[Any] = (), **changed: Any) -> Adapter:
    """A short fit with arguments of the user's own, which keep checkpoints."""
    kept: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    args = arguments(folder, **kept | changed)
    return adapter_fit(tiny_llama(4, factor=2.0), rows(40), args=args, callbacks=callbacks)


def test_a_fit_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """As any training of the Trainer: with the weights of a fit that was not stopped."""
    whole = fit_in(tmp_path)
    resumed = fit_in(tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(path.name for path in (tmp_path / "resumed").iterdir()) == ["checkpoint-4"]
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value)
    with pytest.raises(SettingError, match=r"the fit has diverged: .* is not finite.*Give a smaller learning rate"):
        fit_in(tmp_path / "other", learning_rate=1e38)


def test_held_out_rows_are_evaluated(tmp_path: Path) -> None:
    """Where the user's arguments have it: the part's loss on the rows at the end, here while it learns nothing; by a
    callback of transformers the fit ends."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 1e-9}
    options["metric_for_best_model"] = "agreement_with_the_whole_model"
    adapter = fit_in(tmp_path, callbacks=[EarlyStoppingCallback(2)], max_steps=20, **options)
    assert adapter.about["recipe"]["steps"] == 6
    log = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    evaluations = [entry for entry in log if "eval_loss" in entry]
    told = adapter.about["figures"]["agreement with the whole model"]
    assert [entry["eval_agreement_with_the_whole_model"] for entry in evaluations] == [told] * 3
    loss = loss_of(tiny_llama(4, factor=2.0), adapter, ids_of(rows(40)[-2:])).item()
    assert [entry["eval_loss"] for entry in evaluations] == pytest.approx([loss] * 3, rel=1e-4)


@pytest.mark.parametrize(("chunk", "others"), [(None, False), (8, True)])
def test_an_adapter_sees_the_whole_text_of_each_row(chunk: int | None, others: bool) -> None:
    """Also where rows end in an earlier chunk of the prompts than others, and where others draft in between."""
    model, lengths = tiny_llama(3), (4, 20, 15)
    adapter, rule, inputs = adapter_of(model), Recording(), ragged_batch(lengths)
    draft = EarlyExitAdapter(adapter)
    spec = SelfSpec(Cascade([Lookup(), draft]) if others else draft, rule, max_draft=5)
    model.generate(**inputs, max_new_tokens=12, do_sample=False, prefill_chunk_size=chunk, assistant=spec)
    for row, length in enumerate(lengths):
        prompt, compared = inputs["input_ids"][row, -length:].tolist(), 0
        for input_ids, logits, _ in rule.calls:
            ids = input_ids[row].tolist()  # rows are aligned right; their own text begins with the prompt
            start = next((at for at in range(len(ids)) if ids[at : at + length] == prompt), None)
            if start is not None:
                with torch.no_grad():
                    states = model(input_ids[row : row + 1, start:-1], output_hidden_states=True).hidden_states[EXIT]
                    expected = model.lm_head(adapter(states))[0, -1]
                compared += torch.allclose(logits[row], expected, rtol=1e-3, atol=1e-4)
        assert compared > 3


def test_what_is_not_fitted() -> None:
    """What the command line refuses as well is tested there."""
    model, peft_head, other = tiny_llama(), tiny_llama(), build("gemma3n_text")
    get_peft_model(peft_head, LoraConfig(target_modules=["lm_head"]))

    def mtp(model: Any, **changed: Any) -> None:
        fit_mtp(model, None, rows(4), **{"block_size": 32} | changed)

    for fit, of, changed, words in (
        (adapter_fit, model, {"text": ["text"]}, "and the tokenizer"),
        (adapter_fit, model, {"text": "text"}, "takes a list of texts"),
        (adapter_fit, model, {"args": {"max_steps": 3}}, r"fit_adapter\(args\) must be TrainingArguments"),
        (adapter_fit, 3, {}, "takes a causal LM of transformers"),
        (adapter_fit, other, {"exit_layer": 1}, "several for each token"),
        (mtp, model, {"steps": 0}, r"fit_mtp\(steps\) must be"),
        (mtp, model, {"head_rows": 0}, r"fit_mtp\(head_rows\) must be"),
        (mtp, model, {"head_rows": ReducedHead.of([1, 5000], 6000)}, "names token 5000"),
        (mtp, model, {"state_layers": [7]}, r"fit_mtp\(state_layers\) must be"),
        (mtp, model, {"state_layers": 3}, r"fit_mtp\(state_layers\) must be a list"),
        (mtp, model, {"block_size": 4}, "block_size=4"),
        (mtp, model, {"start": "new"}, r"fit_mtp\(start\) must be one of"),
        (mtp, model, {"start": "shipped", "state_layers": [1, 2]}, "the second without state_layers"),
        (mtp, model, {"start": "shipped"}, "was not loaded from a checkpoint"),
        (mtp, build("gpt_bigcode"), {}, "its exits can neither be trained"),
        *(
            (mtp, build(name), {}, "layer . of .* cannot stand alone")
            for name in ("gemma3n_text", "gpt_neo", "olmo_hybrid")
        ),
        (mtp, build("opt-350m"), {}, "sends states of width 16 to its head and has"),
        (mtp, peft_head, {}, "no output head that is a plain linear layer"),
    ):
        with pytest.raises(SelfSpecError, match=words):
            fit(of, **changed)
    assert not any(module._forward_hooks for module in other.modules())
    with torch.inference_mode(), pytest.raises(SettingError, match=r"fit_adapter trains, which torch\.inference_mode"):
        adapter_fit(model)
    shipped.attach(model, MtpHead.of(model, state_layers=(1, 2)))
    with pytest.raises(SettingError, match="did not ship with it"):
        mtp(model, start="shipped")


def test_parts_of_other_models(tmp_path: Path) -> None:
    model = tiny_llama()
    adapter = adapter_fit(model, args=arguments(tmp_path, max_steps=1))
    for other, part, words in (
        (tiny_llama(seed=3), adapter, "other weights"),
        (tiny_llama(8), adapter, "a model of 6 layers, not of 8"),
        (tiny_llama(2), adapter_of(model, exit_layer=2), "has 2 layers"),
    ):
        with pytest.raises(SettingError, match=words):
            other.generate(**ragged_batch((5,)), max_new_tokens=4, assistant=SelfSpec.kangaroo(part))
    (probe := probe_of(model, EXIT)).save_pretrained(tmp_path)
    for part in (probe, tmp_path):
        assert SelfSpec.adaspeed(probe=part).draft == EarlyExit(EXIT)
    with pytest.raises(SettingError, match="the probe was fitted to the states of exit layer 2"):
        SelfSpec.adaspeed(3, probe)


@pytest.mark.filterwarnings("ignore:fit_exit_heads")
@pytest.mark.every_run("fit_mtp-.*")
@pytest.mark.parametrize(
    ("fit", "chosen"),
    [
        (fit_adapter, {"exit_layer": EXIT}),
        (fit_probe, {"exit_layer": EXIT}),
        (fit_exit_heads, {"layers": [EXIT], "copied": True}),
        (fit_mtp, {"steps": 2, "head_rows": 20}),
    ],
)
def test_parts_are_written_once_with_their_figures(fit: Any, chosen: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The settings of the model itself, which others may use meanwhile, do not change for it."""
    model, written, save = tiny_llama(3, factor=0.05), list[Path](), DraftModule.save_pretrained
    configs, usual = [], model.generation_config
    monkeypatch.setattr(DraftModule, "save_pretrained", lambda part, at: written.append(at) or save(part, at))
    model.model.register_forward_pre_hook(lambda *_: configs.append(model.generation_config))
    args, out = arguments(tmp_path, max_steps=2), tmp_path / "out"
    part = fit(model, None, rows(20), args=args, output_dir=out, block_size=32, **chosen)
    assert part.about["figures"]
    assert written == [out]
    assert (loaded := type(part).from_pretrained(out)).about == part.about
    assert all(map(torch.equal, loaded.state_dict().values(), part.state_dict().values()))
    assert not any(module.training for module in model.modules())
    assert {id(config) for config in configs} == {id(usual)}


@torch.no_grad()
def by_hand(model: Any, head: MtpHead, ids: torch.Tensor, tokens: torch.Tensor) -> tuple[list[float], list[float]]:
    """Of three drafts, one after another: cross entropy against the model's distribution over these tokens, and how
    often the likeliest of them is the model's own choice of all."""
    output, losses, agreements = model(ids, output_hidden_states=True), list[float](), list[float]()
    embeddings, s = model.get_input_embeddings()(ids), ids.shape[1]
    states = head.fuse(torch.cat([output.hidden_states[layer] for layer in head.state_layers or (-1,)], dim=-1))
    for step in (1, 2, 3):
        states = head(embeddings[:, step:], states[:, : s - step], torch.arange(step, s).expand(len(ids), -1))
        drafted, wanted = model.lm_head(states)[..., tokens], output.logits[:, step:]
        losses.append(F.cross_entropy(drafted.flatten(0, 1), wanted[..., tokens].flatten(0, 1).softmax(-1)).item())
        agreements.append((tokens[drafted.argmax(-1)] == wanted.argmax(-1)).float().mean().item())
    return losses, agreements


def sharp(layers: int = 3) -> Any:
    """A model whose choices differ from token to token."""
    model = tiny_llama(layers, factor=2.0)
    model.lm_head.weight.data *= 8
    return model


def test_a_head_learns_to_draft_on_its_own_states(tmp_path: Path) -> None:
    """Figures are those of text that is held out, by its last loss those of the text it learns."""
    model, text = sharp(), rows()
    before = weights(model)
    head = fit_mtp(
        model, None, text, block_size=32, steps=3, head_rows=40, output_dir=tmp_path / "out",
        args=arguments(tmp_path, num_train_epochs=2, learning_rate=2e-3),
    )  # fmt: skip
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    (first, _), (last, _) = (by_hand(model, of, ids_of(text[:30]), head.tokens) for of in (MtpHead.of(model), head))
    assert all(end < begin for begin, end in zip(first, last, strict=True)), (first, last)
    figures = head.about["figures"]
    assert figures["last loss"] == pytest.approx(last[0] + 0.8 * last[1] + 0.64 * last[2], rel=0.05)
    for step, share in enumerate(by_hand(model, head, ids_of(text[-3:]), head.tokens)[1], start=1):
        assert figures[f"agreement at step {step}"] == pytest.approx(share, abs=1e-3)
    # What a folder holds drafts these tokens alone.
    loaded, drafted = MTP(tmp_path / "out"), MtpHead.from_pretrained(tmp_path / "out").tokens
    assert torch.equal(drafted, head.tokens)
    assert len(drafted) == 40
    rule = Recording(ends=False)
    check_lossless(model, SelfSpec(loaded, stop=rule), 9, [ragged_batch()])
    shown = torch.cat([logits.flatten(0, -2) for _, logits, _ in rule.calls])
    shown = shown[shown.any(-1)]  # rows that have ended show zeros
    others = [token for token in range(VOCABULARY) if token not in set(drafted.tolist())]
    assert (shown[:, others] < -1e4).all()
    assert (shown[:, drafted] > -1e4).all()


def test_a_head_may_read_several_layers(tmp_path: Path) -> None:
    """Also those of a model with adapters of PEFT."""
    model, text = get_peft_model(sharp(4), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)), rows(19)
    head = fit_mtp(
        model, None, text, block_size=32, state_layers=[1, 2, 4], head_rows=VOCABULARY, output_dir=tmp_path / "out",
        args=arguments(tmp_path, max_steps=12, learning_rate=1e-2, logging_steps=1, per_device_train_batch_size=19),
    )  # fmt: skip
    losses, _ = by_hand(model.get_base_model(), head, ids_of(text), torch.arange(VOCABULARY))
    figures, last = head.about["figures"], losses[0] + 0.8 * losses[1] + 0.64 * losses[2]
    assert figures["last loss"] < figures["first loss"]
    assert figures["last loss"] == pytest.approx(last, rel=5e-4)
    with torch.no_grad():
        states = model(ids_of(text), output_hidden_states=True).hidden_states  # the last one is normed
        fused = head.fuse(torch.cat([states[layer] for layer in (1, 2, 4)], dim=-1))
    assert not torch.allclose(fused, states[4], atol=1e-3)  # the others' weights begin at 0
    (stats,) = check_lossless(model, SelfSpec(MTP(tmp_path / "out")), prompts=[ragged_batch()])
    assert stats.accepted


def test_shipped_layers_are_tuned(tmp_path: Path) -> None:
    """The fit begins with them."""
    model, folder, text = sharp(2), tmp_path / "model", rows(30)
    model.config.num_nextn_predict_layers = 1  # as models have it that ship with layers
    model.save_pretrained(folder)
    parts = {"embedding_norm": "enorm", "state_norm": "hnorm", "projection": "eh_proj"}
    parts |= {"decoder.norm": "shared_head.norm", "decoder.layers.0.": ""}
    layer = mtp_of(model).layers[0].state_dict()
    named = {key.replace(old, new): value for key, value in layer.items() for old, new in parts.items() if old in key}
    tensors = load_file(folder / "model.safetensors") | {f"model.layers.2.{key}": named[key] for key in named}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = type(model).from_pretrained(folder).eval()
    before, new = load_mtp(model), MtpHead.of(model)
    weights_before = [value.clone() for value in before.state_dict().values()]
    tuned = fit_mtp(
        model, None, text, start="shipped", steps=3, block_size=32, head_rows=VOCABULARY,
        args=arguments(tmp_path, num_train_epochs=3),
    )  # fmt: skip
    assert all(map(torch.equal, before.state_dict().values(), weights_before))
    for name, value in tuned.layers[0].state_dict().items():
        changed, other = ((value - of.layers[0].state_dict()[name]).abs().mean() for of in (before, new))
        assert 0 < changed < other / 2, name
    first, last = (by_hand(model, of, ids_of(text[:20]), torch.arange(VOCABULARY))[0] for of in (before, tuned))
    assert all(after < at_first for at_first, after in zip(first, last, strict=True)), (first, last)
    (stats,) = check_lossless(model, SelfSpec(MTP(tuned)), 12, [ragged_batch()])
    assert stats.accepted


PROMPTS = ["abcabcab", "what is this?", "one more prompt"] * 7


def test_answers_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, every second one drawn, whatever the model's own settings. A file that is there stays, and what was
    written before an interrupt."""
    model, tokenizer, file = tiny_llama(2), character_tokenizer(), tmp_path / "answers.jsonl"
    model.generation_config.update(return_dict_in_generate=True, num_return_sequences=2, num_beams=2)
    drawn, generate = list[bool](), type(model).generate

    def noted(self: Any, ids: torch.Tensor, **options: Any) -> Any:
        if len(drawn) == 3:
            raise KeyboardInterrupt
        drawn.append(options["generation_config"].do_sample)
        return generate(self, ids, **options)

    monkeypatch.setattr(type(model), "generate", noted)
    answers = write_answers(model, tokenizer, PROMPTS, file, answer_tokens=8)
    assert drawn == [False, True]
    assert loading.texts(str(file), or_ids=True) == answers
    with pytest.raises(KeyboardInterrupt):
        write_answers(model, tokenizer, PROMPTS, tmp_path / "part.jsonl", answer_tokens=8)
    assert len((tmp_path / "part.jsonl").read_text().splitlines()) == 16
    monkeypatch.undo()
    for prompt, row in zip(PROMPTS, answers, strict=True):
        assert row["input_ids"][: len(prompt)] == tokenizer(prompt)["input_ids"]
    ids = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    alone = tiny_llama(2).generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    assert answers[0]["input_ids"] == alone[: len(answers[0]["input_ids"])]
    for of, prompts, new_tokens, words in (
        (model, PROMPTS, 8, r"answers\.jsonl cannot be written \(File exists\)"),
        (model, "a", 8, r"write_answers\(prompts\) must be a list"),
        (build("gpt2"), PROMPTS, 128, "more than the 128 positions"),
    ):
        with pytest.raises(SelfSpecError, match=words):
            write_answers(of, tokenizer, prompts, file, new_tokens)
    monkeypatch.setattr(texts, "PartialState", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(UnsupportedOptionError, match="write_answers runs in one process alone"):
        write_answers(model, tokenizer, PROMPTS, tmp_path / "other.jsonl")


def test_other_threads_have_the_whole_head_meanwhile(tmp_path: Path) -> None:
    model, sizes, ids = tiny_llama(), set[int](), torch.tensor([[3, 4, 5]])
    fitting = get_ident()

    def head_sees(module: Any, args: Any) -> None:
        """While the fit runs the head, another thread runs the model."""
        if get_ident() == fitting and len(sizes) == 0:
            with ThreadPoolExecutor(1) as pool:
                sizes.add(pool.submit(lambda: model(ids).logits.shape[-1]).result())

    with model.lm_head.register_forward_pre_hook(head_sees):
        fit_mtp(model, None, rows(19), args=arguments(tmp_path, max_steps=1), block_size=32, head_rows=40)
    assert sizes == {model.config.vocab_size}
