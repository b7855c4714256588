"""Comparisons of methods: their names, figures by hand, the stream, what does not fit; and ``hf-selfspec bench``."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from helpers.architectures import build
from helpers.models import tiny_llama
from helpers.processes import DEMO_MODEL
from hf_selfspec import Comparison, ConfidenceThreshold, FixedLength, SelfSpec, TopKTree, compare
from hf_selfspec.drafts import Cascade, EarlyExit, Lookup, SkipLayers
from hf_selfspec.errors import SelfSpecError, SettingError
from hf_selfspec.tools.cli import main
from hf_selfspec.tools.compare import texts_of
from hf_selfspec.tools.comparison import Call, measures, speedup
from hf_selfspec.tools.methods import LAYERS, METHODS, PLAIN, SPECS, STATIC, Method, methods_of, read_spec, split

pytestmark = pytest.mark.usefixtures("as_before")

MAMBA = build("mamba", vocab_size=4096, num_hidden_layers=1)
TEXTS = ["def read_text(path):", "class Stack:", "import os\n\ndef main():", "for line in lines:"]


def call(seconds: float, tokens: int, **more: Any) -> Call:
    return Call("a", [list(range(tokens))], seconds, **more)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(4, vocabulary=4096)


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
    ours = figures({PLAIN: 1.0, LAYERS: 0.8, "mine": 0.5}, rounds=(4, 8, 7, 1))
    layers, mine = ours["methods"][1:]
    assert (mine["drafts_alone"], mine["tokens_a_round"], mine["acceptance_rate"]) == (pytest.approx(1.6), 2.75, 0.75)
    assert layers["drafts_alone"] is None
    tie, wrong = ({"prompt": 0, "row": 0, "position": 3, "margin": 0.1, "near_tie": near} for near in (True, False))
    fast = {PLAIN: 1.0, "mine": 0.5}
    for of, best, words in (
        (ours, "mine", "mine is 2.00 times as fast as plain generate (95 %: 2.00 to 2.00)."),
        (figures({PLAIN: 1.0, LAYERS: 0.5}), PLAIN, ""),  # which is no way to call generate
        (figures({PLAIN: 1.0, "mine": 2.0}), PLAIN, "Nothing that writes the model's own text is faster"),
        (figures(fast, count=3), "mine", "2 prompts are too few for an interval"),
        (figures(fast, differing=[tie]), "mine", ""),
        (figures(fast, differing=[tie, wrong]), PLAIN, "mine does not count"),
    ):
        assert Comparison(of).best == best
        assert words in str(Comparison(of))


def test_a_stream(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a home folder, with a model whose modules are in different modes, which it keeps."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tiny_llama(4, vocabulary=4096).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    ours = {"exit": SelfSpec(EarlyExit(3), FixedLength(3)), "free": SelfSpec.lookup()}
    found = compare(model, tokenizer, TEXTS, ours, max_new_tokens=8, out="~/out")
    assert [module.training for module in model.modules()] == modes
    assert found.results["prompts"] == 3, "the first call is left out"
    for method in found.results["methods"]:
        assert (method["equal_ids"], method["texts"], method["differences"]) == (4, 4, [])
        assert method["tokens_per_second"] > 0
    assert found.results["methods"][1]["acceptance_rate"] is not None
    folder = tmp_path / "out"
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(found.results))
    assert str(found) in (folder / "report.md").read_text()
    machine = f"torch uses {torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} thread(s) of "
    assert machine in found.results["about"]["machine"]
    assert (folder / "speed.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="'doc' is not supported"):
        found.plot(folder / "speed.doc")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingError, match=r"Comparison\.plot draws with matplotlib.*pip install matplotlib"):
        found.plot()


@pytest.mark.machine("small_linears_have_ways")
def test_the_order_rotates(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any) -> None:
    """A ``SelfSpec`` lasts over the stream: it drafts nearly all of the answer that it has given before. The linear
    layers of one run in calls of ``plain-linears``, too."""
    used, generate, seen = list[tuple[bool, bool]](), LlamaForCausalLM.generate, set[bool]()

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        seen.clear()
        ids = generate(self, *args, **options)
        used.append(("assistant" in options, True in seen))
        return ids

    monkeypatch.setattr(LlamaForCausalLM, "generate", recorded)
    ours = {LAYERS: LAYERS, "free": SelfSpec.lookup()}
    with model.lm_head.register_forward_pre_hook(lambda *_: seen.add("forward" in vars(model.lm_head))):
        _, layers, free = compare(model, tokenizer, [TEXTS[0]] * 3, ours, max_new_tokens=16).results["methods"]
    of_plain, of_layers, of_free = (False, False), (False, True), (True, True)
    assert used[-9:-6] == [of_plain, of_layers, of_free]
    assert used[-6:] == [of_layers, of_free, of_plain, of_free, of_plain, of_layers]
    assert (free["tokens_a_round"] > 2, layers["equal_ids"]) == (True, 3)


def test_a_text_that_is_not_plains_does_not_count(model: Any, tokenizer: Any, monkeypatch: Any, tmp_path: Path) -> None:
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
    assert compare(model, tokenizer, TEXTS[:2], {"wrong": SelfSpec.lookup()}, **options).best == PLAIN
    wrong = json.loads((tmp_path / "results.json").read_text())["methods"][1]
    places = [(one["row"], one["position"], one["near_tie"]) for one in wrong["differences"]]
    assert (wrong["equal_ids"], places) == (0, [(0, 2, False), (1, 4, False)])


@pytest.mark.slow
@pytest.mark.usefixtures("no_warnings_yet")
def test_methods_that_do_not_fit_are_left_out_with_reasons(model: Any, tokenizer: Any, monkeypatch: Any) -> None:
    found = compare(model, tokenizer, TEXTS[:2], max_new_tokens=33)
    names = [method["name"] for method in found.results["methods"]]
    assert {"plain", "prompt-lookup(3)", "SelfSpec()", "SelfSpec.layerskip()", "SelfSpec.swift()"} <= set(names)
    assert "only when told to" in found.results["left_out"][STATIC]
    assert "Not measured: SelfSpec.mtp(), since it attaches" in str(found)
    left_out = compare(MAMBA, tokenizer, TEXTS[:2], max_new_tokens=33).results["left_out"]
    assert "not supported with stateful models" in left_out["prompt-lookup(2)"]
    assert "SelfSpec.layerskip()" in left_out
    monkeypatch.setattr(METHODS[STATIC].options["compile_config"], "backend", "eager")  # dynamo alone
    assert compare(model, tokenizer, TEXTS[:2], [STATIC], max_new_tokens=8).results["methods"][1]["equal_ids"] == 2


def test_names_and_expressions() -> None:
    for text, spec in {
        **{name: SelfSpec() if name == "selfspec" else getattr(SelfSpec, name)() for name in SPECS},
        "SelfSpec()": SelfSpec(),
        " SelfSpec.layerskip(8, num_draft=3) ": SelfSpec.layerskip(8, num_draft=3),
        "SelfSpec(EarlyExit(2), ConfidenceThreshold(0.5))": SelfSpec(EarlyExit(2), ConfidenceThreshold(0.5)),
        "SelfSpec(draft=SkipLayers(attention=[1, 2], mlp=(3,)), tree=TopKTree(((0.5, 2), (1.0, 1))), max_draft=7)": (
            SelfSpec(SkipLayers((1, 2), (3,)), None, TopKTree(((0.5, 2), (1.0, 1))), 7)
        ),
        "SelfSpec(Cascade([Lookup(0)]), graphs=False)": SelfSpec(Cascade([Lookup(0)]), graphs=False),
    }.items():
        assert read_spec(text) == spec


def test_what_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text, words in {
        "lokup": "--spec lokup: there is no such folder or preset. Give one of adaspeed, layerskip, lookup, mtp",
        "": "there is no such folder or preset",
        "(" * 100_000: "there is no such folder or preset",
        "SelfSpec.layerskip(0)": "must be at least 1, got 0",
        "SelfSpec.layerskip(depth=3)": "`SelfSpec.layerskip` does not take that",
        "SelfSpec(print)": "`print` is not allowed in it",
        "SelfSpec(1 + 1)": "`1 + 1` is not allowed in it",
        "open('a', 'w')": "`open` cannot be called in it",
        "SelfSpec().save_pretrained('a')": "cannot be called in it",
        "SelfSpec.__init_subclass__()": "cannot be called in it",
        "Lookup()": "this is not a SelfSpec but Lookup",
        "SelfSpec.kangaroo('nowhere/at-all')": "there is no saved part",
    }.items():
        with pytest.raises(SettingError) as raised:
            read_spec(text)
        assert words in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    for content in (None, "{", "[1]", '{"architectures": ["Llama"]}'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(SettingError, match=r"has no config\.json|holds no p"):
            read_spec(str(tmp_path))


def test_names_of_methods() -> None:
    """Short ones, and texts as for ``--spec``; commas separate them outside of brackets."""
    texts = split(["selfspec, prompt-lookup(2, 5),SelfSpec.layerskip(3, num_draft=2),", "lookup"])
    names = ["plain", "SelfSpec()", "prompt-lookup(2, 5)", "SelfSpec.layerskip(3, num_draft=2)"]
    assert [method.name for method in methods_of(texts)] == [*names, "SelfSpec.lookup()"]
    names = ["plain", "prompt-lookup(2)", "prompt-lookup(3)", "prompt-lookup(2, 5)"]
    assert [method.name for method in methods_of(["prompt-lookup"])] == names
    assert split(["SelfSpec.kangaroo('a,b'),a"]) == ["SelfSpec.kangaroo('a,b')", "a"]


NO_FIT = "^methods: .*{} does not fit this model: .*Leave it out"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (["magic"], {}, "there is no such folder or preset.* Other methods are plain, static-compiled, prompt-lookup"),
    ([SelfSpec.lookup(), SelfSpec.lookup()], {}, "is given twice"),
    ([3], {}, "methods must be names or SelfSpec objects, got 3"),
    ({"deep": SelfSpec.layerskip(99)}, {}, NO_FIT.format("deep")),
    (["mtp"], {}, NO_FIT.format(r"mtp\(\)")),
    # Which transformers refuses.
    (["prompt-lookup(2)"], {"model": MAMBA, "max_new_tokens": 8}, NO_FIT.format(r"lookup\(2\)")),
    ([], {"max_new_tokens": 1}, r"max_new_tokens\) must be at least 2, got 1"),
    ([], {"temperature": -1}, r"temperature\) must be a number of at least 0"),
    ([], {"batch_size": 5}, "4 of 4 prompts fit the model, for batches of 5"),
    ([], {"max_new_tokens": 512}, "0 of 4 prompts fit the model"),
    ([], {"texts": "one text"}, r"compare\(texts\) must be a list of strings or chats"),
    ([], {"texts": {}}, "has no kinds of prompts"),
    ([], {"texts": [[{"role": "user", "content": "import os"}]]}, "the tokenizer has no chat template, so the"),
]


def test_what_cannot_be_compared(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    for methods, settings, message in REFUSED:
        given = {"model": model, "texts": TEXTS} | settings
        with pytest.raises(SelfSpecError, match=message):
            compare(given.pop("model"), tokenizer, methods=methods, out=tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


KINDS = ("code", "poems", "rag")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three prompts of each kind, and two without one, of which one is a chat."""
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"kind": kind, "prompt": f"def {kind}_{at}(a, b):"} for at in range(3) for kind in KINDS
    ]
    rows += [{"prompt": "def read(path):"}, {"messages": [{"role": "user", "content": "import os"}]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_kinds_of_prompts(data: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """As many are drawn of each of those that are not too long, and each kind has its figure."""
    texts = texts_of([str(data)])
    assert texts["text"] == ["def read(path):", [{"role": "user", "content": "import os"}]]
    kinds = {"short": ["def f", "import os", "class A:"], "long": [20 * "x = 1\n", "return x"]}
    limits: dict[str, Any] = {"max_new_tokens": 4, "max_prompt_tokens": 16}
    compared = compare(model, tokenizer, kinds, ["prompt-lookup(2)"], **limits)
    about = compared.results["about"]
    assert (about["prompts"], about["prompts_left_out"]) == ({"short": 3, "long": 1}, 1)
    one_each = compare(model, tokenizer, kinds, ["prompt-lookup(2)"], **limits, prompts_a_kind=1).results["about"]
    assert one_each["prompts"] == {"short": 1, "long": 1}
    assert set(compared.results["methods"][1]["by_kind"]) == {"short", "long"}
    assert "short" in str(compared).splitlines()[0]
    data.write_text('{"question": "a", "answer": "b"}')
    assert texts_of([str(data)], "answer") == {"text": ["b"]}
    data.write_text('{"solution": 1}')
    for column, words in (("solution", "'solution'"), (None, "'messages'")):
        with pytest.raises(SettingError, match=f"line 1: there is no text in the column {words}"):
            texts_of([str(data)], column)


def test_bench(data: Path, model: Any, tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
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
    capsys.readouterr()
    assert main([*given, "--max-prompt-tokens", "1", "--out", str(tmp_path / "out")]) == 2
    assert "hf-selfspec: 0 of 3 prompts fit the model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
