"""What two ranks do with transformers' and Lightning's Trainer, whose `import deepspeed` gives onebit.zero.

Both are imported within the functions, after `stand_in`: the tests' own process imports this file, too. As a script it
is one rank of `cases` or `lightning_cases`, which no fork can be: those have imported transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from onebit import zero

STEPS, SAVED = 8, 4
AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
ONE_BIT = {"compression": "always", "block": 64}
ADAMW = {"type": "AdamW", "params": AUTO}
COUNTS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0": {"optimizer": ADAMW, "zero_optimization": {"stage": 0}},
    "stage 1": {"optimizer": ADAMW, "zero_optimization": {"stage": 1}},
    "stage 2": {"optimizer": ADAMW, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}},
    "Trainer's optimizer": {"zero_optimization": {"stage": 2}},
    "its schedule": {
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupDecayLR", "params": WARMUP},
        "zero_optimization": {"stage": 1},
    },
    "offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "stage 3": {
        "optimizer": ADAMW,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "stage 2, bf16": {"optimizer": ADAMW, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}},
    "one bit": {
        "optimizer": {"type": "OneBitAdam", "params": AUTO},
        "zero_optimization": {"stage": 0},
        "onebit": ONE_BIT,
    },
    "0/1": {"optimizer": {"type": "ZeroOneAdam", "params": AUTO}, "zero_optimization": {"stage": 0}, "onebit": ONE_BIT},
    "one bit, stage 2": {
        "optimizer": {"type": "OneBitAdam", "params": AUTO},
        "zero_optimization": {"stage": 2},
        "onebit": ONE_BIT,
    },
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "stage 1": {"gradient_accumulation_steps": 2},
    "stage 2, bf16": {"bf16": True, "use_cpu": True},
    "stage 3": {"label_smoothing_factor": 0.1},  # shifts labels by the name of the model's class
}
SLICES = "slices"
TENSOR = {"optimizer": ADAMW, "zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
DENSE = [name for name in CONFIGS if name not in ("its schedule", "0/1") and "bit" not in name and "bf16" not in name]


class Rows(torch.utils.data.Dataset):
    """Texts that count upwards from a random number."""

    def __init__(self, length: int):
        self.first = torch.randint(0, 64, (length, 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        text = (self.first[k] + torch.arange(12)) % 64
        return {"input_ids": text, "labels": text}


def llama() -> Any:
    """Its layers can be divided."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    )


def train(folder: Path, config: Mapping[str, Any] | None, resume: str | None = None, **more: Any) -> tuple[Any, dict]:
    """A Trainer after its run, and the complete weights at its end."""
    from transformers import Trainer, TrainingArguments

    given = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "warmup_steps": 2}
    given |= {"max_steps": STEPS, "save_steps": SAVED, "eval_steps": SAVED, "eval_strategy": "steps", "report_to": []}
    chosen = {"use_cpu": True} if config is None else {"deepspeed": json.loads(json.dumps({**config, **COUNTS}))}
    arguments = TrainingArguments(str(folder), disable_tqdm=True, **given | chosen | more)
    model = llama() if folder.name == SLICES else gpt()
    trainer = Trainer(model, arguments, train_dataset=Rows(512), eval_dataset=Rows(16))
    trainer.train(resume_from_checkpoint=resume)
    if config is None:
        return trainer, {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}
    return trainer, trainer.deepspeed.module_state_dict()


def plain_cases(folder: str) -> dict[str, Any]:
    """Trainer by itself, with the arguments of each run, and with none."""
    runs = {"": {}, **ARGUMENTS}
    return {name: logged(train(Path(folder, name[-1:]), None, **more)[0]) for name, more in runs.items()}


def one_process(folder: str) -> dict[str, Any]:
    """Trainer by itself, on the one rank there is."""
    return logged(train(Path(folder, SLICES), None)[0])


def logged(trainer: Any) -> dict[str, Any]:
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": [line["loss"] for line in steps],
        "norms": [line["grad_norm"] for line in steps],
        "rates": [line["learning_rate"] for line in steps],
        "evaluated": [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line],
    }


def cases(folder: str) -> dict[str, Any]:
    """Each configuration: trained, saved, and resumed from the middle. In a Python without transformers so far."""
    zero.stand_in()
    facts: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        more, place = ARGUMENTS.get(name, {}), Path(folder, name.replace(" ", "_"))
        trainer, end = train(place, config, **more)
        trainer.save_model(str(place / "end"))
        resumed, again = train(place, config, resume=f"{place}/checkpoint-{SAVED}", **more)  # and saves the end anew
        loaded = load_file(place / "end" / "model.safetensors")
        facts[name] = {
            **logged(trainer),
            "engine": type(trainer.deepspeed).__name__,
            "same": all(torch.equal(end[key], again[key]) for key in end),
            "same losses": logged(resumed)["losses"] == logged(trainer)["losses"],
            "saved": all(torch.allclose(x.float(), end[key].float(), rtol=1e-2) for key, x in loaded.items()),
            "exported": name != "stage 3" or exported(place / f"checkpoint-{STEPS}", end),
            "digest": hashlib.sha256(b"".join(x.float().numpy().tobytes() for x in end.values())).hexdigest(),
        }
    facts[SLICES] = logged(train(Path(folder, SLICES), TENSOR)[0])
    facts["from_pretrained"] = from_pretrained_at_stage_3(Path(folder))
    facts["generated"] = generates_at_stage_3()
    return facts


