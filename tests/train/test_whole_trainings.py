"""Whole trainings: evaluation, checkpoints, precision, adapters; and afterwards everything is as before."""

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainerCallback

from helpers.distributed import CHECKPOINTING, LAYERS, exits, rows, tiny, trainer, weights
from helpers.processes import peft_calls_old_name
from helpers.train.by_hand import (
    ALL,
    ByHand,
    assert_close,
    assert_equal,
    attributes_of,
    both,
    exit_loss,
    history,
    left_as_it_was,
    rotational_shares,
    stacked,
    targets,
    train,
)
from hf_selfspec import EarlyExitLoss, Gradual, LayerDropout
from hf_selfspec.train import exponential, loss_scale, training


def assert_same_training(run: Any, expected: Any, rel: float | None = None) -> None:
    """Of weights and logged losses, to the last bit or so closely."""
    (assert_close if rel else assert_equal)(weights(run.model), weights(expected.model))
    for key in ("loss", "loss/exit_2", "loss/exit_3", "loss/exit_4"):
        assert history(run, key) == (pytest.approx(history(expected, key), rel=rel) if rel else history(expected, key))


def test_evaluation(tmp_path: Path) -> None:
    """Its loss is the plain model's, and the training goes on as if there had been none."""
    snapshots: list[dict[str, torch.Tensor]] = []
    watch, evaluated = TrainerCallback(), rows(6, seed=9)
    watch.on_evaluate = lambda *args, model, **kwargs: snapshots.append(weights(model))
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 6}
    run = train(tmp_path, [*both(), watch], settings={"eval_dataset": evaluated}, **options)
    assert_same_training(run, train(tmp_path, both()))
    batch, losses = stacked(evaluated), history(run, "eval_loss")
    assert len(losses) == len(snapshots) == 4
    for loss, snapshot in zip(losses, snapshots, strict=True):
        model = tiny().eval()
        model.load_state_dict(snapshot)
        with torch.no_grad():
            assert loss == pytest.approx(exit_loss(model, batch, LAYERS).item() / targets(batch), rel=1e-5)
    assert not any("exit" in key for entry in run.state.log_history if "eval_loss" in entry for key in entry)


def test_resume(tmp_path: Path) -> None:
    """From a checkpoint in the middle, with shuffled data and Adam: the same weights and the same logs."""
    options = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options |= {"optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "linear"}
    options |= {"train_sampling_strategy": "random", "save_strategy": "steps", "save_steps": 2}

    def callbacks() -> list[TrainerCallback]:
        return [EarlyExitLoss(1.0, Gradual(), scale=loss_scale), LayerDropout(0.6, exponential)]

    whole = train(tmp_path / "whole", callbacks(), **options)
    resumed = trainer(tiny(seed=5), callbacks(), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_training(resumed, whole)
    assert history(whole, "loss/exit_2")


def test_saved_models_are_ordinary(tmp_path: Path) -> None:
    """A checkpoint of a training and what is saved after it: the keys of before, loadable without this package."""
    model = tiny(tied=True)
    keys = list(model.state_dict())
    train(tmp_path / "run", both(), model, save_strategy="steps", save_steps=3).save_model(tmp_path / "end")
    model.save_pretrained(tmp_path / "model")
    assert list(model.state_dict()) == keys
    model.eval()
    ids = stacked(rows(2))["input_ids"]
    for folder in (tmp_path / "model", tmp_path / "end", tmp_path / "run" / "checkpoint-3"):
        loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values())
        assert type(loaded) is LlamaForCausalLM
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert "loss" not in (folder / "config.json").read_text()


def test_bf16(tmp_path: Path) -> None:
    """Close to float32, with master weights in float32 and without ones; all exits go through the head in bfloat16."""
    plain = history(train(tmp_path, [exits(1)]))
    for model, options in ((tiny(), {"bf16": True}), (tiny().to(torch.bfloat16), {})):
        kept, seen = model.dtype, list[tuple[bool, torch.dtype]]()
        model.lm_head.register_forward_hook(
            lambda module, args, output, seen=seen: seen.append((torch.is_autocast_enabled("cpu"), output.dtype))
        )
        losses = history(train(tmp_path, [exits(1)], model, **options))
        assert seen == [(bool(options), torch.bfloat16)] * 3 * len(ALL)  # in each of three steps
        assert plain != losses == pytest.approx(plain, rel=0.02)
        assert {value.dtype for value in model.parameters()} == {kept}


def with_lora(head: bool = False) -> PeftModel:
    """A tiny Llama with random adapters, or with adapters and a head that is trained in full."""
    torch.manual_seed(1)
    settings = {"r": 2, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    places = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"] if head else None}
    return get_peft_model(tiny(), LoraConfig(**settings, **places))


@peft_calls_old_name
@pytest.mark.parametrize("head", [False, True], ids=["adapters", "adapters and head"])
def test_lora(tmp_path: Path, head: bool) -> None:
    """Adapters (and a head that is trained) move as by hand; all other weights stay as they are, to the last bit."""
    before, expected = weights(with_lora(head)), ByHand(with_lora(head), rotational_shares, p_max=0.6)
    run = train(tmp_path, both(), with_lora(head))
    after = weights(run.model)
    assert history(run) == pytest.approx(expected.losses, rel=1e-5)
    assert_close(after, expected.weights)
    # The adapters of the last layer's projections may get no gradient from a step, but each gets some in three.
    trained = {name for name in after if "lora_" in name or (head and "lm_head.modules_to_save" in name)}
    assert {name for name in after if not torch.equal(after[name], before[name])} == trained
    assert len(trained) == LAYERS * 4 + head


@peft_calls_old_name
# Where a graph breaks, dynamo looks at the gradients of tensors that were computed before.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        *(
            (make, {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}})
            for make in (tiny, lambda: with_lora(head=True))
            for reentrant in (False, True)
        ),
        # Traced and run without code generation: the hooks stay outside of the graphs.
        pytest.param(
            tiny, {"torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.slow, id="compiled"
        ),
    ],
)
def test_other_ways_to_run_the_same_training(tmp_path: Path, make: Callable[[], Any], options: dict[str, Any]) -> None:
    plain = train(tmp_path, both(), make())
    with patch.dict(os.environ):  # in which TrainingArguments leave that other trainings are compiled, too
        assert_same_training(train(tmp_path, both(), make(), **options), plain, 1e-5)


