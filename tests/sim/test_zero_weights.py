"""Weights to safetensors and back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from errors import error_of
from safetensors.torch import load_file
from torch import nn

from onebit.comm import SimTransport, run_ranks
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


class Overlapping(nn.Module):
    """Buffers in one memory: a table, the same again, a part of it, and its bits as integers."""

    def __init__(self, first: float) -> None:
        super().__init__()
        table = torch.arange(first, first + 8)
        self.weight = nn.Parameter(torch.ones(3))
        for name, x in {"table": table, "same": table, "part": table[2:5], "bits": table.view(torch.int32)}.items():
            self.register_buffer(name, x)


@pytest.mark.parametrize("max_file_bytes", [None, 1 << 20])
def test_tensors_that_share_memory_are_written_and_read_by_all_their_names(
    max_file_bytes: int | None, tmp_path: Path
) -> None:
    model, other, path = Overlapping(1.0), Overlapping(9.0), tmp_path / "model.safetensors"
    where = path if max_file_bytes is None else tmp_path
    export_weights(model, where, SimTransport(), max_file_bytes=max_file_bytes)
    files = list(tmp_path.glob("*.safetensors"))
    assert [load_file(file).keys() for file in files] == [{"weight", "table", "part", "bits"}]
    import_weights(other, where, SimTransport())
    for name, x in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], x), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tied_weights_are_written_once(dtype: torch.dtype | None, tmp_path: Path) -> None:
    export_weights(Tied(), tmp_path / "model.safetensors", SimTransport(), dtype)
    assert load_file(tmp_path / "model.safetensors").keys() == {"embed.weight", "count"}


class Counting(nn.Linear):
    """Its extra state is a dict, as torch allows."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 1}


@pytest.mark.parametrize("max_file_bytes", [None, 1 << 20])
def test_what_is_no_tensor_is_refused_on_all_ranks(max_file_bytes: int | None, tmp_path: Path) -> None:
    def export(transport: SimTransport) -> str:
        model = (Counting if transport.rank == 1 else nn.Linear)(3, 2)  # as of another pipeline stage
        return error_of(TypeError, export_weights, model, tmp_path / "a", transport, max_file_bytes=max_file_bytes)

    texts = run_ranks(2, export)
    assert texts[0] == texts[1] and "rank 1: a file of weights holds tensors, _extra_state is a dict" in texts[0]


def test_dtypes_are_converted_both_ways(tmp_path: Path) -> None:
    model, file = Tied(), tmp_path / "model.safetensors"
    export_weights(model, file, SimTransport(), torch.bfloat16)
    assert load_file(file)["embed.weight"].dtype == torch.bfloat16 and load_file(file)["count"].dtype == torch.int64
    other = Tied()
    import_weights(other, file, SimTransport())
    assert torch.equal(other.embed.weight, model.embed.weight.bfloat16().float())
    with pytest.raises(
        TypeError, match=r"floating-point dtype, as torch.bfloat16, got torch.int8; .*export_compressed"
    ):
        export_weights(model, file, SimTransport(), torch.int8)


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
