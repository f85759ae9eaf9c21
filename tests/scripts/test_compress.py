"""The command that compresses a model, on digits and with fewer layers, for a few steps."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import compress
import pytest
from compression_cases import technique
from study.tasks import ByteLM

HALF, EVERY = {"dense_ratio": 0.5}, {"start_bits": 4, "target_bits": 4}
DIGITS = {
    "weight_quantization": technique(["*"], EVERY, quantize_groups=1),
    "sparse_pruning": technique(["^0$", "^2$"], HALF, method="topk"),
    "row_pruning": technique(["^0$", "^2$"], HALF, [["^2$"], ["^4$"]], method="topk"),
    "activation_quantization": technique(["*"], {"bits": 8}, quantization_type="asymmetric"),
}
LAYERS = {
    "enabled": True, "module_name_prefix": "blocks", "teacher_layer": [1], "keep_number_layer": 1,
    "other_module_name": ["bytes", "positions", "norm"],
}  # fmt: skip


@pytest.mark.slow
def test_the_command_ends_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "ds.json", tmp_path / "runs" / "small.safetensors"
    config.write_text(json.dumps({"compression_training": DIGITS}))
    words = ["--task", "digits", "--config", str(config), "--out", str(out)]
    compress.main([*words, "--steps", "20", "--more-steps", "5", "--distill"])
    said = capsys.readouterr().out
    assert "read from" in said and f"{out.stat().st_size:,}" in said and "8,970" in said
    assert [path.name for path in out.parent.iterdir()] == ["small.safetensors"]


@pytest.mark.slow
def test_a_cleaned_model_and_its_file_have_the_loss_that_was_trained(tmp_path: Path) -> None:
    """Cleaning is exact in float64; in float32 a smaller matrix is summed in another order."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"compression_training": DIGITS}))
    asked = Namespace(config=config, out=tmp_path / "out", task="digits", seed=0, steps=20, more_steps=6)
    dense, _, trained, cleaned, back = compress.compress(Namespace(**vars(asked), distill=False, threads=1))
    assert [cleaned.loss, back.loss] == pytest.approx([trained.loss] * 2, rel=1e-4)
    assert dense.file_bytes > 100_000 and back.file_bytes < 10_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "No such file or directory"), ("{", "not JSON"), ("{}", 'has no block "compression_training"')],
)
def test_a_configuration_that_cannot_be_read_ends_in_one_line(
    text: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    if text is not None:
        config.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        compress.main(["--config", str(config), "--out", str(tmp_path / "small.safetensors")])
    assert f"error: --config {config}: " in (said := capsys.readouterr().err) and reason in said


def test_a_student_may_have_fewer_layers() -> None:
    dense = ByteLM().build(0)
    student = compress.student_of(dense, {"layer_reduction": LAYERS})
    assert compress.is_armed(student) and (len(dense.blocks), len(student.blocks)) == (2, 1)
    assert len(compress.plain_of(dense, {"layer_reduction": LAYERS}).blocks) == 1
