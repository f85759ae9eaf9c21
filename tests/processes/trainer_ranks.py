"""What ranks under torchrun do with Hugging Face's Trainer: each case says what came out, or the error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate_ranks import KINDS, fresh_state, outcomes, sha
from example_ranks import run_example
from torch import Tensor, nn

import onebit
from onebit import comm
from onebit.comm.messages import gather_texts
from onebit.integrations.trainer import OnebitTrainerMixin, Trainer
from onebit.optimizer import CompressedOptimizer

STEPS, BATCH = 12, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.body(x)
        return {"loss": nn.functional.mse_loss(out.float(), labels), "logits": out}


class Data(torch.utils.data.Dataset):
    """As many samples as the steps of two ranks need, and some."""

    def __init__(self, samples: int = 2 * STEPS * BATCH * 2 + 40):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {"x": self.x[k], "labels": self.y[k]}


class Seen:
    """A collator that keeps this rank's batches."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.batches.append(transformers.default_data_collator(samples))
        return self.batches[-1]


def arguments(folder: Path, **changed: object) -> transformers.TrainingArguments:
    usual = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": 8,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return transformers.TrainingArguments(output_dir=str(folder), **usual | changed)


def chosen(name: str = "OnebitAdam", **options: object) -> tuple[type[CompressedOptimizer], dict]:
    kind, defaults = KINDS[name]
    return kind, {"compression": "always"} | defaults | options


def trainer_of(folder: Path, name: str = "OnebitAdam", *, kind: type = Trainer, **changed: object) -> Trainer:
    data = Data()
    extra = {key: changed.pop(key) for key in ("callbacks", "data_collator") if key in changed}
    given = changed.pop("optimizer_cls_and_kwargs", chosen(name))
    return kind(
        Net(),
        arguments(folder, **changed),
        train_dataset=data,
        eval_dataset=data,
        optimizer_cls_and_kwargs=given,
        **extra,
    )


def inner(trainer: Trainer) -> CompressedOptimizer:
    return trainer.optimizer.optimizer


class Callback(transformers.TrainerCallback):
    """Calls work() at an event of Trainer."""

    def __init__(self, event: str, work: Callable[[], None]):
        setattr(self, event, lambda *_, **__: work())


# ---------------------------------------------------------------- cases


def plain_loop(folder: Path) -> dict:
    """Trainer, and the same by hand with the batches that it saw."""
    seen = Seen()
    trainer = trainer_of(folder, data_collator=seen, gradient_accumulation_steps=2, max_grad_norm=0.5, warmup_steps=3)
    trainer.train()
    net = Net()
    with_decay = trainer.get_decay_parameter_names(net)
    groups = [
        {"params": [p for n, p in net.named_parameters() if (n in with_decay) is is_decayed], "weight_decay": decay}
        for is_decayed, decay in ((True, 0.1), (False, 0.0))
    ]
    kind, options = chosen()
    optimizer = kind(groups, lr=0.01, max_grad_norm=0.5, **options)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 3, STEPS)
    for k, batch in enumerate(seen.batches[: 2 * STEPS]):
        (net(**batch)["loss"] / 2).backward()
        if k % 2:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    onebit.sync_buffers(net, optimizer.transport)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "same": sha(net) == sha(trainer.model),
        "wrapped": type(trainer.model_wrapped).__name__,
        "logged": sorted(logs[-1]),
        "bits": [entry["bits_per_parameter"] for entry in logs],
        "norm": [logs[-1]["grad_norm"], optimizer.stats.grad_norm],
        "resent": inner(trainer).stats.resent_steps,
    }


