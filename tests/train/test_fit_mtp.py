"""Fitting an MTP layer, to text and to what the model writes itself."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from helpers.architectures import build
from helpers.calls import check_lossless
from helpers.fitted import Recording, arguments, rows, weights
from helpers.models import VOCABULARY, character_tokenizer, ragged_batch, tiny_llama
from hf_selfspec import MTP, MtpFormat, ReducedHead, SelfSpec, fit_mtp, load_mtp
from hf_selfspec.errors import SelfSpecError, SettingError, SettingTypeError
from hf_selfspec.modules import shipped
from hf_selfspec.modules.mtp import MtpHead
from hf_selfspec.train import write_answers

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pin_memory.*", "ignore:this MTP head does not pay", "ignore:`is_gradient_checkpointing`:FutureWarning"
)
PROMPTS = ["abcabcab", "what is this?", "one more prompt"] * 7


@torch.no_grad()
def losses(model: Any, head: MtpHead, ids: torch.Tensor, steps: int) -> list[float]:
    """By hand: cross entropy of chained drafts against the model's distribution over the head's tokens."""
    output, step_losses = model(ids, output_hidden_states=True), []
    states, embeddings, s = output.hidden_states[-1], model.get_input_embeddings()(ids), ids.shape[1]
    for step in range(1, steps + 1):
        states = head(embeddings[:, step:], states[:, : s - step], torch.arange(step, s).expand(len(ids), -1))
        drafted, wanted = (logits[..., head.tokens] for logits in (model.lm_head(states), output.logits[:, step:]))
        step_losses.append(F.cross_entropy(drafted.flatten(0, 1), wanted.flatten(0, 1).softmax(-1)).item())
    return step_losses


def sharp() -> Any:
    """A model whose choices differ from token to token."""
    model = tiny_llama(factor=2.0)
    model.lm_head.weight.data *= 8
    return model


def test_a_head_learns_to_draft_on_its_own_states(tmp_path: Path) -> None:
    model, text = sharp(), rows()
    before, ids = weights(model), torch.tensor([row["input_ids"] for row in text[:30]])
    options: dict[str, Any] = {"block_size": 32, "steps": 3, "head_rows": 40}
    few, more = (arguments(tmp_path, **how) for how in ({"max_steps": 1}, {"num_train_epochs": 3}))
    begun = fit_mtp(model, None, text, args=few, **options)
    head = fit_mtp(model, None, text, args=more, output_dir=tmp_path / "out", **options)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    first, last = losses(model, begun, ids, 3), losses(model, head, ids, 3)
    assert all(end < begin for begin, end in zip(first, last, strict=True))
    assert head.about["figures"]["last loss"] == pytest.approx(last[0] + 0.8 * last[1] + 0.64 * last[2], rel=0.05)
    # What a folder holds drafts these tokens alone.
    loaded, drafted = MTP(tmp_path / "out"), MtpHead.load(tmp_path / "out").tokens
    assert torch.equal(drafted, head.tokens)
    assert len(drafted) == 40
    rule = Recording(ends=False)
    check_lossless(model, SelfSpec(loaded, stop=rule), prompts=[ragged_batch()])
    shown = torch.cat([logits.flatten(0, -2) for _, logits, _ in rule.calls])
    shown = shown[shown.any(-1)]  # rows that have ended show zeros
    others = [token for token in range(VOCABULARY) if token not in set(drafted.tolist())]
    assert (shown[:, others] < -1e4).all()
    assert (shown[:, drafted] > -1e4).all()


def test_figures_are_those_of_text_that_is_held_out(tmp_path: Path) -> None:
    model, text = sharp(), rows()
    head = fit_mtp(model, None, text, args=arguments(tmp_path, max_steps=4), block_size=32, steps=2)
    ids = torch.tensor([row["input_ids"] for row in text[-3:]])
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True)
        states, embeddings = wanted.hidden_states[-1], model.model.embed_tokens(ids)
        for step in (1, 2):
            states = head(
                embeddings[:, step:],
                states[:, :-1],
                torch.arange(step, 32).expand(3, -1),
            )
            right = (model.lm_head(states).argmax(-1) == wanted.logits[:, step:].argmax(-1)).float().mean().item()
            assert head.about["figures"][f"agreement at step {step}"] == pytest.approx(right, abs=1e-3)


def test_a_head_may_read_several_layers(tmp_path: Path) -> None:
    model, text = tiny_llama(factor=2.0), rows(19)
    args = arguments(tmp_path, max_steps=12, learning_rate=3e-3)
    head = fit_mtp(model, None, text, args=args, block_size=32, state_layers=[2, 4, 6], output_dir=tmp_path / "out")
    assert head.about["figures"]["last loss"] < head.about["figures"]["first loss"]
    ids = torch.tensor([row["input_ids"] for row in text[:2]])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states  # the last one is normed
        fused = head.fuse(torch.cat([states[layer] for layer in (2, 4, 6)], dim=-1))
        states_of_head = head(model.model.embed_tokens(ids)[:, 1:], fused[:, :-1], torch.arange(1, 32).expand(2, -1))
        assert not torch.allclose(fused, states[6], atol=1e-3)  # the others' weights begin at 0
        assert torch.isfinite(model.lm_head(states_of_head)).all()
    (stats,) = check_lossless(model, SelfSpec(MTP(tmp_path / "out")), prompts=[ragged_batch()])
    assert stats.accepted


def test_answers_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, every second one drawn; a fit that was stopped goes on, and other prompts are refused."""
    model, tokenizer = tiny_llama(), character_tokenizer()
    options: dict[str, Any] = {"block_size": 16, "answer_tokens": 24, "args": arguments(tmp_path, max_steps=1)}
    batches, generate = list[int](), type(model).generate

    def stopping(self: Any, ids: torch.Tensor, **options: Any) -> Any:
        batches.append(len(ids))
        if len(batches) == 2:
            raise KeyboardInterrupt
        return generate(self, ids, **options)

    monkeypatch.setattr(type(model), "generate", stopping)
    with pytest.raises(KeyboardInterrupt):
        fit_mtp(model, tokenizer, (), prompts=PROMPTS, output_dir=tmp_path / "out", **options)
    fit_mtp(model, tokenizer, (), prompts=PROMPTS, output_dir=tmp_path / "out", **options)
    assert batches[:3] == [16, 5, 5]
    file = tmp_path / "out-text.jsonl"
    texts = [json.loads(line)["input_ids"] for line in file.read_text().splitlines()]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        prompt_ids = tokenizer(prompt)["input_ids"]
        assert text[: len(prompt_ids)] == prompt_ids
    ids = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    alone = generate(model, ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0].tolist()
    assert texts[0] == alone[: len(texts[0])]
    assert len(texts[0]) == len(alone) or texts[0][-1] == model.generation_config.eos_token_id
    # A process that was killed while it wrote leaves a part of a batch.
    whole = file.read_text()
    file.write_text(whole[:-9])
    fit_mtp(model, tokenizer, (), prompts=PROMPTS, output_dir=tmp_path / "out", **options)
    assert batches[3:].count(5) == 1
    assert file.read_text() == whole
    with pytest.raises(SettingError, match=r"out-text\.jsonl has answers to other prompts"):
        fit_mtp(model, tokenizer, (), prompts=PROMPTS[1:], output_dir=tmp_path / "out", **options)
    with pytest.raises(SettingError, match="of another model"):
        fit_mtp(tiny_llama(seed=1), tokenizer, (), prompts=PROMPTS, output_dir=tmp_path / "out", **options)


