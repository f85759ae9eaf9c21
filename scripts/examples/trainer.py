"""Hugging Face Trainer: a small Llama on generated text.

```diff
-from transformers import Trainer
+from onebit.integrations.trainer import Trainer
```

The optimizer is then OnebitAdam, with the learning rate, betas, weight decay and max_grad_norm of TrainingArguments.
`optimizer_cls_and_kwargs` chooses another of the family, or an option.

    torchrun --nproc-per-node 2 scripts/examples/trainer.py --steps 300
"""

import protocol
import torch
import transformers

import onebit
from onebit.integrations.trainer import Trainer

TOKENS, LENGTH = 64, 32


def text(sequences: int) -> list[dict[str, torch.Tensor]]:
    """Each token is followed by one of four, so that a loss of log(4) can be learned."""
    generator = torch.Generator().manual_seed(1)
    successors = torch.randint(TOKENS, (TOKENS, 4), generator=generator)
    rows = [torch.randint(TOKENS, (sequences,), generator=generator)]
    for _ in range(LENGTH - 1):
        rows.append(successors[rows[-1], torch.randint(4, (sequences,), generator=generator)])
    return [{"input_ids": row, "labels": row} for row in torch.stack(rows, 1)]


def main(argv: list[str] | None = None) -> None:
    args = protocol.parse(argv, "Train a small Llama with Trainer.")
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=TOKENS, **sizes))
    training = transformers.TrainingArguments(
        output_dir=str(args.folder or "runs/trainer"),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        save_strategy="steps" if args.folder else "no",
        save_steps=args.save_step,
        logging_steps=1,
        seed=args.seed,
        disable_tqdm=True,
        report_to="none",
    )
    # One bit even on loopback, where it does not pay. Leave this out, and the network is measured.
    options = {"compression": "always", "freeze_step": args.warmup}
    chosen = {"optimizer_cls_and_kwargs": (onebit.OnebitAdam, options)} if args.is_onebit else {}
    kind = Trainer if args.is_onebit else transformers.Trainer
    trainer = kind(model, training, train_dataset=text(2048), **chosen)
    # True takes the newest checkpoint; the end of a training has one, too.
    ended = trainer.train(resume_from_checkpoint=f"{args.folder}/checkpoint-{args.save_step}" if args.resume else None)

    if trainer.is_world_process_zero():
        logs = trainer.state.log_history
        losses = [entry["loss"] for entry in logs if "loss" in entry]
        bits = [entry["bits_per_parameter"] for entry in logs if "bits_per_parameter" in entry]
        protocol.write(args, model, losses, bits, ended.metrics["train_runtime"])


if __name__ == "__main__":
    main()
