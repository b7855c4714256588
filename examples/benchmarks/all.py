"""Runs the commands of RESULTS.md one after another, which takes hours; a run that was stopped goes on.

    python examples/benchmarks/all.py --model SMOLLM2 --data FOLDER --out tables [--twin TWIN]

``SMOLLM2`` is a folder with SmolLM2-135M-Instruct, the folder of data has the files of the suites (HumanEval.jsonl,
gsm8k_train.jsonl, spec_bench.jsonl, wikitext2_valid.txt), and ``TWIN`` is the demo model trained without exits
(``train_demo_model.py --plain``). What a command prints goes into a file of its own, which is written when it
has ended well; remove the file to run it again.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITES = {
    "prompts.jsonl": "spec-bench spec_bench.jsonl humaneval HumanEval.jsonl gsm8k gsm8k_train.jsonl "
    "editing wikitext2_valid.txt",
    "both.jsonl": "spec-bench spec_bench.jsonl humaneval HumanEval.jsonl",
    "chats.jsonl": "spec-bench spec_bench.jsonl",
    "code.jsonl": "humaneval HumanEval.jsonl",
}
_BENCH = "hf-selfspec bench --model SMOLLM2 --data"
_CHAT = f"{_BENCH} prompts.jsonl --prompts 2 --max-new-tokens 96 --max-prompt-tokens 500 --methods"
_SCRIPT = "python examples/benchmarks/"
# The name of the table, and its command as it stands in RESULTS.md.
COMMANDS = {
    "chat": f"{_CHAT} selfspec,prompt-lookup,plain-linears --threads 1 --dtype float32 --out DIR",
    "chat, bfloat16": f"{_CHAT} selfspec,prompt-lookup,plain-linears --threads 1 --dtype bfloat16 --out DIR",
    "batches": f"{_BENCH} both.jsonl --batch-size 8 --max-new-tokens 96 --max-prompt-tokens 200 --methods selfspec",
    "grammar": f"{_SCRIPT}grammar.py --model SMOLLM2",
    "static cache": f"{_BENCH} code.jsonl --prompts 2 --max-new-tokens 96 --threads 1 --dtype float32 "
    "--methods selfspec,static-compiled",
    "fewer bits": f"{_BENCH} chats.jsonl --prompts 2 --max-new-tokens 96 --threads 1 --dtype bfloat16 "
    '--methods "plain,selfspec,quantized,SelfSpec(Quantized())"',
    "fewer bits, agreement": f"{_SCRIPT}fewer_bits.py --model SMOLLM2 --data chats.jsonl --kinds chat math translation "
    "summary --prompts 1 --tokens 64 --dither",
    "known answer": f"{_SCRIPT}known_answer.py --width 128 --layers 32 --dtype float32",
    "stops": f"{_SCRIPT}stops.py --data HumanEval.jsonl gsm8k_train.jsonl --prompts 8 --repeats 2",
    "adapters": f"{_SCRIPT}adapters.py --model TWIN --data HumanEval.jsonl --prompts 8 --repeats 2 --files 100 "
    "--learning-rate 5e-3",
    "heads": f"{_SCRIPT}heads.py --data HumanEval.jsonl --prompts 6 --repeats 1",
    "exits": f"{_SCRIPT}exits.py --data HumanEval.jsonl",
    "one task": "python examples/finetune_task.py --threads 1",
    "engine": f"{_SCRIPT}engine.py",
    "forward": f"{_SCRIPT}forward.py --model SMOLLM2 --dtype float32 --repeats 15",
    "host": f"{_SCRIPT}host.py --data HumanEval.jsonl --tokens 64",
    "memory": f"{_SCRIPT}memory.py --model SMOLLM2 --rows 16 --prompt 128 --tokens 64",
    "training": f"{_SCRIPT}training.py --width 2048 --layers 8 --vocabulary 32000 --dtype bfloat16 --rows 1 "
    "--prompt 512 --repeats 1 --threads 2",
    "windows": f"{_SCRIPT}windows.py",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of the suites")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables")
    parser.add_argument("--twin", help="the demo model trained without exits; its table is left out otherwise")
    args = parser.parse_args()
    args.out, args.data = args.out.absolute(), args.data.absolute()  # commands run in the folder of the repository
    args.out.mkdir(parents=True, exist_ok=True)
    models = {"SMOLLM2": args.model, "TWIN": args.twin or "TWIN"}
    places = {name: str(Path(model).absolute()) if Path(model).exists() else model for name, model in models.items()}

    def run(command: str, to: Path) -> bool:
        if to.exists():
            return True
        words = [places.get(word, str(args.out / word) if word in SUITES else word) for word in shlex.split(command)]
        words = [str(args.data / word) if (args.data / word).is_file() else word for word in words]
        first = {"python": [sys.executable], "hf-selfspec": [sys.executable, "-m", "hf_selfspec"]}[words[0]]
        done = subprocess.run([*first, *words[1:]], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if not done.returncode:
            head = f"{date.today()}: `{command}`\n\n"  # scripts print the machine themselves
            to.write_text(done.stdout if to.name in SUITES else head + done.stdout, encoding="utf-8")
        return not done.returncode

    failed = [name for name, suites in SUITES.items() if not run(f"{_SCRIPT}suites.py {suites}", args.out / name)]
    for name, command in COMMANDS.items():
        if "TWIN" in command and args.twin is None:
            continue
        folder = shlex.quote(str(args.out / name.replace(" ", "-")))
        with_folder = f"{command.removesuffix(' --out DIR')} --out {folder}" if " bench " in command else command
        print(f"{name}: {command}", flush=True)
        if not run(with_folder, args.out / f"{name}.md"):
            failed.append(name)
    if failed:
        raise SystemExit(f"these commands failed, and run again with the next call: {', '.join(failed)}")


if __name__ == "__main__":
    main()