def chains(count: int, length: int = 32) -> torch.Tensor:
    """Texts ``[count, length]`` in which three of four tokens follow from the two before, and the fourth is any."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randint(2, VOCABULARY, (VOCABULARY, 2), generator=generator)
    columns = [torch.randint(2, VOCABULARY, (count,), generator=generator) for _ in range(2)]
    while len(columns) < length:
        follows = table[columns[-1], columns[-2] % 2]
        others = torch.randint(2, VOCABULARY, (count,), generator=generator)
        columns.append(torch.where(torch.rand(count, generator=generator) < 0.75, follows, others))
    return torch.stack(columns, dim=1)


def trained_with_layer(folder: Path, text: torch.Tensor) -> Any:
    """A small model that was trained together with an MTP layer, which ships with it as with a model of DeepSeek."""
    model = tiny_llama(2)
    head = MtpHead.of(model).requires_grad_(True)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-3)
    for begin in range(0, 200 * 8, 8):
        ids = text[torch.arange(begin, begin + 8) % len(text)]
        states, embeddings = model.model(ids).last_hidden_state, model.get_input_embeddings()(ids)
        drafted = head(embeddings[:, 1:-1], states[:, :-2], torch.arange(1, ids.shape[1] - 1).expand(8, -1))
        pairs = (states[:, :-1], ids[:, 1:], 1.0), (drafted, ids[:, 2:], 0.1)
        losses = [weight * F.cross_entropy(model.lm_head(of).flatten(0, 1), to.flatten()) for of, to, weight in pairs]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    model.generation_config.eos_token_id = None
    model.eval().save_pretrained(folder)
    SelfSpec(MTP(head.eval())).export_draft(folder / "layer", model)
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "layer" / "model-mtp.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return type(model).from_pretrained(folder).eval()


@torch.no_grad()
def agreements(model: Any, head: MtpHead, ids: torch.Tensor) -> list[float]:
    """How often the first, second and third token that a head predicts in a text are the model's."""
    right, shares = model(ids).logits.argmax(-1), []
    states, embeddings, s = model.model(ids).last_hidden_state, model.get_input_embeddings()(ids), ids.shape[1]
    for step in (1, 2, 3):
        states = head(embeddings[:, step:], states[:, : s - step], torch.arange(step, s).expand(len(ids), -1))
        shares.append((model.lm_head(states).argmax(-1) == right[:, step:]).float().mean().item())
    return shares


