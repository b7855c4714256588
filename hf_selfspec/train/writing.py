"""Text that a model writes itself: what its drafts have to foresee."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..errors import SettingError, brief
from ..learned.files import path_of, read_json, reported, write_json
from ..model.anatomy import Anatomy
from ..model.fingerprint import Fingerprint
from ..model.patching import evaluating
from ..selfspec import SelfSpec

# Prompts that are answered at once; every second time answers are drawn, at this temperature.
_AT_ONCE, _TEMPERATURE = 16, 0.7


def answered(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    new_tokens: int,
    file: str | os.PathLike[str] | None,
) -> list[list[int]]:
    """Returns the tokens of prompts with the model's answers. A file keeps them, so that writing can be resumed."""
    found: list[list[int]] = []
    limit, longest = Anatomy.of(model).position_limit, max(map(len, prompts))
    if limit is not None and longest + new_tokens > limit:
        raise SettingError(
            f"fit_mtp(answer_tokens={new_tokens}): with the longest prompt, of {longest} tokens, these are more than "
            f"the {limit} positions of the model. Give fewer, or shorter prompts."
        )
    known = f"{Fingerprint.of_decoder(model).name}, {new_tokens} tokens"
    if file is not None and path_of(file).exists():
        found, made_by = _read(path_of(file))
        begun = [row[: len(prompt)] for row, prompt in zip(found, prompts, strict=False)]
        if begun != prompts[: len(found)] or made_by != known:
            raise SettingError(
                f"{file} has answers to other prompts, of another model or of another length: remove it, or repeat the "
                "settings that it was made with."
            )
    spec, device = SelfSpec(), model.get_input_embeddings().weight.device
    with evaluating(model), torch.random.fork_rng(), torch.no_grad():
        for begin in range(len(found), len(prompts), _AT_ONCE):
            found += _answers(model, spec, prompts[begin : begin + _AT_ONCE], new_tokens, begin, device)
            if file is not None:
                with reported(path_of(file)):
                    write_json(path_of(file), {"made_by": known, "texts": found})
    return found


def _read(file: Path) -> tuple[list[list[int]], str]:
    try:
        content = read_json(file)
        found, made_by = content["texts"], content["made_by"]
        if not all(type(token) is int for row in found for token in row):
            raise ValueError("there is something else than tokens")
    except (KeyError, TypeError, ValueError) as error:
        raise SettingError(f"{file} was cut short or changed ({brief(error)}). Remove it.") from error
    return list(found), made_by


def _answers(
    model: PreTrainedModel, spec: SelfSpec, prompts: Sequence[list[int]], new: int, begin: int, device: torch.device
) -> list[list[int]]:
    longest, ends = max(map(len, prompts)), model.generation_config.eos_token_id
    torch.manual_seed(begin)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    is_drawn = bool(begin // _AT_ONCE % 2)
    settings = GenerationConfig(
        max_new_tokens=new,
        do_sample=is_drawn,
        temperature=_TEMPERATURE if is_drawn else None,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=False,
    )
    output = model.generate(
        ids, attention_mask=torch.tensor(mask, device=device), generation_config=settings, assistant=spec
    )
    ending = {ends} if isinstance(ends, int) else set(ends or ())
    texts = []
    for prompt, row in zip(prompts, output[:, longest:].tolist(), strict=True):
        end = next((place for place, token in enumerate(row) if token in ending), len(row))
        texts.append(prompt + row[: end + 1])
    return texts
