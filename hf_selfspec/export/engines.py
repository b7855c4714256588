"""The model card of an exported draft: what it is, and how serving engines load it.

The commands are from the engines' own documentation in November 2026: vLLM's "Draft Models"
(features/speculative_decoding/draft_model), SGLang's "Standalone Speculative Decoding"
(advanced_features/speculative_decoding), TensorRT-LLM's "Speculative Decoding" (features/speculative-decoding,
Draft/Target), llama.cpp's docs/speculative.md and tools/server/README.md (b11434).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

# Tokens of a draft in the commands if the SelfSpec sets no number, as in the engines' own examples.
USUAL_TOKENS = 5
# The tag by which a card written here is recognised.
TAG = "hf_selfspec-draft"

_CARD = """---
library_name: transformers
tags:
- {tag}
- speculative-decoding
---

# A draft of {model}

{what}, written by hf_selfspec as an ordinary checkpoint of {layers} ({parameters:,} parameters).
Do not use it alone: it drafts tokens that `{model}` verifies, so the generated text is that model's own.
Use it with the weights that it was taken from, and with their tokenizer.

- draft: `{draft}`
- layers (`#` runs, `a` attention alone, `m` MLP alone, `.` is left out): `{picture}`
- taken from: `{model}`, fingerprint `{fingerprint}`
{notes}
Whether it pays depends on how often drafts are accepted, which `SelfSpec`'s statistics (`spec.stats`) show beforehand.

## transformers

```python
draft = AutoModelForCausalLM.from_pretrained({folder!r}, dtype="auto")
model.generate(**inputs, assistant_model=draft)
```

## vLLM

```bash
vllm serve {model} --speculative-config '{vllm}'
```

## SGLang

```bash
python3 -m sglang.launch_server --model {model} \\
    --speculative-algorithm STANDALONE --speculative-draft-model-path {folder} \\
    --speculative-num-steps {tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {verified}
```

## TensorRT-LLM

```python
from tensorrt_llm import LLM
from tensorrt_llm.llmapi import DraftTargetDecodingConfig

config = DraftTargetDecodingConfig(max_draft_len={tokens}, speculative_model={folder!r})
llm = LLM({model!r}, speculative_config=config, disable_overlap_scheduler=True)
```

## llama.cpp

Its converter needs the tokenizer's files in this folder. Convert the whole model in the same way.

```bash
python convert_hf_to_gguf.py {folder} --outfile draft.gguf
llama-server -m model.gguf -md draft.gguf --spec-type draft-simple --spec-draft-n-max {tokens}
```
"""


@dataclass(frozen=True)
class Card:
    """The contents of a card.

    Attributes:
        model: name or folder of the whole model.
        folder: folder of the draft.
        draft: the draft source's ``repr``.
        picture: the blocks that run, one character per layer.
        num_layers: number of layers in the checkpoint.
        parameters: number of its parameters.
        fingerprint: name of the model's fingerprint.
        tokens: number of tokens in a draft.
        notes: further remarks, one per line.
    """

    model: str
    folder: str
    draft: str
    picture: str
    num_layers: int
    parameters: int
    fingerprint: str
    tokens: int
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The card as Markdown."""
        is_exit = "#." in self.picture and "#" not in self.picture[self.picture.index("#.") + 1 :]
        vllm = {"method": "draft_model", "model": self.folder, "num_speculative_tokens": self.tokens}
        return _CARD.format(
            tag=TAG,
            what="The first layers and the output head" if is_exit else "Some of its blocks",
            layers=f"{self.num_layers} layer{'s' if self.num_layers > 1 else ''}",
            vllm=json.dumps(vllm),
            verified=self.tokens + 1,
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("notes", "num_layers")},
            notes="".join(f"- {note}\n" for note in self.notes),
        )
