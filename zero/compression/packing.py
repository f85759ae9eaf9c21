"""A compressed model as one safetensors file, and back: codes instead of quantized weights, bits instead of zeros.

For a weight W in the file's JSON (metadata "onebit.compression"):

    quantized       W.codes (a stream of bits), W.scale [I, J], W.zero [I, J] if there are zero points
    with zeros      W.kept (a bit for each element), and codes or values of kept elements only, if that is smaller
    anything else   W as it is

Values are computed from codes as in training: the same bits come back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.files import reason
from ...comm import Transport
from ...comm.messages import raise_on_all_ranks
from ..checkpoint import weights as files
from .armed import activation_of, armed_in
from .cleaning import Cleaned, cleaned_in, mark_cleaned
from .matrices import Form
from .quantizers import Code, Grid, Scales, pack_bits, unpack_bits
from .techniques import ActivationQuantization, quantize_inputs

_HEADER = "onebit.compression"
_VERSION = 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    Attributes:
        parameters: Number of parameters.
        nonzero: Parameters that are not zero.
        memory_bytes: Bytes in memory.
        packed_bytes: Bytes in a file of `export_compressed`, without its header.
    """

    parameters: int
    nonzero: int
    memory_bytes: int
    packed_bytes: int


def sizes(model: nn.Module) -> Sizes:
    """Sizes of a model with or without compression; shared parameters count once.

    Args:
        model: The model.
    """
    params = list(model.parameters())
    tensors, _ = pack(model)
    return Sizes(
        sum(p.numel() for p in params),
        sum(int(p.detach().count_nonzero()) for p in params),
        sum(p.numel() * p.element_size() for p in params),
        sum(x.numel() * x.element_size() for x in tensors.values()),
    )


def export_compressed(model: nn.Module, file: str | os.PathLike[str], transport: Transport | None = None) -> int:
    """Write a model after `redundancy_clean` to one safetensors file, packed, and return the file's bytes.

    Args:
        model: The model.
        file: File to write.
        transport: If given, all ranks call, and rank 0 writes. Default None: this process writes.

    Raises:
        ValueError: The model was not cleaned, or a quantized weight has changed since.
        ImportError: safetensors is not installed.
        OSError: The file cannot be written. On all ranks.
    """
    if armed_in(model) is not None:
        raise ValueError("the model's compression is not permanent yet: call redundancy_clean(model, config) first")
    files.check_can_export()
    path, problem = Path(file), None
    tensors, about = pack(model)
    if transport is None or transport.rank == 0:
        try:
            files.write_weights(path, tensors, {_HEADER: json.dumps(about)})
        except (OSError, files.error_of_safetensors()) as error:
            problem = f"rank 0: {path} cannot be written: {reason(error)}"
    if transport is not None:
        raise_on_all_ranks(transport, problem, OSError)
    elif problem is not None:
        raise OSError(problem)
    return path.stat().st_size if path.exists() else 0