def test_a_loop_trains_as_the_trainer_does(tmp_path: Path) -> None:
    """Also with a step of two batches, of which the ``Trainer`` divides the losses by the targets of both."""
    model, data = tiny(), rows(16)
    optimizer, logs, before = torch.optim.SGD(model.parameters(), lr=0.05), [], attributes_of(model.train())
    with training(model, both(), steps=3) as loop:
        for step in range(3):
            with loop.step():
                batches = [stacked(data[step * 4 + begin : step * 4 + begin + 2]) for begin in (0, 2)]
                for batch in batches:
                    model(**batch, num_items_in_batch=sum(map(targets, batches))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logs.append(loop.logs())
    assert attributes_of(model) == before
    expected = train(tmp_path, both())
    assert_close(weights(model), weights(expected.model))
    for of_step, logged in zip(logs, expected.state.log_history, strict=False):  # at the end come times
        assert of_step == pytest.approx({name: value for name, value in logged.items() if "exit" in name}, rel=1e-4)


def test_after_a_training(tmp_path: Path) -> None:
    """Also where methods of the Trainer and forwards were replaced on instances before, as accelerate does it: these
    run underneath. A second training is as the first."""
    callbacks, calls, names = both(), set[str](), ("model", "model.layers.1", "lm_head")
    run = trainer(tiny(), callbacks, tmp_path)
    for name in names:
        module = run.model.get_submodule(name)
        module.forward = lambda *args, usual=module.forward, name=name, **options: (
            calls.add(name) or usual(*args, **options)
        )
    user_log = run.log
    run.log = user_log
    run.model.loss_function = run.model.loss_function  # set by the user to the one that is trained with anyway
    with left_as_it_was(run):
        run.train()
    assert calls == set(names)
    assert run.__dict__["log"] is user_log
    assert_same_training(train(tmp_path, callbacks), run)


def test_a_batch_size_that_is_found(tmp_path: Path) -> None:
    """A training that begins again with smaller batches is one that began with them, and leaves nothing either."""

    def fill(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if len(args[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    run = trainer(tiny(), both(), tmp_path, auto_find_batch_size=True)
    run.model.lm_head.register_forward_pre_hook(fill)
    with left_as_it_was(run):
        run.train()
    assert_same_training(run, train(tmp_path, both(), per_device_train_batch_size=2))


@pytest.mark.parametrize(
    ("place", "fuse"), [("model.layers.2", 3), ("on_train_begin", 1), ("on_pre_optimizer_step", 2)]
)
def test_after_an_exception(tmp_path: Path, place: str, fuse: int) -> None:
    """Wherever it comes from, when that is called so often; the same callbacks then train as if nothing had been."""
    callbacks, called, bomb, model = both(), list[int](), TrainerCallback(), tiny()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

    def tick(*args: Any, **kwargs: Any) -> None:
        called.append(1)
        if len(called) == fuse:
            raise ZeroDivisionError

    if "." in place:
        model.get_submodule(place).register_forward_pre_hook(tick)
    else:
        setattr(bomb, place, tick)
    run = trainer(model, [*callbacks, bomb], tmp_path, **options)
    with left_as_it_was(run), pytest.raises(ZeroDivisionError):
        run.train()
    assert len(called) == fuse
    assert_same_training(train(tmp_path, callbacks, **options), train(tmp_path, both(), **options))


def test_copies_made_meanwhile(tmp_path: Path) -> None:
    """A teacher that a callback copies in each step is the plain model, and trains and changes nothing."""
    teachers, copying, batch = list[Any](), TrainerCallback(), stacked(rows(4))

    def copy_it(*args: Any, model: Any, **kwargs: Any) -> None:
        alone = tiny().train()
        alone.load_state_dict(model.state_dict())
        teachers.append(copy.deepcopy(model))
        assert torch.equal(teachers[-1](**batch).loss, alone(**batch).loss)

    copying.on_step_begin = copy_it
    run = train(tmp_path, [*both(), copying], **{CHECKPOINTING: True})
    assert_same_training(run, train(tmp_path, both(), **{CHECKPOINTING: True}))
    assert [attributes_of(teacher).keys() for teacher in teachers] == [attributes_of(run.model).keys()] * 3


def test_other_threads(tmp_path: Path) -> None:
    """Forwards of the same model in another thread, in the middle of one that trains, go their own way."""
    logits: list[torch.Tensor] = []
    ids = stacked(rows(2))["input_ids"]
    model, trains = tiny(), threading.current_thread()

    def serve(module: Any, args: Any) -> None:
        if threading.current_thread() is trains:
            thread = threading.Thread(target=lambda: logits.append(model(ids).logits.detach()))
            thread.start()
            thread.join()

    model.model.layers[3].register_forward_pre_hook(serve)
    callbacks = [exits(1), LayerDropout(0.9)]
    train(tmp_path, callbacks, model, **{CHECKPOINTING: True})
    assert_equal(weights(model), weights(train(tmp_path, callbacks, **{CHECKPOINTING: True}).model))
    torch.testing.assert_close(logits[0], tiny()(ids).logits.detach())
