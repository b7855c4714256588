"""Examples of chats and services, on the demo model: what they answer is plain generate's."""

import gc
import importlib
import io
import json
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from helpers.processes import EXAMPLES, TESTS, library, python
from hf_selfspec import SelfSpec

QUESTIONS = ("def read_text(path):", "def write_text(path, text):", "class Stack:")
TOKENS = 10
GREEDY: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False}


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the demo model in float32, and a template for chats."""
    folder = str(tmp_path_factory.mktemp("chat"))
    AutoModelForCausalLM.from_pretrained(EXAMPLES / "demo_model", dtype=torch.float32).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "demo_model")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(chat_model: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(chat_model)


@pytest.fixture(scope="module")
def tokenizer(chat_model: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(chat_model)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    return model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_chat_runs_over_what_is_new(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """And goes back where a template differs, as those do that leave out what a model thought."""
    chat = importlib.import_module("chat").Chat(model, tokenizer, assistant=SelfSpec(), **GREEDY)
    widths, prompt = list[int](), ""

    def see(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    for question in QUESTIONS:
        known = chat.cache.get_seq_length()
        widths.clear()
        with model.model.register_forward_pre_hook(see, with_kwargs=True):
            text = chat.answer(question)
        prompt += question + "\n"
        assert chat.ids[0, -TOKENS:].tolist() == answer(model, tokenizer, prompt)
        assert widths[0] == chat.ids.shape[1] - TOKENS - known
        prompt += text + "\n"
    assert known > 0
    chat.messages[1:] = [{"role": "assistant", "content": "    pass"}]
    chat.answer(QUESTIONS[1])
    expected = answer(model, tokenizer, f"{QUESTIONS[0]}\n    pass\n{QUESTIONS[1]}\n")
    assert chat.ids[0, -TOKENS:].tolist() == expected


def test_terminal_chat(chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["chat.py", "--model", chat_model, "--max-new-tokens", "4"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*QUESTIONS, "", "not read"])))
    importlib.import_module("chat").main()
    assert capsys.readouterr().out.count("of drafted ones accepted]") == len(QUESTIONS)


@contextmanager
def running(app: Any) -> Iterator[str]:
    uvicorn = library("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def events(text: str) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line)
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_service_with_concurrent_requests(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx = library("httpx")
    library("fastapi")
    expected = {prompt: answer(model, tokenizer, prompt + "\n") for prompt in QUESTIONS[:2]}  # of its chat template
    ways = ("generate", "stream", "v1/chat/completions")
    requests = [(way, prompt, user) for way in ways for prompt in expected for user in "ab"]
    with running(importlib.import_module("service").service(model, tokenizer)) as address:

        def ids(request: tuple[str, str, str]) -> list[int]:
            way, prompt, user = request
            body: dict[str, Any] = {"prompt": prompt, "user": user, "max_new_tokens": TOKENS}
            if way not in ways[:2]:
                messages = [{"role": "user", "content": prompt}]
                body = {"messages": messages, "user": user, "max_tokens": TOKENS}
            answered = httpx.post(f"{address}/{way}", json=body, timeout=120).raise_for_status()
            if way == "generate":
                return answered.json()["ids"]
            if way != "stream":
                (choice,), usage = answered.json()["choices"], answered.json()["usage"]
                assert choice["message"]["content"] == tokenizer.decode(expected[prompt], skip_special_tokens=True)
                assert (usage["completion_tokens"], usage["served_by"]) == (len(expected[prompt]), "SelfSpec()")
                assert 1 <= usage["tokens_a_round"] <= TOKENS
                return expected[prompt]
            *parts, last = events(answered.text)
            assert "".join(part["text"] for part in parts) == tokenizer.decode(last["ids"], skip_special_tokens=True)
            assert len(parts) > 1
            return last["ids"]

        with ThreadPoolExecutor(len(requests)) as pool:
            for request, found in zip(requests, pool.map(ids, requests), strict=True):
                assert found == expected[request[1]]
        assert httpx.get(f"{address}/v1/models").json()["data"]
        text, found_ids = next(iter(expected.items()))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1 + found_ids.index(found_ids[2])}
        for ends, reason in ((model.generation_config.eos_token_id, "length"), ([found_ids[2]], "stop")):
            monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
            reply = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120).json()
            assert reply["choices"][0]["finish_reason"] == reason
    assert all("forward" not in module.__dict__ for module in model.modules())


REFUSED = (
    '{"prompt": ""}',
    *('{"prompt": "x", "max_new_tokens": 0}', '{"prompt": "x", "max_new_tokens": NaN}'),
    *(json.dumps({"prompt": "x y " * 16}), json.dumps({"prompt": "x" * 10_000})),
    json.dumps({"prompt": "x y " * 4, "max_new_tokens": 60}),  # more than the model's positions
    '{"prompt": "x", "user": "\\udc00"}',
)


def test_a_service_refuses_what_it_cannot_answer_and_bounds_what_it_keeps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx = library("httpx")
    library("fastapi")
    example, made = importlib.import_module("service"), list[weakref.ref[SelfSpec]]()

    def new_spec() -> SelfSpec:
        made.append(weakref.ref(spec := SelfSpec()))
        return spec

    monkeypatch.setattr(example, "SelfSpec", new_spec)
    monkeypatch.setattr(model.config, "max_position_embeddings", 66)
    sizes = {"prompt_tokens": 16, "new_tokens": 64, "threads": 1, "memory": 4 * example.MIB_OF_A_USER}
    with running(example.service(model, tokenizer, **sizes)) as address:
        for body in REFUSED:
            for way in ("generate", "stream"):
                reply = httpx.post(f"{address}/{way}", content=body, headers={"content-type": "application/json"})
                assert (reply.status_code, body) == (422, body)
                assert reply.json()["detail"]
        message = {"role": "user", "content": "x"}
        wrong: list[dict[str, Any]] = [{"n": 2}, {"stream": True}, {"max_tokens": 65}, {"messages": []}]
        wrong += [
            {"messages": [each]} for each in ({"role": "user"}, {"content": "x"}, message | {"content": "\ud800"})
        ]
        for more in wrong:
            body, headers = json.dumps({"messages": [message]} | more), {"content-type": "application/json"}
            reply = httpx.post(f"{address}/v1/chat/completions", content=body, headers=headers)
            assert (reply.status_code, more) == (422, more)
        for user in ("ada", "grace", "ada", "mary", "emmy", "ada"):
            asked = {"prompt": "x", "user": user, "max_new_tokens": 2}
            httpx.post(f"{address}/generate", json=asked, timeout=120).raise_for_status()
        gc.collect()
        assert [spec() is not None for spec in made].count(True) == 3


def test_the_server_of_transformers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    httpx = library("httpx")
    uvicorn, _, _ = (library(name) for name in ("uvicorn", "fastapi", "openai"))
    cli = pytest.importorskip("transformers.cli.serve", reason="this version of transformers has no `serve`")
    from transformers.cli.serving.model_manager import ModelManager

    # Restores what the example replaces.
    monkeypatch.setattr(ModelManager, "load_model_and_processor", ModelManager.load_model_and_processor)
    example = importlib.import_module("openai_server")
    with monkeypatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", lambda self: None)  # until it is interrupted
        app = cli.Serve(chat_model, device="cpu", dtype="float32").server.config.app
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": TOKENS, "temperature": 0}
    with running(app) as address:
        whole, streamed = (
            httpx.post(f"{address}/v1/chat/completions", json=body | {"stream": stream}, timeout=120)
            for stream in (False, True)
        )
    text = tokenizer.decode(answer(model, tokenizer, QUESTIONS[0] + "\n"), skip_special_tokens=True)
    assert whole.json()["choices"][0]["message"]["content"] == text
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events(streamed.text)) == text
    assert example.SPEC.stats.drafted > 0


@pytest.mark.slow
def test_datatrove_starts_the_service(
    chat_model: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Its custom server, in a process of its own, and what a document's metadata say of a request."""
    for name in ("datatrove", "aiofiles", "fastapi", "uvicorn"):
        library(name)
    python(TESTS / "helpers" / "datatrove_run.py", chat_model, tmp_path, *QUESTIONS)
    documents = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    found = {document["text"]: document["metadata"]["rollout_results"][0] for document in documents}
    for question in QUESTIONS:
        ids = answer(model, tokenizer, question + "\n")
        assert found[question]["text"] == tokenizer.decode(ids, skip_special_tokens=True)
        usage = found[question]["usage"]
        assert (usage["completion_tokens"], usage["served_by"]) == (len(ids), "SelfSpec()")
        assert usage["tokens_a_round"] >= 1