@torch.no_grad()
def pack(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, their description as JSON). Raises ValueError if a quantized weight has changed."""
    cleaned, tensors, packed = cleaned_in(model), dict[str, Tensor](), dict[str, Any]()
    first: dict[int, str] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(x), name) != name:
            continue  # tied: under the first of its names
        x = x.detach().cpu()
        if name in cleaned.scales:
            parts, packed[name] = _quantized(name, x, *cleaned.scales[name])
        elif name in cleaned.pruned and (found := _sparse(x)) is not None:
            parts, packed[name] = found
        else:
            parts = {"": x}
        tensors |= {f"{name}{suffix}": part for suffix, part in parts.items()}
    about = {
        "version": _VERSION,
        "packed": packed,
        "sizes": cleaned.sizes,
        "pruned": sorted(cleaned.pruned),
        "activations": {
            name: {"bits": a.bits, "kind": a.kind, "is_static": a.is_static}
            for name, module in model.named_modules()
            if (a := activation_of(module)) is not None
        },
    }
    return tensors, about


def _quantized(name: str, x: Tensor, form: Form, scales: Scales) -> tuple[dict[str, Tensor], dict[str, Any]]:
    scales = _on_cpu(scales)
    matrix_RC = form.matrix(x).float()
    level_RC = scales.levels(matrix_RC)
    kept_RC = matrix_RC != 0
    if not torch.equal(torch.where(kept_RC, scales.values(level_RC).to(x.dtype).float(), 0.0), matrix_RC):
        raise ValueError(
            f"{name} has changed since it was cleaned, so its codes do not fit any more; export it before you continue "
            "training, or write it unpacked with onebit.zero.export_weights"
        )
    about: dict[str, Any] = {
        "kind": scales.code.kind,
        "bits": scales.code.bits,
        "rows": _runs(scales.grid.rows),
        "columns": _runs(scales.grid.columns),
    } | _about(x, form)
    parts = {".scale": scales.scale_IJ}
    if scales.zero_IJ is not None:
        parts[".zero"] = scales.zero_IJ.to(torch.int32)
    codes, bits = scales.encode(level_RC), scales.code.bits
    left, everything = int(kept_RC.sum()), kept_RC.numel()
    if left < everything and (not scales.code.has_zero or left * bits + everything < everything * bits):
        parts |= {".kept": pack_bits(kept_RC, 1), ".codes": pack_bits(codes[kept_RC], bits)}
        about["kept"] = left
    else:
        parts[".codes"] = pack_bits(codes, bits)
    return parts, about


def _sparse(x: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The kept elements and their positions; None: the tensor is smaller unpacked."""
    kept = x != 0
    left = int(kept.sum())
    if left * x.element_size() + -(-x.numel() // 8) >= x.numel() * x.element_size():
        return None
    about = _about(x, Form(tuple(x.shape))) | {"kept": left}
    return {".kept": pack_bits(kept, 1), ".values": x[kept]}, about


def _about(x: Tensor, form: Form) -> dict[str, Any]:
    return {
        "shape": list(x.shape),
        "dtype": str(x.dtype).removeprefix("torch."),
        "is_transposed": form.is_transposed,
    }


def _runs(sizes: tuple[int, ...]) -> list[list[int]]:
    """Run lengths: [size, number of consecutive ones], ..."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return runs


def _on_cpu(scales: Scales) -> Scales:
    zero = scales.zero_IJ
    return Scales(scales.code, scales.grid, scales.scale_IJ.cpu(), None if zero is None else zero.cpu())


# ---------------------------------------------------------------- back


@torch.no_grad()
def is_compressed(file: Path) -> bool:
    """Whether a file is one of `export_compressed`. Of one that cannot be read it is not known: no."""
    if file.suffix != ".safetensors" or not file.is_file():
        return False
    try:
        return _HEADER in files.read_about(file)
    except Exception:  # safetensors' own; whoever reads the file says what is wrong with it
        return False


@dataclass(frozen=True)
class Codes:
    """A quantized weight as in a file.

    Attributes:
        form: Its storage in the model.
        scales: Of its tiles.
        dtype: Of its values.
        stream: The codes of the kept elements, in bits.
        kept: A bit for each element; None: all are kept.
        left: How many are kept.
    """

    form: Form
    scales: Scales
    dtype: torch.dtype
    stream: Tensor
    kept: Tensor | None
    left: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.form.shape

    def levels(self) -> Tensor:
        """Signed levels, int16 or int32 [R, C]; 0 for what is not kept."""
        R, C, bits = self.form.rows, self.form.columns, self.scales.code.bits
        codes = unpack_bits(self.stream, bits, self.left)
        if self.kept is None:
            return self.scales.decode(codes.view(R, C))
        kept_RC = unpack_bits(self.kept, 1, R * C).view(R, C).bool()
        level_RC = self.scales.decode(codes.new_zeros(R, C).masked_scatter_(kept_RC, codes))
        return level_RC.masked_fill_(~kept_RC, 0)

    def weight(self) -> Tensor:
        """The weight in its dtype: the bits that training has seen."""
        return self.form.weight(self.scales.values(self.levels())).to(self.dtype).contiguous()


@dataclass(frozen=True)
class Compressed:
    """What a file of `export_compressed` holds: weights by name, whole or as codes, and what its JSON says.

    Attributes:
        path: The file.
        weights: By name.
        about: Versions, sizes of cut modules, pruned weights and quantized inputs.
    """

    path: Path
    weights: Mapping[str, Tensor | Codes]
    about: Mapping[str, Any]

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if the file is damaged or of another model."""
        try:
            _check_fits(model, self.weights, self.about, self.path)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is damaged: the description of its tensors: {reason(error)}") from error

    @torch.no_grad()
    def put(self, model: nn.Module, *, but: Collection[str] = ()) -> None:
        """Set sizes, quantized inputs, parameters and buffers of a plain model, in place.

        Args:
            model: The model as it was built before compression.
            but: Names of weights that the caller puts.

        Raises:
            ValueError: The file is damaged or of another model. Nothing has changed.
        """
        self.check(model)
        left = {name: x for name, x in self.weights.items() if name not in but}
        whole = {name: self._whole(name) for name in left}
        scales = {name: (x.form, x.scales) for name, x in left.items() if isinstance(x, Codes)}
        cleaned = Cleaned(scales, self.about["sizes"], set(self.about["pruned"]))
        for name, numbers in cleaned.sizes.items():
            for attribute, number in numbers.items():
                setattr(model.get_submodule(name), attribute, number)
        for name, a in self.about["activations"].items():
            module = model.get_submodule(name)
            device = _device(next(module.parameters()))
            quantize_inputs(
                module, ActivationQuantization(a["bits"], a["kind"], is_static=a["is_static"], device=device)
            )
        _put(model, whole)
        mark_cleaned(model, cleaned)

    def _whole(self, name: str) -> Tensor:
        try:
            return x.weight() if isinstance(x := self.weights[name], Codes) else x
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{self.path} is damaged at {name}: {error}") from error


def read_compressed(file: str | os.PathLike[str]) -> Compressed:
    """Read a file of `export_compressed`; its codes stay as they are. Each rank reads the file.

    Args:
        file: The file.

    Raises:
        ValueError: The file is damaged, or another one's.
        ImportError: safetensors is not installed.
    """
    files.check_can_export()
    path = Path(file)
    try:
        header, tensors = files.read_about(path).get(_HEADER), files.read_weights(path)
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if header is None:
        raise ValueError(f"{path} is no file of export_compressed; read it with onebit.zero.import_weights")
    try:
        about = json.loads(header)
        if about["version"] != _VERSION:
            raise ValueError(f"{path} has version {about['version']}, this package reads {_VERSION}")
        return Compressed(path, _weights(tensors, about, path), about)
    except (AttributeError, KeyError, RuntimeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: the description of its tensors: {reason(error)}") from error


def import_compressed(model: nn.Module, file: str | os.PathLike[str]) -> nn.Module:
    """Read a file of `export_compressed` into a plain model, in place, and return the model. Each rank reads the file.

    Args:
        model: The model as it was built before compression, with the same number of layers; its modules shrink to the
            sizes in the file.
        file: The file.

    Raises:
        ValueError: The file is damaged or of another model. Nothing has changed.
        ImportError: safetensors is not installed.
    """
    read_compressed(file).put(model)
    return model


def _weights(tensors: Mapping[str, Tensor], about: Mapping[str, Any], path: Path) -> dict[str, Tensor | Codes]:
    """Whole tensors and codes by name."""
    rest, found = dict(tensors), dict[str, Tensor | Codes]()
    for name, said in about["packed"].items():
        shape, dtype = tuple(said["shape"]), getattr(torch, said["dtype"])
        n = torch.Size(shape).numel()
        try:
            kept, left = rest.pop(f"{name}.kept") if "kept" in said else None, said.get("kept", n)
            if "bits" not in said:
                assert kept is not None
                values, zeros = rest.pop(f"{name}.values"), torch.zeros(n, dtype=dtype, device="cpu")
                found[name] = zeros.masked_scatter_(unpack_bits(kept, 1, n).bool(), values).view(shape)
                continue
            form = Form(shape, said["is_transposed"])
            rows, columns = (
                tuple(size for size, times in said[side] for _ in range(times)) for side in ("rows", "columns")
            )
            zero = rest.pop(f"{name}.zero").float() if f"{name}.zero" in rest else None
            scales = Scales(Code(said["kind"], said["bits"]), Grid(rows, columns), rest.pop(f"{name}.scale"), zero)
            _check_tiles(scales, form)
            found[name] = Codes(form, scales, dtype, rest.pop(f"{name}.codes"), kept, left)
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path} is damaged at {name}: {error}") from error
    return rest | found


def _check_tiles(scales: Scales, form: Form) -> None:
    """Raise ValueError if the tiles are not of this form, or have not a scale each."""
    grid, tiles = scales.grid, tuple(scales.scale_IJ.shape)
    if (sum(grid.rows), sum(grid.columns)) != (form.rows, form.columns) or tiles != (len(grid.rows), len(grid.columns)):
        raise ValueError(
            f"tiles of {sum(grid.rows)} rows and {sum(grid.columns)} columns with {tiles} scales, of a weight of "
            f"{form.rows} and {form.columns}"
        )


def _check_fits(model: nn.Module, whole: Mapping[str, Tensor | Codes], about: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError if names differ, or shapes of modules that were not cut."""
    own, tied = model.state_dict(), files.tied(model)
    for name in about["sizes"].keys() | about["activations"].keys():
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(f"{path} is of another model: there is no module {name}") from error
        for attribute, number in about["sizes"].get(name, {}).items():
            if type(number) is not int or type(getattr(module, attribute, None)) is not int:
                raise ValueError(f"{path} is of another model: {name} has no size {attribute} that could be {number!r}")
    added = {f"{name}.activation_quantization.{end}" for name in about["activations"] for end in ("low", "high")}
    for name in sorted((whole.keys() - added) ^ own.keys()):
        if name in whole or tied.get(name) not in whole:
            where = "the model has no" if name in whole else "the file has no"
            raise ValueError(f"{path} is of another model: {where} {name}")
    for name, x in own.items():
        if (
            name in whole
            and tuple(whole[name].shape) != tuple(x.shape)
            and name.rpartition(".")[0] not in about["sizes"]
        ):
            shapes = f"shape {tuple(whole[name].shape)} there and {tuple(x.shape)} here"
            raise ValueError(f"{path} is of another model: {name} has {shapes}")


def _put(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Set the model's parameters and buffers, on its devices and with its ties; dtypes are the file's."""
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, p in list(module._parameters.items()):
            name = f"{prefix}.{own}" if prefix else own
            if p is None:
                continue
            if id(p) not in made and name in whole:
                made[id(p)] = nn.Parameter(whole[name].to(_device(p)), requires_grad=p.requires_grad)
            if id(p) in made:
                module._parameters[own] = made[id(p)]
        for own, x in list(module._buffers.items()):
            name = f"{prefix}.{own}" if prefix else own
            if x is not None and name in whole:
                module._buffers[own] = whole[name].to(_device(x))


def _device(x: Tensor) -> torch.device:
    """Where a tensor is to be that takes the place of this one: a model on "meta" gets its weights in host memory."""
    return torch.device("cpu") if x.is_meta else x.device
