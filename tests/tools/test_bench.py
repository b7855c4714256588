"""Comparisons of methods: figures by hand, the stream, the report, what does not fit; and ``hf-selfspec bench``."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerBase

from helpers.models import tiny_llama
from helpers.processes import DEMO_MODEL
from hf_selfspec import Comparison, EarlyExit, FixedLength, SelfSpec, SelfSpecError, SettingError, compare
from hf_selfspec.tools.cli import main
from hf_selfspec.tools.compare import drawn, texts_of
from hf_selfspec.tools.comparison import Call, measures, speedup
from hf_selfspec.tools.methods import LAYERS, METHODS, PLAIN, STATIC, Method, methods_of

pytestmark = pytest.mark.usefixtures("as_before")

TEXTS = ["def read_text(path):", "class Stack:", "import os\n\ndef main():", "for line in lines:"]
OURS = {"exit": SelfSpec(EarlyExit(3), FixedLength(3)), "free": SelfSpec.lookup()}


def call(seconds: float, tokens: int, kind: str = "a", **more: Any) -> Call:
    return Call(kind, [list(range(tokens))], seconds, **more)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(4, vocabulary=4096)


@pytest.fixture(scope="module")
def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=4096, hidden_size=32, num_hidden_layers=1, bos_token_id=1, eos_token_id=None)
    return MambaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def test_speedups_are_spec_benchs() -> None:
    """The mean of the prompts' tokens per second over plain's; of independent values the standard error is known."""
    plain = [call(1.0, 10), call(4.0, 20), call(2.0, 10)] * 4
    mine = [call(0.5, 10), call(4.0, 20), call(1.0, 10)] * 4
    found = speedup(plain, mine)
    assert found["value"] == pytest.approx((20 + 5 + 10) / (10 + 5 + 5))
    assert 1 <= found["low"] < found["value"] < found["high"] <= 2
    speeds = 10 + torch.randn(400, generator=torch.Generator().manual_seed(0))
    mine = [call(1 / float(speed), 1) for speed in speeds]
    whole, ten, nine = (speedup([call(0.1, 1)] * count, mine[:count]) for count in (400, 10, 9))
    expected = 2 * 1.96 * float(speeds.std()) / 10 / math.sqrt(400)
    assert whole["high"] - whole["low"] == pytest.approx(expected, rel=0.1)
    assert (ten["low"] is None, nine["low"] is None) == (False, True)


def figures(seconds: dict[str, float], count: int = 21, differing: Any = (), **more: Any) -> dict[str, Any]:
    """Of methods whose calls all take so many seconds, by name."""
    methods = [METHODS.get(name, Method(name, make=SelfSpec)) for name in seconds]
    calls = {name: [call(each, 10, **more if name == "mine" else {})] * count for name, each in seconds.items()}
    found = measures(methods, calls, {name: list[Any]() for name in seconds} | {"mine": list(differing)})
    return {"about": {}, "left_out": {}, **found}


def test_what_is_concluded() -> None:
    tie, wrong = ({"prompt": 0, "row": 0, "position": 3, "margin": 0.1, "near_tie": near} for near in (True, False))
    ours = figures({PLAIN: 1.0, LAYERS: 0.8, "mine": 0.5}, rounds=(4, 8, 7, 1))
    assert ours["best"] == "mine"
    layers, mine = ours["methods"][1:]
    assert (mine["drafts_alone"], mine["tokens_a_round"], mine["acceptance_rate"]) == (pytest.approx(1.6), 2.75, 0.75)
    assert layers["drafts_alone"] is None
    assert "mine is 2.00 times as fast as plain generate (95 %: 2.00 to 2.00)." in str(Comparison(ours))
    assert figures({PLAIN: 1.0, LAYERS: 0.5})["best"] == PLAIN, "it is no way to call generate"
    assert "Nothing that writes the model's own text is faster" in str(Comparison(figures({PLAIN: 1.0, "mine": 2.0})))
    few = figures({PLAIN: 1.0, "mine": 0.5}, count=3)
    assert "2 prompts are too few for an interval" in str(Comparison(few))
    assert figures({PLAIN: 1.0, "mine": 0.5}, differing=[tie])["best"] == "mine"
    lossy = figures({PLAIN: 1.0, "mine": 0.5}, differing=[tie, wrong])
    assert lossy["best"] == PLAIN
    assert "mine does not count" in str(Comparison(lossy))


def test_a_stream(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a home folder, with a model whose modules are in different modes, which it keeps."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tiny_llama(4, vocabulary=4096).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    found = compare(model, tokenizer, TEXTS, OURS, max_new_tokens=8, out="~/out")
    assert [module.training for module in model.modules()] == modes
    assert found.results["prompts"] == 3, "the first call is left out"
    for method in found.results["methods"]:
        assert (method["equal_ids"], method["texts"], method["differences"]) == (4, 4, [])
        assert method["tokens_per_second"] > 0
    assert found.results["methods"][1]["acceptance_rate"] is not None
    folder = tmp_path / "out"
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(found.results))
    assert str(found) in (folder / "report.md").read_text()
    assert (folder / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_the_order_rotates(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any) -> None:
    """A ``SelfSpec`` lasts over the stream: it drafts nearly all of the answer that it has given before. The linear
    layers of one run in calls of ``plain-linears``, too."""
    used, generate = list[tuple[bool, bool]](), LlamaForCausalLM.generate
    seen = set[bool]()
    hook = model.lm_head.register_forward_pre_hook(lambda *_: seen.add("forward" in vars(model.lm_head)))

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        seen.clear()
        ids = generate(self, *args, **options)
        used.append(("assistant" in options, True in seen))
        return ids

    monkeypatch.setattr(LlamaForCausalLM, "generate", recorded)
    ours = {LAYERS: LAYERS, "free": SelfSpec.lookup()}
    found = compare(model, tokenizer, [TEXTS[0]] * 3, ours, max_new_tokens=16)
    hook.remove()
    plain, layers, free = (False, False), (False, True), (True, True)
    assert used[-9:] == [plain, layers, free, layers, free, plain, free, plain, layers]
    assert found.results["methods"][2]["tokens_a_round"] > 2
    assert found.results["methods"][1]["equal_ids"] == 3


def test_a_text_that_is_not_plains_does_not_count(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any, tmp_path: Path
) -> None:
    """Of a row in a batch another token, of the other one a text that ends too early."""
    generate = LlamaForCausalLM.generate

    def changed(self: Any, input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        ids = generate(self, input_ids, *args, **options)
        if isinstance(options.get("assistant"), SelfSpec) and options["max_new_tokens"] == 8:
            ids[0, input_ids.shape[1] + 2] += 1
            ids[1, input_ids.shape[1] + 4 :] = model.generation_config.eos_token_id
        return ids

    monkeypatch.setattr(model.generation_config, "eos_token_id", 4095)
    monkeypatch.setattr(LlamaForCausalLM, "generate", changed)
    options: Any = {"max_new_tokens": 8, "batch_size": 2, "out": tmp_path}
    found = compare(model, tokenizer, TEXTS[:2], {"wrong": SelfSpec.lookup()}, **options)
    assert found.best == PLAIN
    wrong = json.loads((tmp_path / "results.json").read_text())["methods"][1]
    assert wrong["equal_ids"] == 0
    assert [(one["row"], one["position"], one["near_tie"]) for one in wrong["differences"]] == [
        (0, 2, False),
        (1, 4, False),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("no_warnings_yet")
def test_methods_that_do_not_fit_are_left_out_with_reasons(
    model: LlamaForCausalLM, mamba: MambaForCausalLM, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    found = compare(model, tokenizer, TEXTS[:2], max_new_tokens=33)
    names = [method["name"] for method in found.results["methods"]]
    assert {"plain", "prompt-lookup(3)", "SelfSpec()", "SelfSpec.layerskip()", "SelfSpec.swift()"} <= set(names)
    assert "only when told to" in found.results["left_out"][STATIC]
    assert "Not measured: SelfSpec.mtp(), since it attaches" in str(found)
    left_out = compare(mamba, tokenizer, TEXTS[:2], max_new_tokens=33).results["left_out"]
    assert "not supported with stateful models" in left_out["prompt-lookup(2)"]
    assert "SelfSpec.layerskip()" in left_out
    monkeypatch.setattr(METHODS[STATIC].options["compile_config"], "backend", "eager")  # dynamo alone
    assert compare(model, tokenizer, TEXTS[:2], [STATIC], max_new_tokens=8).results["methods"][1]["equal_ids"] == 2


@pytest.mark.parametrize("name", ["deep", "mtp", "prompt-lookup(2)"])
def test_named_methods_that_do_not_fit_are_refused_before_anything_is_measured(
    model: LlamaForCausalLM, mamba: MambaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str
) -> None:
    """Whether transformers refuses them or we do."""
    methods: Any = {"deep": SelfSpec.layerskip(99)} if name == "deep" else [name]
    with pytest.raises(SettingError, match=r"^methods: .* does not fit this model: .*Leave it out") as raised:
        compare(mamba if "lookup" in name else model, tokenizer, TEXTS, methods, out=tmp_path)
    assert name in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_names_of_methods() -> None:
    """Short ones, and texts as for ``--spec``."""
    found = ["selfspec", "prompt-lookup(4, 6)", "SelfSpec.layerskip(3, num_draft=2)", "prompt-lookup"]
    names = ["SelfSpec()", "prompt-lookup(4, 6)", "SelfSpec.layerskip(3, num_draft=2)"]
    names += ["prompt-lookup(2)", "prompt-lookup(3)", "prompt-lookup(2, 5)"]
    assert [method.name for method in methods_of(found)] == ["plain", *names]


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        (["magic"], {}, "there is no such folder or preset.* Other methods are plain, static-compiled, prompt-lookup"),
        ([SelfSpec.lookup(), SelfSpec.lookup()], {}, "is given twice"),
        ([3], {}, "methods must be names or SelfSpec objects, got 3"),
        ([], {"max_new_tokens": 1}, r"max_new_tokens\) must be at least 2, got 1"),
        ([], {"temperature": -1}, r"temperature\) must be a number of at least 0"),
        ([], {"batch_size": 5}, "4 of 4 prompts fit the model, for batches of 5"),
        ([], {"max_new_tokens": 512}, "0 of 4 prompts fit the model"),
        ([], {"texts": "one text"}, r"compare\(texts\) must be a list of strings or chats"),
        ([], {"texts": {}}, "has no kinds of prompts"),
        ([], {"texts": [[{"role": "user", "content": "import os"}]]}, "the tokenizer has no chat template, so the"),
    ],
)
def test_what_cannot_be_compared(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, methods: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SelfSpecError, match=message):
        compare(model, tokenizer, methods=methods, **{"texts": TEXTS} | settings)


def test_prompts_of_several_kinds(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    kinds = {"short": ["def f", "import os", "class A:"], "long": [20 * "x = 1\n", "return x"]}
    options: Any = {"max_new_tokens": 4, "max_prompt_tokens": 16}
    found = compare(model, tokenizer, kinds, ["prompt-lookup(2)"], **options)
    assert found.results["about"]["prompts"] == {"short": 3, "long": 1}
    assert found.results["about"]["prompts_left_out"] == 1
    assert set(found.results["methods"][1]["by_kind"]) == {"short", "long"}
    assert "short" in str(found).splitlines()[0]


KINDS = ("code", "poems", "rag")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three prompts of each kind, and two without one, of which one is a chat."""
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"kind": kind, "prompt": f"def {kind}_{number}(path, other):"} for number in range(3) for kind in KINDS
    ]
    rows += [{"prompt": "def read(path):"}, {"messages": [{"role": "user", "content": "import os"}]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_as_many_of_each_kind(data: Path) -> None:
    texts = texts_of([str(data)])
    assert texts["text"] == ["def read(path):", [{"role": "user", "content": "import os"}]]
    found = drawn(texts, 2, 0)
    assert {kind: len(each) for kind, each in found.items()} == dict.fromkeys([*KINDS, "text"], 2)
    assert found == drawn(texts, 2, 0)
    data.write_text('{"question": "a", "answer": "b"}')
    assert texts_of([str(data)], "answer") == {"text": ["b"]}
    data.write_text('{"solution": 1}')
    for column, words in (("solution", "'solution'"), (None, "'messages'")):
        with pytest.raises(SettingError, match=f"line 1: there is no text in the column {words}"):
            texts_of([str(data)], column)


def test_bench(
    data: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Chats of several files as one stream; drawn batches of texts; and what is wrong."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}\n")
    (tmp_path / "own.txt").write_text("class Stack:\n\nclass Queue:\n")
    given = ["bench", "--model", str(tmp_path / "model"), "--data", str(data), "--threads", "1", "--device", "cpu"]
    words = ["--data", str(tmp_path / "own.txt"), "--prompts", "1", "--max-new-tokens", "6"]
    words += ["--methods", "selfspec, prompt-lookup(2)", "--methods", "SelfSpec.layerskip(3, stop=FixedLength(2))"]
    assert main([*given, *words, "--out", str(tmp_path / "chats")]) == 0
    assert "SelfSpec.layerskip(3, stop=FixedLength(2))" in capsys.readouterr().out
    results = json.loads((tmp_path / "chats" / "results.json").read_text())
    assert results["about"]["prompts"] == dict.fromkeys([*KINDS, "text"], 1)
    assert all(method["equal_ids"] == 4 for method in results["methods"])

    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS[:3]))
    words = ["--raw", "--batch-size", "2", "--max-new-tokens", "8"]
    words += ["--methods", "selfspec,prompt-lookup", "--temperature", "0.7", "--out", str(tmp_path / "drawn")]
    assert main([*given, *words]) == 0
    methods = json.loads((tmp_path / "drawn" / "results.json").read_text())["methods"]
    names = [(method["name"], method["texts"], method["equal_ids"]) for method in methods]
    assert names == [("plain", 2, None), ("SelfSpec()", 2, None)], "prompt lookup takes one prompt"

    for words, message in (
        (["--max-prompt-tokens", "1"], "prompts fit the model"),
        (["--chat", "--model", str(DEMO_MODEL)], "the tokenizer has no chat template, so the model cannot"),
    ):
        assert main([*given, *words, "--out", str(tmp_path / "out")]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("hf-selfspec: ")
        assert message in line
        assert not (tmp_path / "out").exists()
