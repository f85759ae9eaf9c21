"""Public DeepSpeed configurations: which of them are read here, and which train.

    python scripts/deepspeed_configs.py FOLDER --record runs/deepspeed_configs.md

FOLDER holds owner/name/path.json, as in the repositories. An "auto" gets the value that Hugging Face's Trainer with its
default arguments writes there. Each accepted file then trains a small model in a process apart until it has taken two
steps, with paths in a temporary folder and with micro-batches of at most two samples. Nothing of a file is kept but its
name and the answer. Exit status 1 if an accepted file does not train.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import queue
import re
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from bench.record import here
from provenance import add_record
from reports import publish, table
from rich.progress import track
from torch import nn

import onebit.zero as deepspeed
from onebit.zero.compression.helper import convert_conv1d_to_linear

BLOCKS = {"zero_optimization", "fp16", "bf16", "optimizer", "compression_training", "data_efficiency"}
SIZES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
TRAINER = {  # of transformers.TrainingArguments' defaults; 100: steps of a run
    "lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "gradient_clipping": 1.0,
    "warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 0, "total_num_steps": 100, "enabled": False,
}  # fmt: skip
STEPS, MOST_STEPS = 2, 80  # those with a rate above 0; a loss scale that begins at 2^32 skips some thirty steps
WORDS, ROWS, LENGTH = 192, 2, 16
MOST_CHARACTERS = 200
PATHS = {"nvme_path", "output_path", "swap_dir", "output_file", "csv_monitor"}


@dataclass(frozen=True)
class Outcome:
    """name: in its repository. refused, failed: in words; "" if it was accepted, or has trained."""

    repository: str
    name: str
    refused: str = ""
    failed: str = ""
    steps: int = 0


def public_files(folder: Path) -> Iterator[tuple[str, str, object]]:
    """(repository, path, content) of each configuration; the content is None for what is not JSON."""
    for path in sorted(folder.rglob("*.json")):
        owner, name, *rest = path.relative_to(folder).parts
        text = path.read_text()
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            content = None
        if content is None or is_configuration(content):
            yield f"{owner}/{name}", "/".join(rest), content


def is_configuration(content: object) -> bool:
    """Whether a JSON file configures DeepSpeed; a trainer's arguments have some of its keys, too."""
    if not isinstance(content, dict) or "per_device_train_batch_size" in content:
        return False
    return bool(SIZES.keys() & content.keys()) or any(isinstance(content.get(name), dict) for name in BLOCKS)


def as_the_trainer(content: object, key: str = "") -> object:
    """The content with values in place of "auto"; those unknown to the Trainer stay."""
    if isinstance(content, dict):
        return {name: as_the_trainer(value, name) for name, value in content.items()}
    return (TRAINER | SIZES).get(key, content) if content == "auto" else content


def ranks_of(content: dict[str, object]) -> int:
    """The number of ranks that a file is written for: of its three batch sizes, times those that divide a layer."""
    train, micro, steps = (content.get(name) for name in SIZES)
    replicas = train // (micro * steps) if all(isinstance(size, int) for size in (train, micro, steps)) else 1  # type: ignore[operator]
    return max(1, replicas) * tensor_ranks_of(content)


def tensor_ranks_of(content: dict[str, object]) -> int:
    """The ranks that compute each layer together."""
    return content.get("tensor_parallel", {}).get("autotp_size") or 1  # type: ignore[attr-defined]


def with_sizes(content: dict[str, object], most: int | None = None) -> dict[str, object]:
    """With a batch size, if the file leaves it to its caller; most: of samples and of micro-batches, for one rank."""
    if most is None:
        return content if content.keys() & {*list(SIZES)[:2]} else content | {"train_micro_batch_size_per_gpu": 8}
    steps = content.get("gradient_accumulation_steps", 1)
    sizes = {"train_micro_batch_size_per_gpu": most, "gradient_accumulation_steps": min(int(steps), most)}  # type: ignore[call-overload]
    return {name: value for name, value in content.items() if name not in SIZES} | sizes


