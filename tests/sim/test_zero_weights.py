"""Weights to safetensors and back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from onebit.comm import SimTransport
from onebit.zero.checkpoint.exporting import export_weights
from onebit.zero.checkpoint.importing import import_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


def test_what_is_written_is_read_tied_weights_and_buffers_too(tmp_path: Path) -> None:
    model, file = Tied(), tmp_path / "model.safetensors"
    export_weights(model, file, SimTransport())
    assert load_file(file).keys() == {"embed.weight", "count"}
    other = Tied()
    other.count.zero_()
    import_weights(other, file, SimTransport())
    assert torch.equal(other.head.weight, model.embed.weight) and other.head.weight is other.embed.weight
    assert int(other.count) == 3 and sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]


def test_dtypes_are_converted_both_ways(tmp_path: Path) -> None:
    model, file = Tied(), tmp_path / "model.safetensors"
    export_weights(model, file, SimTransport(), torch.bfloat16)
    assert load_file(file)["embed.weight"].dtype == torch.bfloat16 and load_file(file)["count"].dtype == torch.int64
    other = Tied()
    import_weights(other, file, SimTransport())
    assert torch.equal(other.embed.weight, model.embed.weight.bfloat16().float())


def test_another_model_or_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    export_weights(nn.Linear(3, 2), file, SimTransport())
    wide, other = nn.Linear(4, 2), nn.LayerNorm(3, bias=False)
    before = wide.weight.clone()
    with pytest.raises(ValueError, match=r"weight has shape \(2, 3\) there and \(2, 4\) here"):
        import_weights(wide, file, SimTransport())
    with pytest.raises(ValueError, match="the model has no bias"):
        import_weights(other, file, SimTransport())
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"rank 0: .* cannot be read"):
        import_weights(wide, file, SimTransport())
    with pytest.raises(OSError, match="cannot be written"):
        export_weights(wide, file / "in a file", SimTransport())
    assert torch.equal(wide.weight, before)


def test_no_flipped_bit_changes_a_weight(tmp_path: Path) -> None:
    model, other, file = Tied(), Tied(), tmp_path / "model.safetensors"
    export_weights(model, file, SimTransport())
    content, refused = file.read_bytes(), 0
    for place in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        before = other.embed.weight.clone()
        try:
            import_weights(other, file, SimTransport())
        except ValueError as error:
            assert "rank 0: " in str(error) or "of another model" in str(error)
            assert torch.equal(other.embed.weight, before)
            refused += 1
        else:
            assert torch.equal(other.embed.weight, model.embed.weight) and int(other.count) == 3
    assert refused > 0.3 * len(content)


def test_a_full_disk_leaves_the_older_file_alone_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = Tied(), tmp_path / "model.safetensors"
    export_weights(model, file, SimTransport())
    content = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"rank 0: .*model.safetensors cannot be written: No space left on device"):
        export_weights(Tied(), file, SimTransport())
    assert file.read_bytes() == content and [path.name for path in tmp_path.iterdir()] == [file.name]
