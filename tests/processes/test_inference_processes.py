"""Inference over Gloo, from checkpoints that sharded and pipelined runs have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compression_cases import config, technique
from inference_ranks import SIZE, of_stages, serve_packed, train_and_serve, train_in_stages, windows
from ranks import run_torchrun
from train.model import build_model
from train.model_layers import build_layers

from onebit import zero
from onebit.zero.compression import export_compressed, init_compression, redundancy_clean
from onebit.zero.inference.initializing import distance


def test_two_processes_serve_what_they_trained_sharded(tmp_path: Path) -> None:
    ended = run_torchrun(2, train_and_serve, str(tmp_path)).check()
    first, second = ended.results
    model = build_model(SIZE, 0)
    model.load_state_dict(zero.read_checkpoint_weights(tmp_path))
    alone = zero.init_inference(model)
    answer: Any = alone.generate(windows()[:, :9], max_new_tokens=12)
    for found in (first, second):
        assert isinstance(found, dict) and found["tokens"] == answer.tolist()
        logits: Any = alone(windows())
        torch.testing.assert_close(torch.tensor(found["logits"]), logits, rtol=0, atol=1e-5)
        assert "is sharded" in found["refused"] and "checkpoint=" in found["refused"]
    assert not torch.equal(model.bytes.weight, build_model(SIZE, 0).bytes.weight)  # it was trained


def test_two_processes_serve_a_packed_file(tmp_path: Path) -> None:
    eight_bits = config(weight_quantization=technique(["."], {"start_bits": 8, "target_bits": 8}))
    model = redundancy_clean(init_compression(build_model(SIZE, 0), eight_bits), eight_bits)
    export_compressed(model, tmp_path / "small.safetensors")
    alone: Any = zero.init_inference(build_model(SIZE, 1), checkpoint=tmp_path / "small.safetensors")
    for found in run_torchrun(2, serve_packed, str(tmp_path / "small.safetensors")).check().results:
        assert isinstance(found, dict)
        assert found["tokens"] == alone.generate(windows()[:, :9], max_new_tokens=12).tolist()
        assert distance(alone(windows()), torch.tensor(found["logits"])) < 0.02
        assert found["held"] < 0.75 * alone.held_bytes  # the table of positions is whole on both


def test_a_pipelines_checkpoint_serves_under_the_gpts_names(tmp_path: Path) -> None:
    run_torchrun(2, train_in_stages, str(tmp_path)).check()
    weights = zero.read_checkpoint_weights(tmp_path)
    (whole,) = build_layers(SIZE, 0).stages([range(len(build_layers(SIZE, 0)))])
    whole.load_state_dict(weights)
    engine = zero.init_inference(of_stages(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(engine(windows()), whole(windows()), rtol=0, atol=1e-6)
    (answer,) = engine.generate([windows()[0, :5]], max_new_tokens=6)
    assert len(answer) == 11
