"""What the ranks of test_inference_pipeline_processes.py do: serve a Llama in stages over Gloo, and lose a rank."""

from __future__ import annotations

import os
import signal

import torch
import transformers
from torch import nn

from onebit import comm, zero
from onebit.comm import PeerError

PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [7], [9, 9, 2]]


def llama() -> nn.Module:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def serve() -> list[list[int]]:
    """The answers of a running batch on rank 0; of generate on the others."""
    transport = comm.init(timeout_s=120)
    engine = zero.init_inference(
        llama(), pipeline_parallel={"pp_size": transport.world_size}, max_out_tokens=64, transport=transport
    )
    answers = [tokens.tolist() for tokens in engine.generate(PROMPTS, max_new_tokens=8)]
    batch = zero.ContinuousBatch(engine, rows=3, chunk=8)
    if transport.rank != 0:
        batch.follow()
    else:
        requests = [batch.add(prompt, max_new_tokens=8) for prompt in PROMPTS]
        while batch.running or batch.waiting:
            batch.step()
        answers = [[*prompt, *request.tokens] for prompt, request in zip(PROMPTS, requests, strict=True)]
        batch.close()
    transport.close()
    return answers


def lose_one() -> str:
    """The last rank is killed while requests are answered; the error of the others."""
    transport = comm.init(timeout_s=120)
    engine = zero.init_inference(
        llama(), pipeline_parallel={"pp_size": transport.world_size}, max_out_tokens=64, transport=transport
    )
    batch = zero.ContinuousBatch(engine, rows=3)
    passes = 0

    def end_soon(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    if transport.rank == transport.world_size - 1:
        engine.module.get_submodule("model").register_forward_hook(end_soon)
    try:
        if transport.rank != 0:
            batch.follow()
        batch.add(PROMPTS[0], max_new_tokens=30)
        while batch.running or batch.waiting:
            batch.step()
    except PeerError as error:
        transport.abandon(str(error))
        return str(error)
    return "no error"