def exported(checkpoint: Path, end: Mapping[str, Tensor]) -> bool:
    """Whether the command in a checkpoint writes the weights, in a Python that has no ranks."""
    if torch.distributed.get_rank() != 0:
        return True
    alone = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "zero_to_fp32.py", ".", "weights"]
    subprocess.run(command, cwd=checkpoint, env=alone, check=True, timeout=60)
    written = torch.load(checkpoint / "weights" / "pytorch_model.bin")
    return set(written) == set(end) and all(torch.equal(x, end[name].float()) for name, x in written.items())


def from_pretrained_at_stage_3(folder: Path) -> bool:
    """Whether a model that transformers builds in parts, for DeepSpeed's stage 3, has the file's weights."""
    from transformers import GPT2LMHeadModel
    from transformers.integrations import HfDeepSpeedConfig

    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    model = GPT2LMHeadModel.from_pretrained(folder / "stage_3" / "end")
    expected = load_file(folder / "stage_3" / "end" / "model.safetensors")
    del kept
    assert all(hasattr(p, "ds_id") and p.partition_numel() < p.ds_numel for p in model.parameters())
    return all(torch.equal(model.state_dict()[name], x) for name, x in expected.items())


def generates_at_stage_3() -> bool:
    """Whether an encoder and decoder, before any forward pass, generates on this rank what the whole model does."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    rows = {"input_ids": torch.stack([Rows(4)[k]["input_ids"] for k in range(4)]), "max_new_tokens": 6}
    expected = model.generate(**rows)
    zero.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    return torch.equal(model.generate(**rows, synced_gpus=True), expected)


ADAMW_FILE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 2}}
RAMP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2, "warmup_type": "linear"}}
LIGHTNING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 1": ({"stage": 1}, {}),
    "stage 2": ({"stage": 2}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "stage 3": ({"stage": 3}, {}),
    "offload": ({"stage": 2, "offload_optimizer": True}, {}),
    "stage 2, bf16": ({"stage": 2}, {"precision": "bf16-mixed"}),
    "its optimizer": ({"config": {**ADAMW_FILE, "scheduler": RAMP}}, {}),
}
"""Arguments of the strategy, and of the Trainer."""


def lightning_cases(folder: str) -> dict[str, Any]:
    """Each strategy: trained beside DDP, validated, resumed from the middle, and tested from its end."""
    zero.stand_in()
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, deepspeed

    deepspeed._validate_device_index_selection = lambda devices: None

    class OnCPU(DeepSpeedStrategy):
        """Lightning's asks for CUDA, and needs none."""

        def setup_environment(self) -> None:
            DDPStrategy.setup_environment(self)

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
            self.losses: list[float] = []
            self.rates: list[float] = []

        def loss(self, x: Tensor) -> Tensor:
            return (self.net(x).float() - x.sum(1, keepdim=True)).square().mean()

        def training_step(self, batch: list[Tensor], k: int) -> Tensor:
            loss = self.loss(batch[0])
            self.losses.append(loss.item())
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return loss

        def validation_step(self, batch: list[Tensor], k: int) -> None:
            self.log("evaluated", self.loss(batch[0]), sync_dist=True)

        test_step = validation_step

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    rows = torch.utils.data.TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)))
    batches = torch.utils.data.DataLoader(rows, batch_size=4)  # an epoch has four steps on two ranks
    facts: dict[str, Any] = {}

    def trainer(strategy: Any, place: str, **more: Any) -> Trainer:
        kept = ModelCheckpoint(dirpath=place, save_top_k=-1, filename="{epoch}")
        quiet = {"logger": False, "enable_progress_bar": False}
        given = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "callbacks": [kept], **quiet, **more}
        return Trainer(strategy=strategy, **given)

    def fit(strategy: Any, place: str, resume: str | None = None, **more: Any) -> tuple[dict[str, Any], Any]:
        net, made = Net(), trainer(strategy, place, **more)
        made.fit(net, batches, batches, ckpt_path=resume)
        evaluated = made.callback_metrics["evaluated"].item()
        return {"losses": net.losses, "rates": net.rates, "evaluated": evaluated}, made.strategy.model

    for name, (of_strategy, more) in LIGHTNING.items():
        place = f"{folder}/{name}"
        made = [OnCPU(**json.loads(json.dumps(of_strategy))) for _ in range(3)]  # it writes into the file's dict
        facts[name], engine = fit(made[0], place, **more)
        end = engine.module_state_dict()
        facts[name]["engine"] = type(engine).__name__
        resumed, engine = fit(made[1], f"{place}, resumed", f"{place}/epoch=0.ckpt", **more)
        facts[name]["same"] = all(torch.equal(end[key], x) for key, x in engine.module_state_dict().items())
        steps = len(resumed["losses"])
        facts[name]["same losses"] = resumed["losses"] == facts[name]["losses"][-steps:]
        facts[name]["same rates"] = resumed["rates"] == facts[name]["rates"][-steps:]
        tested = trainer(made[2], place, **more).test(Net(), batches, f"{place}/epoch=1.ckpt", verbose=False)
        facts[name]["tested"] = tested[0]["evaluated"]
        facts[name]["alone"], _ = fit(DDPStrategy(), f"{place}, alone", **more)
    return facts


if __name__ == "__main__":
    given, run = Path(sys.argv[1]), {"transformers": cases, "lightning": lightning_cases}[sys.argv[2]]
    (given / f"{os.environ['RANK']}.json").write_text(json.dumps(run(str(given))))
