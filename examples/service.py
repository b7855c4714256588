"""A streaming service: many concurrent requests on one model, with drafts from the same user's texts only.

pip install fastapi uvicorn
python examples/service.py --model examples/demo_model
curl -N localhost:8000/stream -H "content-type: application/json" -d '{"prompt": "def read(path):"}'

Clients of OpenAI's API, as datatrove's custom server (``model_kwargs={"server_script": "service.py", "model": ...}``),
get chat completions without a stream; ``usage`` has, for each request, the tokens that a round brought and what served
it. Prompts are messages of a chat where the tokenizer has a chat template. Requests that name no user count as those of
one user. A request that cannot be answered is 422, and a stream that fails later ends with an event ``error``.
"""

from __future__ import annotations

import argparse
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, TextIteratorStreamer

from hf_selfspec import GenerationStats, SelfSpec

# Of a full SelfSpec: 30 MiB for texts without repetitions (128,000 token ids, by tracemalloc), and 4 for statistics.
MIB_OF_A_USER = 34
# Longer prompts are refused before they are tokenized.
CHARACTERS_OF_A_TOKEN = 16


class Prompt(BaseModel):
    # Strings whose length is bounded hold no lone surrogates either, which tokenizers do not take.
    prompt: str = Field(min_length=1)
    user: str = Field("", max_length=200)
    max_new_tokens: int = Field(64, ge=1)


def as_chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str = Field(min_length=1, max_length=200)
    content: str = Field(min_length=0)  # as for prompts: with a bound no lone surrogates


class Chat(BaseModel):
    """A chat completion; what is not here is refused, so that nothing is ignored in silence."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    user: str = Field("", max_length=200)
    stream: Literal[False] = False


class Cancellable(TextIteratorStreamer):
    """Ends a generation whose reader has disconnected."""

    cancelled = False
    is_stateless = True  # it does not change the model

    def put(self, value) -> None:
        if self.cancelled:
            raise ConnectionAbortedError("nobody reads this answer any more")
        super().put(value)


class Answer(StreamingResponse):
    """Sends text as it is generated, until all of it was sent or the reader has disconnected."""

    def __init__(self, events: Iterator[str], streamer: Cancellable) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.streamer = streamer

    async def __call__(self, *connection) -> None:
        try:
            await super().__call__(*connection)
        finally:
            self.streamer.cancelled = True


def service(
    model, tokenizer, threads: int = 4, memory: int = 1024, prompt_tokens: int = 2048, new_tokens: int = 512
) -> FastAPI:
    """A service whose users' texts take at most ``memory`` MiB; who has not asked for longest starts anew.

    Prompts have at most ``prompt_tokens``, answers ``new_tokens``, and both together the model's positions.
    """
    app, pool, lock = FastAPI(), ThreadPoolExecutor(threads), threading.Lock()
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", prompt_tokens + new_tokens)
    # Threads may still use what was dropped.
    new_spec = lru_cache(maxsize=max(1, memory // MIB_OF_A_USER - threads))(lambda user: SelfSpec())

    def encoded(messages: list[dict[str, str]]) -> BatchEncoding:
        if tokenizer.chat_template is None:
            text = "\n".join(message["content"] for message in messages)
            return tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        as_tensors = {"return_dict": True, "return_tensors": "pt"}
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **as_tensors)

    def tokens(messages: list[dict[str, str]], wanted: int) -> BatchEncoding:
        if wanted > new_tokens:
            raise HTTPException(422, f"{wanted} new tokens are asked for, at most {new_tokens} are allowed")
        room = min(prompt_tokens, positions - wanted)
        if sum(len(message["content"]) for message in messages) <= room * CHARACTERS_OF_A_TOKEN:
            inputs = encoded(messages)
            if 0 < inputs["input_ids"].shape[1] <= room:
                return inputs.to(model.device)
        raise HTTPException(422, f"the prompt has no tokens, or more than {room}")

    def answer(user: str, inputs: BatchEncoding, **options) -> tuple[list[int], GenerationStats]:
        with lock:
            spec = new_spec(user)  # drafts reveal earlier texts, so users do not share one
        ids = model.generate(**inputs, **{"do_sample": False} | options, assistant=spec)
        return ids[0, inputs["input_ids"].shape[1] :].tolist(), spec.stats  # those of this thread

    @app.exception_handler(RequestValidationError)
    def refuse(_: Request, error: RequestValidationError) -> JSONResponse:
        """Without the values, which cannot all be sent back: lone surrogates, NaN."""
        return JSONResponse({"detail": [{"loc": each["loc"], "msg": each["msg"]} for each in error.errors()]}, 422)

    @app.post("/generate")
    def generate(request: Prompt) -> dict[str, object]:
        inputs = tokens(as_chat(request.prompt), request.max_new_tokens)
        ids, _ = pool.submit(answer, request.user, inputs, max_new_tokens=request.max_new_tokens).result()
        return {"text": tokenizer.decode(ids, skip_special_tokens=True), "ids": ids}

    @app.post("/stream")
    def stream(request: Prompt) -> StreamingResponse:
        inputs, options = tokens(as_chat(request.prompt), request.max_new_tokens), {"skip_special_tokens": True}
        streamer = Cancellable(tokenizer, skip_prompt=True, **options)

        def events() -> Iterator[str]:
            options = {"max_new_tokens": request.max_new_tokens, "streamer": streamer}
            answered = pool.submit(answer, request.user, inputs, **options)
            answered.add_done_callback(lambda _: streamer.end())  # after an error, too
            for text in filter(None, streamer):
                yield f"data: {json.dumps({'text': text})}\n\n"
            try:
                yield f"data: {json.dumps({'ids': answered.result()[0]})}\n\n"
            except Exception:
                logging.getLogger("uvicorn.error").exception("a stream has failed")
                yield f"event: error\ndata: {json.dumps({'error': 'the answer could not be completed'})}\n\n"

        return Answer(events(), streamer)

    @app.get("/v1/models")
    def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": model.config.name_or_path, "object": "model"}]}

    @app.post("/v1/chat/completions")
    def chat(request: Chat) -> dict[str, object]:
        messages, drawn = [message.model_dump() for message in request.messages], request.temperature > 0
        inputs = tokens(messages, request.max_tokens)
        options = {"temperature": request.temperature, "top_p": request.top_p, "top_k": 0} if drawn else {}
        options |= {"max_new_tokens": request.max_tokens, "do_sample": drawn}
        ids, stats = pool.submit(answer, request.user, inputs, **options).result()
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        prompt = inputs["input_ids"].shape[1]
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
        usage["tokens_a_round"] = round(stats.mean_generated_length, 3)
        usage["served_by"] = f"plain generate: {stats.left_to_generate}" if stats.left_to_generate else "SelfSpec()"
        ends = model.generation_config.eos_token_id
        has_ended = ids[-1] in (ends if isinstance(ends, list) else [ends])
        reason = "stop" if has_ended or len(ids) < request.max_tokens else "length"
        return {
            "id": f"chatcmpl-{uuid.uuid4()}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model.config.name_or_path,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": usage,
        }

    return app


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a causal LM, path or name")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--memory", type=int, default=1024, help="MiB for what is kept of all users' texts")
    args = parser.parse_args()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    uvicorn.run(service(model, tokenizer, memory=args.memory), port=args.port)