def overlap(folder: Path) -> dict:
    """max_grad_norm=0: buckets leave in the last pass of a step, in one bit too; the norm is not known."""
    launched: list[int] = []
    trainer = trainer_of(folder, max_grad_norm=0.0, gradient_accumulation_steps=2)
    trainer.add_callback(Callback("on_pre_optimizer_step", lambda: launched.append(inner(trainer)._driver.launched)))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "launched": launched,
        "buckets": len(inner(trainer).buckets),
        "resent": inner(trainer).stats.resent_steps,
        "logs_norm": any("grad_norm" in entry for entry in logs),
    }


def resumed(name: str) -> Callable[[Path], dict]:
    """Evaluated and saved every five steps; the newest checkpoint but the last is taken up."""

    def case(folder: Path) -> dict:
        saw: dict[str, list[int]] = {"on_prediction_step": [], "on_save": [], "on_step_end": []}
        options = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
        options |= {"save_total_limit": 2, "max_grad_norm": 0.0 if name == "ZeroOneAdam" else 1.0}

        def note(event: str) -> None:
            saw[event].append(len(set(gather_texts(inner(trainer).transport, sha(trainer.model)))))

        trainer = trainer_of(folder / name, name, **options)
        for event in saw:
            trainer.add_callback(Callback(event, partial(note, event)))
        trainer.train()
        ended = sha(trainer.model)
        kept = sorted(path.name for path in (folder / name).iterdir())
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        dist.barrier()
        if trainer.is_world_process_zero():
            shutil.rmtree(folder / name / "checkpoint-12")
        dist.barrier()
        with fresh_state():
            trainer = trainer_of(folder / name, name, **options)
            trainer.train(resume_from_checkpoint=True)
        again = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        return {
            "same": sha(trainer.model) == ended,
            "first": trainer.state.log_history[-1]["step"],
            "evaluated": [evaluated, again],
            "saw": saw,
            "kept": kept,
            "files": sorted(path.name for path in (folder / name / "checkpoint-10").iterdir()),
            "phase": inner(trainer).stats.phase,
        }

    return case


def bfloat16(folder: Path) -> dict:
    trainer = trainer_of(folder, bf16=True)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    hashes = gather_texts(inner(trainer).transport, sha(trainer.model))
    return {"losses": losses, "alike": len(set(hashes)), "phase": inner(trainer).stats.phase}


def without_any_choice(folder: Path) -> dict:
    """The import alone has changed: OnebitAdam, by the hyperparameters of TrainingArguments."""
    trainer = Trainer(Net(), arguments(folder, adam_beta1=0.8, max_steps=2), train_dataset=Data())
    trainer.train()
    group = inner(trainer).param_groups[0]
    return {
        "kind": type(inner(trainer)).__name__,
        "betas": group["betas"],
        "decay": group["weight_decay"],
        "lr": group["initial_lr"],
        "norm": inner(trainer).max_grad_norm,
    }


def given_optimizer(folder: Path) -> dict:
    """`optimizers=`, trained twice; predictions in between; a trainer of another library, by the mixin."""

    class Theirs(transformers.Seq2SeqTrainer):
        pass

    class Ours(OnebitTrainerMixin, Theirs):
        pass

    model = Net()
    kind, options = chosen("ZeroOneAdam")
    optimizer = kind(model.parameters(), lr=0.01, **options)
    training = transformers.Seq2SeqTrainingArguments(**arguments(folder, max_steps=7).to_dict())
    trainer = Ours(model, training, train_dataset=Data(), optimizers=(optimizer, None))
    trainer.train()
    first, steps = sha(model), int(optimizer.steps[0])
    trainer.predict(Data(16))
    trainer.train()
    alike = len(set(gather_texts(optimizer.transport, sha(model))))
    return {"steps": [steps, int(optimizer.steps[0])], "alike": alike, "moved": sha(model) != first}


