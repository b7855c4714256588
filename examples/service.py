"""A streaming service: many concurrent requests on one model, with drafts from the same user's texts only.

pip install fastapi uvicorn
python examples/service.py --model examples/demo_model
curl -N localhost:8000/stream -H "content-type: application/json" -d '{"prompt": "def read(path):"}'
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from hf_selfspec import SelfSpec


class Prompt(BaseModel):
    prompt: str
    user: str = ""
    max_new_tokens: int = 64


class Cancellable(TextIteratorStreamer):
    """Ends a generation whose reader has disconnected."""

    cancelled = False

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


def service(model, tokenizer, threads: int = 4, users: int = 1000) -> FastAPI:
    app, pool, lock = FastAPI(), ThreadPoolExecutor(threads), threading.Lock()
    new_spec = lru_cache(maxsize=users)(lambda user: SelfSpec())

    def answer(request: Prompt, streamer: TextIteratorStreamer | None = None) -> list[int]:
        with lock:
            spec = new_spec(request.user)  # drafts reveal earlier texts, so users do not share one
        inputs = tokenizer(request.prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        options = {"max_new_tokens": request.max_new_tokens, "do_sample": False, "streamer": streamer}
        return model.generate(**inputs, **options, assistant=spec)[0, inputs["input_ids"].shape[1] :].tolist()

    @app.post("/generate")
    def generate(request: Prompt) -> dict[str, object]:
        ids = pool.submit(answer, request).result()
        return {"text": tokenizer.decode(ids, skip_special_tokens=True), "ids": ids}

    @app.post("/stream")
    def stream(request: Prompt) -> StreamingResponse:
        streamer = Cancellable(tokenizer, skip_prompt=True, skip_special_tokens=True)

        def events() -> Iterator[str]:
            answered = pool.submit(answer, request, streamer)
            answered.add_done_callback(lambda _: streamer.end())  # after an error, too
            for text in filter(None, streamer):
                yield f"data: {json.dumps({'text': text})}\n\n"
            yield f"data: {json.dumps({'ids': answered.result()})}\n\n"

        return Answer(events(), streamer)

    return app


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a causal LM, path or name")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    uvicorn.run(service(model, tokenizer), port=args.port)