def moved(content: object, folder: str) -> object:
    """With every path of files that a run writes in this folder, and without wandb, which needs an account."""
    if not isinstance(content, dict):
        return content
    return {
        name: folder if name in PATHS and isinstance(value, str) else moved(value, folder)
        for name, value in content.items()
        if name != "wandb"
    }


# ---------------------------------------------------------------- training


class Convolutions(nn.Module):
    """A network with the names of a ResNet's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.layer1 = nn.ModuleList([nn.ModuleDict({"conv1": nn.Conv2d(8, 8, 3, padding=1), "bn1": nn.BatchNorm2d(8),
                                                    "conv2": nn.Conv2d(8, 8, 3, padding=1)})])  # fmt: skip
        self.linear = nn.Linear(8, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.conv1(input_ids.view(-1, 1, 4, LENGTH // 4) / WORDS)
        for block in self.layer1:
            x = x + block["conv2"](block["bn1"](block["conv1"](x)).relu())  # type: ignore[index]
        return {"loss": nn.functional.cross_entropy(self.linear(x.mean((2, 3))).float(), labels)}


def model_for(content: dict[str, object], layers: int | None = None) -> nn.Module:
    """A small model with the modules that the file names: a BERT, a GPT-2 or convolutions."""
    names = json.dumps(content.get("compression_training", {}))
    torch.manual_seed(1)
    if "conv1" in names:
        return Convolutions()
    routing = content.get("data_efficiency", {}).get("data_routing", {})  # type: ignore[attr-defined]
    layers = layers or routing.get("random_ltd", {}).get("total_layer_num", 2)
    small = {"vocab_size": WORDS, "num_hidden_layers": layers, "hidden_size": 192, "num_attention_heads": 12}
    if "c_attn" in names:
        config = transformers.GPT2Config(**small, n_positions=LENGTH, pad_token_id=0)
        net = transformers.GPT2ForSequenceClassification(config)
        return convert_conv1d_to_linear(net, transformers.pytorch_utils.Conv1D)
    config = transformers.BertConfig(**small, intermediate_size=384, max_position_embeddings=LENGTH)
    return transformers.BertForSequenceClassification(config)


def compressed(content: dict[str, object]) -> nn.Module:
    """The model, compressed as the file asks; a student of fewer layers is one of a BERT of twelve."""
    block = content.get("compression_training")
    if not block:
        return model_for(content)
    reduction = block.get("layer_reduction", {})  # type: ignore[attr-defined]
    if not reduction.get("enabled"):
        return deepspeed.init_compression(model_for(content), content)
    return deepspeed.init_compression(
        model_for(content, reduction["keep_number_layer"]), content, model_for(content, 12)
    )


def train(content: dict[str, object]) -> int:
    """Take steps with one rank. Gives those taken; raises if a loss is not finite, or nothing has moved."""
    net = compressed(content)
    options = {} if content.get("optimizer") else {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3)}
    before = torch.cat([p.detach().double().flatten() for p in net.parameters()])
    engine, *_ = deepspeed.initialize(model=net, config=content, model_parameters=list(net.parameters()), **options)
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    taken = 0
    while taken < STEPS:
        if engine.global_steps >= MOST_STEPS:
            raise RuntimeError(f"{engine.skipped_steps} of {engine.global_steps} steps skipped")
        batch = {"input_ids": ids.float() if isinstance(net, Convolutions) else ids, "labels": ids[:, 0] % 2}
        if engine.curriculum_enabled_legacy():
            batch = deepspeed.data_efficiency.truncate(batch, engine.curriculum_seqlen())
        loss = engine(**batch)["loss"]
        if not loss.isfinite():
            raise RuntimeError(f"the loss is {loss.item()} in step {engine.global_steps}")
        engine.backward(loss)
        rate = max(group["lr"] for group in engine.optimizer.param_groups)  # of a warm-up: 0 in the first steps
        engine.step()
        taken += engine.was_step_applied() and rate > 0
    weights = engine.module_state_dict()
    after = torch.cat([weights[name].double().flatten() for name, _ in engine.module.named_parameters()])
    if torch.equal(before, after):
        raise RuntimeError("no parameter has moved")
    return engine.global_steps


def _child(content: dict[str, object], answers: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            answers.put(train(moved(content, folder)))  # type: ignore[arg-type]
        except Exception as error:
            answers.put(in_words(error))


def trained(content: dict[str, object], timeout_s: float) -> int | str:
    """The steps taken, or what went wrong, in words."""
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once
    answers: multiprocessing.Queue = context.Queue()
    child = context.Process(target=_child, args=(content, answers))
    child.start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return f"no answer in {timeout_s} s, exit status {child.exitcode}"
    finally:
        child.kill()
        child.join()


def in_words(error: Exception) -> str:
    """An error in one line."""
    line = re.sub(r"/\S*/tmp\w+/?", "", " ".join(str(error).split())).replace("|", "/")
    return textwrap.shorten(f"{type(error).__name__}: {line}", MOST_CHARACTERS, placeholder="...")


def outcome(repository: str, name: str, content: object, timeout_s: float) -> Outcome:
    """Read a file, and train with it if it is accepted."""
    if content is None:
        return Outcome(repository, name, "not JSON: a template, whose words a script replaces")
    filled = with_sizes(as_the_trainer(content))  # type: ignore[arg-type]
    try:
        deepspeed.read_config(filled, world_size=ranks_of(filled), rank=1)
    except (ValueError, TypeError) as error:
        return Outcome(repository, name, in_words(error))
    if tensor_ranks_of(filled) > 1:
        return Outcome(repository, name, failed=f"not tried: {tensor_ranks_of(filled)} ranks divide each layer")
    answer = trained(with_sizes(filled, 2), timeout_s)
    if isinstance(answer, str):
        return Outcome(repository, name, failed=answer)
    return Outcome(repository, name, steps=answer)


# ---------------------------------------------------------------- the report


def report(outcomes: Sequence[Outcome]) -> str:
    """Counts of each repository, then the files that were refused or did not train, in words."""
    every, accepted, done = (
        Counter(each.repository for each in outcomes if fits(each))
        for fits in (lambda _: True, lambda each: not each.refused, lambda each: each.steps > 0)
    )
    counts = [(name, every[name], accepted[name], done[name]) for name in every]
    counts.append(("all", every.total(), accepted.total(), done.total()))
    parts = ["# Public DeepSpeed configurations", here(), table(("repository", "files", "accepted", "trained"), counts)]
    for title, words in (("Refused", "refused"), ("Accepted, and does not train", "failed")):
        if found := [(f"{o.repository}: {o.name}", getattr(o, words)) for o in outcomes if getattr(o, words)]:
            parts += [f"## {title}", table(("file", "answer"), found, names=2)]
    parts += ["## Trained", "Steps until two had a rate above 0; a loss scale that is too large at first skips some."]
    parts.append(table(("file", "steps"), [(f"{o.repository}: {o.name}", o.steps) for o in outcomes if o.steps]))
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("folder", type=Path, help="holds owner/name/path.json")
    add("--only", default="", metavar="TEXT", help="the files with this in their path")
    add("--timeout", type=float, default=120.0, metavar="S", help="of one file (default: %(default)s)")
    add_record(parser)
    args = parser.parse_args(argv)
    logging.getLogger("onebit").setLevel(logging.ERROR)
    chosen = [each for each in public_files(args.folder) if args.only in f"{each[0]}/{each[1]}"]
    outcomes = [outcome(*each, args.timeout) for each in track(chosen, "Running")]
    publish(args, report(outcomes))
    return int(any(each.failed for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