def adamws_checkpoint(folder: Path) -> dict:
    """Trainer's own, with AdamW: ours goes on from it, in warm-up."""
    saving = {"save_strategy": "steps", "save_steps": 6, "max_steps": 6}
    stock = (torch.optim.AdamW, {"lr": 0.01})
    trainer_of(folder / "adamw", kind=transformers.Trainer, optimizer_cls_and_kwargs=stock, **saving).train()
    with fresh_state():
        dist.barrier()
        trainer = trainer_of(folder / "adamw", optimizer_cls_and_kwargs=chosen(freeze_step=10))
        trainer.train(resume_from_checkpoint=True)
    return {
        "steps": int(inner(trainer).steps[0]),
        "phase": inner(trainer).stats.phase,
        "step": trainer.state.global_step,
    }


def save_for_one_rank(folder: Path) -> dict:
    trainer_of(folder / "world", save_strategy="steps", save_steps=6, max_steps=6).train()
    return {}


# ---------------------------------------------------------------- natural, but wrong


def stock_trainer(folder: Path) -> None:
    trainer_of(folder, kind=transformers.Trainer, optimizer_cls_and_kwargs=chosen()).train()


def other_optim(folder: Path) -> None:
    trainer_of(folder, optimizer_cls_and_kwargs=None, optim="adafactor").train()


def two_norms(folder: Path) -> None:
    trainer_of(folder, optimizer_cls_and_kwargs=chosen(max_grad_norm=0.5)).train()


def unsynchronised_weights(folder: Path) -> None:
    trainer = trainer_of(folder, "ZeroOneAdam")

    def save() -> None:
        if not inner(trainer).rule.is_synchronised():
            trainer.save_model(str(folder / "unsynchronised"))

    trainer.add_callback(Callback("on_step_end", save))
    trainer.train()


def missing_file(folder: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer_of(folder / "missing", **saving).train()
    if dist.get_rank() == 0:
        (folder / "missing" / "checkpoint-2" / "optimizer_rank_00001.pt").unlink()
    dist.barrier()
    with fresh_state():
        trainer_of(folder / "missing").train(resume_from_checkpoint=True)


def blind_rank(folder: Path) -> None:
    """Folders of two hosts, of which one has no optimizer's file."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer_of(folder / "seen", **saving).train()
    dist.barrier()
    if dist.get_rank() == 1:
        shutil.copytree(folder / "seen" / "checkpoint-2", folder / "unseen" / "checkpoint-2")
        (folder / "unseen" / "checkpoint-2" / "optimizer.pt").unlink()
    own = folder / ("unseen" if dist.get_rank() == 1 else "seen") / "checkpoint-2"
    with fresh_state():
        trainer_of(folder / "seen").train(resume_from_checkpoint=str(own))


RIGHT: dict[str, Callable[[Path], dict]] = {
    "plain loop": plain_loop,
    "overlap": overlap,
    **{f"resumed {name}": resumed(name) for name in KINDS},
    "bfloat16": bfloat16,
    "without any choice": without_any_choice,
    "given optimizer": given_optimizer,
    "AdamW's checkpoint": adamws_checkpoint,
    "another world": save_for_one_rank,
}
WRONG: dict[str, Callable[[Path], None]] = {
    one.__name__: one
    for one in (
        stock_trainer, other_optim, two_norms, unsynchronised_weights, missing_file, blind_rank,
    )
}  # fmt: skip


def cases(folder: str) -> dict:
    """By case: what came out, or the error's text."""
    transformers.logging.set_verbosity_error()
    said: dict[str, object] = {}
    with fresh_state():
        arguments(Path(folder))  # Trainer starts the group
    options = ("--steps", "24", "--warmup", "8")
    said["example"] = run_example("trainer", Path(folder) / "example", *options, around=fresh_state)
    return said | outcomes(Path(folder), RIGHT, WRONG)


def resume_in_other_world(folder: str) -> dict:
    transformers.logging.set_verbosity_error()
    trainer = trainer_of(Path(folder) / "world")
    trainer.train(resume_from_checkpoint=True)
    assert comm.init().world_size == 1
    return {
        "steps": int(inner(trainer).steps[0]),
        "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
    }
