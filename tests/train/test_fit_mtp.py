"""Fitting an MTP layer, to text and to what the model writes itself."""

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

from helpers.architectures import build
from helpers.calls import check_lossless
from helpers.fitted import Recording, arguments, ids_of, mtp_of, rows, weights
from helpers.models import VOCABULARY, character_tokenizer, ragged_batch, tiny_llama
from hf_selfspec import MTP, ReducedHead, SelfSpec, fit_mtp, load_mtp
from hf_selfspec.errors import SelfSpecError, SettingError, UnsupportedOptionError
from hf_selfspec.modules import shipped
from hf_selfspec.modules.mtp import MtpHead
from hf_selfspec.train import loading, texts, write_answers

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore:`is_gradient_checkpointing`:FutureWarning")
PROMPTS = ["abcabcab", "what is this?", "one more prompt"] * 7


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
    loaded, drafted = MTP(tmp_path / "out"), MtpHead.load(tmp_path / "out").tokens
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
    """The fit begins with them; they are saved under the names of the model's checkpoint, and come back by these."""
    model, folder, text = sharp(2), tmp_path / "model", rows(30)
    model.config.num_nextn_predict_layers = 1  # as models have it that ship with layers
    model.save_pretrained(folder)
    SelfSpec(MTP(mtp_of(model))).export_draft(folder / "layer", model)
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "layer" / "model-mtp.safetensors")
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
    SelfSpec(MTP(tuned)).export_draft(tmp_path / "tuned", model)
    again = load_mtp(model, tmp_path / "tuned")
    assert all(map(torch.equal, again.state_dict().values(), tuned.state_dict().values()))
    (stats,) = check_lossless(model, SelfSpec(MTP()), 12, [ragged_batch()])
    assert stats.accepted


def test_wrong_settings() -> None:
    model, peft_head = tiny_llama(), tiny_llama()
    get_peft_model(peft_head, LoraConfig(target_modules=["lm_head"]))
    for of, changed, words in (
        (model, {"steps": 0}, r"fit_mtp\(steps\) must be"),
        (model, {"head_rows": 0}, r"fit_mtp\(head_rows\) must be"),
        (model, {"head_rows": ReducedHead.of([1, 5000], 6000)}, "names token 5000"),
        (model, {"state_layers": [7]}, r"fit_mtp\(state_layers\) must be"),
        (model, {"state_layers": 3}, r"fit_mtp\(state_layers\) must be a list"),
        (model, {"block_size": 4}, "block_size=4"),
        (model, {"start": "new"}, r"fit_mtp\(start\) must be one of"),
        (model, {"start": "shipped", "state_layers": [1, 2]}, "the second without state_layers"),
        (model, {"start": "shipped"}, "was not loaded from a checkpoint"),
        (build("mamba"), {}, "cannot stand alone"),
        (build("gpt_bigcode"), {}, "its exits can neither be trained"),
        *((build(name), {}, "layer . of .* cannot stand alone") for name in ("gemma3n_text", "gpt_neo", "olmo_hybrid")),
        (build("opt-350m"), {}, "sends states of width 16 to its head and has"),
        (peft_head, {}, "no output head that is a plain linear layer"),
    ):
        with pytest.raises(SelfSpecError, match=words):
            fit_mtp(of, None, rows(4), **{"block_size": 32} | changed)
    shipped.attach(model, MtpHead.of(model, state_layers=(1, 2)))
    with pytest.raises(SettingError, match="did not ship with it"):
        fit_mtp(model, None, rows(4), start="shipped", block_size=32)


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
