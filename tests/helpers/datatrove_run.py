"""Asks ``examples/service.py`` by datatrove: ``python datatrove_run.py MODEL OUTPUT PROMPT ...``."""

import sys
from collections.abc import Iterator
from typing import Any

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter

from helpers.processes import EXAMPLES

MODEL, OUTPUT, *PROMPTS = sys.argv[1:]


def documents(_data: Any, _rank: int, _ranks: int) -> Iterator[Document]:
    for prompt in PROMPTS:
        yield Document(text=prompt, id=prompt)


async def asked(document: Document, generate: Any) -> Any:
    return await generate({"messages": [{"role": "user", "content": document.text}], "max_tokens": 10})


if __name__ == "__main__":
    config = InferenceConfig(
        server_type="custom",
        model_name_or_path=MODEL,
        server_ready_delay_sec=1,
        model_kwargs={"server_script": str(EXAMPLES / "service.py"), "model": MODEL},
    )
    writer = JsonlWriter(OUTPUT, compression=None)
    steps = [documents, InferenceRunner(asked, config, writer)]
    LocalPipelineExecutor(pipeline=steps, logging_dir=f"{OUTPUT}/log", skip_completed=False).run()