def test_shipped_layers_are_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On what the model itself answers; they are saved under the names of its checkpoint, and come back by these."""
    monkeypatch.setitem(shipped._FORMATS, "llama", MtpFormat(state_first=True))
    text = chains(160)
    model = trained_with_layer(tmp_path / "model", text)
    before = load_mtp(model)
    answers = model.generate(text[:60, :4], max_new_tokens=28, do_sample=True, pad_token_id=0)
    learnt, held_out = ([{"input_ids": row.tolist()} for row in part] for part in (answers[:50], answers[50:]))
    weights_before = [value.clone() for value in before.state_dict().values()]
    tuned = fit_mtp(
        model, None, learnt, start="shipped", steps=3, block_size=32, head_rows=VOCABULARY,
        args=arguments(tmp_path, num_train_epochs=8, learning_rate=1e-3),
    )  # fmt: skip
    assert all(map(torch.equal, before.state_dict().values(), weights_before))
    ids = torch.tensor([row["input_ids"] for row in held_out])
    first, last = agreements(model, before, ids), agreements(model, tuned, ids)
    assert all(after > at_first + 0.02 for at_first, after in zip(first, last, strict=True)), (first, last)
    SelfSpec(MTP(tuned)).export_draft(tmp_path / "tuned", model)
    again = load_mtp(model, tmp_path / "tuned")
    assert all(map(torch.equal, again.state_dict().values(), tuned.state_dict().values()))
    (stats,) = check_lossless(model, SelfSpec(MTP()), prompts=[ragged_batch()])
    assert stats.accepted


def test_wrong_settings(tmp_path: Path) -> None:
    model = tiny_llama()
    for changed, words in (
        ({"steps": 0}, r"fit_mtp\(steps\) must be"),
        ({"head_rows": 0}, r"fit_mtp\(head_rows\) must be"),
        ({"state_layers": [7]}, r"fit_mtp\(state_layers\) must be"),
        ({"block_size": 4}, "block_size=4"),
        ({"state_layers": 3}, r"fit_mtp\(state_layers\) must be a list"),
        ({"prompts": ["a"]}, "tokenizer"),
        ({"start": "new"}, r"fit_mtp\(start\) must be one of"),
        ({"start": "shipped", "state_layers": [1, 2]}, "the second without state_layers"),
        ({"start": "shipped", "block_size": 32}, "was not loaded from a checkpoint"),
    ):
        with pytest.raises(SelfSpecError, match=words):
            fit_mtp(model, None, rows(4), **changed)
    shipped.attach(model, MtpHead.of(model, state_layers=(1, 2)))
    with pytest.raises(SettingError, match="did not ship with it"):
        fit_mtp(model, None, rows(4), start="shipped", block_size=32)
    with pytest.raises(SettingTypeError, match=r"fit_mtp\(prompts\) must be a list"):
        fit_mtp(model, character_tokenizer(), (), prompts="a")
    with pytest.raises(SettingTypeError, match="a list of texts"):
        fit_mtp(model, character_tokenizer(), "a text", prompts=PROMPTS)


def test_answers_are_text_of_any_fit(tmp_path: Path) -> None:
    """What is written as a step of its own is what a fit has written first."""
    model, tokenizer, file = tiny_llama(), character_tokenizer(), tmp_path / "answers.jsonl"
    answers = write_answers(model, tokenizer, PROMPTS, file, answer_tokens=16)
    with file.open("a") as lines:
        lines.write('{"input_ids": [1')  # of a process that was killed
    assert write_answers(model, tokenizer, PROMPTS[:5], file, answer_tokens=16) == answers[:5]
    assert [json.loads(line) for line in file.read_text().splitlines()] == answers
    options: dict[str, Any] = {"args": arguments(tmp_path, max_steps=1), "block_size": 16}
    of_file = fit_mtp(model, None, answers, **options).state_dict()
    of_prompts = fit_mtp(model, tokenizer, (), prompts=PROMPTS, answer_tokens=16, **options).state_dict()
    assert all(torch.equal(value, of_prompts[name]) for name, value in of_file.items())
    with pytest.raises(SettingError, match=r"answers\.jsonl has answers to other prompts"):
        write_answers(model, tokenizer, PROMPTS, file, answer_tokens=17)
    with pytest.raises(SettingTypeError, match=r"write_answers\(prompts\) must be a list"):
        write_answers(model, tokenizer, "a", file)


@pytest.mark.parametrize(
    "content", ["[]\n", "{}\n", "null\n", '{"input_ids": [1]}\n', '{"input_ids": ["a"], "made_by": ""}\n']
)
def test_answers_that_were_changed_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "out-text.jsonl").write_text(content)
    with pytest.raises(SettingError, match=r"out-text\.jsonl was cut short or changed"):
        fit_mtp(tiny_llama(), character_tokenizer(), (), prompts=PROMPTS, output_dir=tmp_path / "out", block_size=16)


def test_what_cannot_be_fitted_is_refused_before_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, wrapped = tiny_llama(), tiny_llama()
    get_peft_model(wrapped, LoraConfig(target_modules=["lm_head"]))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (build("mamba"), {}, "cannot stand alone"),
        (build("gpt_bigcode"), {}, "its exits can neither be trained"),
        *((build(name), {}, "layer . of .* cannot stand alone") for name in ("gemma3n_text", "gpt_neo", "olmo_hybrid")),
        (build("opt-350m"), {}, "sends states of width 16 to its head and has"),
        (build("gpt2"), {"answer_tokens": 128}, "more than the 128 positions"),
        (wrapped, {}, "no output head that is a plain linear layer"),
        (llama, {"head_rows": ReducedHead.of([1, 5000], 6000)}, "names token 5000"),
    ]
    for model, options, words in cases:
        monkeypatch.setattr(type(model), "generate", lambda *args, **options: pytest.fail("it was asked"))
        with pytest.raises(SelfSpecError, match=words):
            fit_mtp(model, character_tokenizer(), (), prompts=PROMPTS, block_size=16, **options)


def test_models_with_adapters_of_peft(tmp_path: Path) -> None:
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    head = fit_mtp(model, None, rows(19), args=arguments(tmp_path, max_steps=2), block_size=32)
    (stats,) = check_lossless(model, SelfSpec(MTP(head)), prompts=[ragged_batch()])
    assert stats.accepted


def test_answers_of_a_model_with_settings_of_its_own(tmp_path: Path) -> None:
    model = tiny_llama()
    model.generation_config.update(return_dict_in_generate=True, num_return_sequences=2, num_beams=2)
    args = arguments(tmp_path, max_steps=1)
    fit_mtp(model, character_tokenizer(), (), prompts=PROMPTS, block_size=16, answer_tokens=8, args=args)


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
