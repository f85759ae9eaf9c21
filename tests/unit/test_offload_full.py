"""`Offload(mode="full")`: parameters that come when they are used, whoever uses them, train as resident ones do."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from errors import refused
from family import same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from onebit import zero
from onebit.comm import SimTransport, torch_versions
from onebit.zero import Offload
from onebit.zero.offload import StoreError, files
from onebit.zero.offload.parameter import StoredParameter, plain
from onebit.zero.offload.reader import Reader
from onebit.zero.offload.store import PAGE
from onebit.zero.offload.stored_params import StoredParams, vacate

WIDTH = 16


class Tied(nn.Module):
    """An embedding that is the head as well, used outside of its module's forward."""

    def __init__(self, is_shared: bool = False) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False) if is_shared else None
        if self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(x[:, 0].abs().mul(5).long().clamp(max=19)))
        return self.head(hidden) if self.head is not None else F.linear(hidden, self.embedding.weight)


class Twice(nn.Module):
    """A layer that is called twice, in-place activations between, and another that is not called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu_(self.layer(x)))


class Checkpointed(nn.Module):
    """Layers under torch's checkpointing."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Frozen(nn.Module):
    """A base that is not trained, in 16 bits, with an adapter: LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).bfloat16()
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.down(x)) + x
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


@dataclass
class Output:
    hidden: Tensor
    penalty: Tensor


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad * ctx.scale, (grad * x).sum(0)


class Odd(nn.Module):
    """Parameters returned as they are, used by a Function, by a penalty, in a view, in an output that is no tensor."""

    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, WIDTH))

        def forward(self) -> Tensor:
            return self.table

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Output:
            view = self.weight[: WIDTH // 2].t()
            half = Scale.apply(x, self.scale) @ view
            return Output(torch.cat([half, x @ view], 1), self.weight.pow(2).mean())

    def __init__(self) -> None:
        super().__init__()
        self.position, self.inner, self.last = self.Position(), self.Inner(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x + self.position())
        penalty = sum(p.abs().mean() for p in self.parameters())
        return self.last.forward(found.hidden) + found.penalty + penalty


class Attention(nn.Module):
    """torch's own layers whose modules use each other's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = x[None] + self.attention(x[None], x[None], x[None])[0]
        return self.normed(self.recurrent(x)[0])[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "one parameter in two modules": lambda: Tied(is_shared=True),
    "twice": Twice,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(use_reentrant=True),
    "frozen": Frozen,
    "odd": Odd,
    "attention": Attention,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    """Losses of training and evaluation, then all parameters."""
    found = []
    for step in range(steps):
        for micro in range(2):
            loss = model(batch(2 * step + micro)).square().mean()
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(batch(9)).sum())
    return found + [p.detach().clone() for p in model.parameters()]


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)  # type: ignore[arg-type]


def full(model: nn.Module, to: object = "cpu", **options: object) -> Offload:
    return Offload(model, adamw, "full", to, **{"chunk_mb": 0.05, **options})  # type: ignore[arg-type]


def params_of(offload: Offload) -> StoredParams:
    return offload._weights.params  # type: ignore[union-attr,return-value]


def away(offload: Offload) -> bool:
    params_of(offload).sync()
    gc.collect()
    params_of(offload).sync()
    return all(s.storage.nbytes() == 0 for s in params_of(offload).all)


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "in_files"), [(name, k % 2 == 0) for k, name in enumerate(MODELS)])
    def test_is_resident_training(self, name: str, in_files: bool, tmp_path: Path) -> None:
        """test_offload_streams.py has each in both places."""
        resident = made(name)
        expected = train(resident, adamw([p for p in resident.parameters() if p.requires_grad]))
        model = made(name)
        offload = full(model, tmp_path if in_files else "cpu")
        assert same(train(model, offload), expected)
        assert away(offload)
        offload.close()
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert same([p.detach() for p in model.parameters()], expected[-len(list(model.parameters())) :])
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    @pytest.mark.slow
    def test_a_language_model_of_transformers(self, tmp_path: Path) -> None:
        """Tied weights, its own checkpointing, `generate` and `save_pretrained`."""
        gpt2 = pytest.importorskip("transformers").GPT2LMHeadModel

        def small() -> nn.Module:
            torch.manual_seed(0)
            sizes = {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "vocab_size": 50, "n_positions": 16}
            special = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = gpt2(gpt2.config_class(**sizes, **special))
            model.gradient_checkpointing_enable()
            return model

        def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
            for step in range(2):
                tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(step))
                model(tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            generated = model.eval().generate(tokens[:1, :3], max_new_tokens=2, do_sample=False)
            return [generated, *(p.detach().clone() for p in model.parameters())]

        expected = trained(resident := small(), adamw(resident.parameters()))
        offload = full(model := small(), tmp_path)
        assert same(trained(model, offload), expected)
        model.save_pretrained(tmp_path / "saved")
        assert same([p.detach() for p in gpt2.from_pretrained(tmp_path / "saved").parameters()], expected[1:])

    @pytest.mark.parametrize("buffer_count", [2, 3, 8])
    def test_does_not_depend_on_buffers(self, buffer_count: int, tmp_path: Path) -> None:
        expected = train(resident := made("checkpoint"), adamw(resident.parameters()))
        offload = full(model := made("checkpoint"), tmp_path, buffer_count=buffer_count, chunk_mb=0.001)
        assert same(train(model, offload), expected)

    def test_has_few_parameters_at_a_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())])
        offload = full(model, tmp_path)
        most, fill, params = 0, Reader._fill, params_of(offload)

        def counted(self: Reader, *args: object) -> None:
            nonlocal most
            fill(self, *args)  # type: ignore[arg-type]
            most = max(most, sum(s.storage.nbytes() for s in params.all))

        monkeypatch.setattr(Reader, "_fill", counted)
        for _ in range(2):
            model(torch.randn(2, 64)).sum().backward()
            offload.step()
        assert 0 < most <= 4 * (64 * 64 + 64)  # one layer of six

    def test_what_came_next_is_read_ahead(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)])
        params = params_of(offload := full(model, tmp_path))
        train_step = lambda: model(torch.randn(2, 32)).sum().backward()  # noqa: E731
        for _ in range(2):
            train_step()
            offload.step()
        model[0](torch.randn(2, 32))
        ahead = {place.stored.name for load in params._reader._ahead for place in load.slices}
        assert ahead == {"1.weight", "1.bias", "2.weight", "2.bias"}

    def test_an_error_in_forward_leaves_nothing_open(self) -> None:
        expected = train(resident := made("twice"), adamw(resident.parameters()))
        offload = full(model := made("twice"))
        refused(RuntimeError, "shapes cannot be multiplied", model, torch.randn(4, WIDTH + 1))
        assert away(offload)
        assert torch_versions.hooks_in_use() is None
        assert same(train(model, offload), expected)


@pytest.fixture
def pair() -> Iterator[tuple[nn.Module, Offload]]:
    model = made("twice")
    offload = full(model)
    yield model, offload
    offload.close()


class TestUses:
    """Of parameters outside of training: a right result, or an error that says what to do."""

    def test_values_outlive_their_parameter(self, pair: tuple[nn.Module, Offload]) -> None:
        model, offload = pair
        held = model.layer.weight.detach()
        before = held.clone()
        train(model, offload, 1)
        assert not torch.equal(held, before)  # as with resident ones, they see the step
        assert torch.equal(held, model.layer.weight)
        del held
        assert away(offload)

    def test_gradients_that_are_written_by_hand(self, pair: tuple[nn.Module, Offload]) -> None:
        model, offload = pair
        twin = copy.deepcopy(model)
        optimizer = adamw(twin.parameters())
        for each, steps in ((model, offload), (twin, optimizer)):
            each.layer.weight.grad = torch.ones(WIDTH, WIDTH)
            steps.step()
        assert torch.equal(model.layer.weight, twin.layer.weight)

    def test_arrays_see_the_step_and_keep_their_parameter(self, pair: tuple[nn.Module, Offload]) -> None:
        model, offload = pair
        before = (array := model.layer.bias.detach().numpy()).copy()
        train(model, offload, 1)
        assert (array != before).any() and (array == model.layer.bias.detach().numpy()).all()
        del array
        assert not away(offload)

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["copy_", "data", "data =", "numpy", "init", "load_state_dict"])
    def test_writes_last(self, how: str, pair: tuple[nn.Module, Offload]) -> None:
        model, offload = pair
        p, values = model.layer.weight, torch.arange(WIDTH * WIDTH).float().view(WIDTH, WIDTH)
        with torch.no_grad():
            if how == "copy_":
                p.copy_(values)
            elif how == "data":
                p.data[:] = values
            elif how == "data =":
                p.data = values
            elif how == "numpy":
                p.detach().numpy()[:] = values.numpy()
            elif how == "init":
                nn.init.constant_(p, 3.0)
                values.fill_(3.0)
            else:
                model.load_state_dict(model.state_dict() | {"layer.weight": values})
        assert away(offload) or how == "numpy"
        assert torch.equal(p, values)

    def test_a_state_dict_is_the_stores_own(self, tmp_path: Path) -> None:
        expected = train(resident := made("frozen"), adamw([p for p in resident.parameters() if p.requires_grad]))
        offload = full(model := made("frozen"), tmp_path)
        train(model, offload)
        state = model.state_dict()
        assert all(s.storage.nbytes() == 0 for s in params_of(offload).all)  # nothing had to come
        assert same([*state.values()], expected[-len(state) :])
        torch.save({"model": state, "optimizer": offload.state_dict()}, file := io.BytesIO())
        file.seek(0)
        saved = torch.load(file)
        second = full(other := made("frozen"))
        second.load_state_dict(saved["optimizer"])
        other.load_state_dict(saved["model"])
        assert same(train(other, second), train(model, offload))

    def test_a_deep_copy_is_resident(self, pair: tuple[nn.Module, Offload]) -> None:
        model, offload = pair
        twin = copy.deepcopy(model)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        assert torch.equal(twin(batch(0)), model(batch(0)))
        train(model, offload, 1)
        assert not torch.equal(twin(batch(0)), model(batch(0)))

    def test_gradients_of_gradients(self, pair: tuple[nn.Module, Offload]) -> None:
        model, _ = pair
        twin = copy.deepcopy(model)
        found = []
        for each in (model, twin):
            x = batch(0).requires_grad_()
            (first,) = torch.autograd.grad(torch.tanh(each(x)).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), each.layer.weight)[0])
        assert torch.equal(*found)

    def test_shapes_need_no_values(self, pair: tuple[nn.Module, Offload]) -> None:
        model, offload = pair
        assert away(offload)
        p = model.layer.weight
        assert isinstance(p, StoredParameter) and isinstance(p, nn.Parameter)
        facts = p.shape, p.size(), p.numel(), p.dtype, p.device, p.grad, p.requires_grad, p.dim(), p.stride(), len(p)
        assert facts[2] == WIDTH * WIDTH
        assert all(s.storage.nbytes() == 0 for s in params_of(offload).all)


class TestErrors:
    def test_backward_behind_the_step(self, pair: tuple[nn.Module, Offload]) -> None:
        model, offload = pair
        model(batch(0)).sum().backward()
        late = model(batch(1)).sum()
        offload.step()
        refused(RuntimeError, r"layer.weight has been changed, .* call backward before step", late.backward)

    def test_an_activation_written_in_place(self, pair: tuple[nn.Module, Offload]) -> None:
        model, _ = pair
        hidden = model.layer(batch(0))
        loss = model.layer(hidden).sum()
        with torch.no_grad():
            hidden.zero_()
        refused(RuntimeError, "modified by an inplace operation", loss.backward)

    def test_other_dtypes_afterwards(self, pair: tuple[nn.Module, Offload]) -> None:
        refused(RuntimeError, "cast and move the model before Offload", pair[0].bfloat16)

    def test_another_parameter_afterwards(self, pair: tuple[nn.Module, Offload]) -> None:
        model, _ = pair
        model.layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        refused(RuntimeError, "weight of Linear is another parameter", model, batch(0))

    def test_parameters_alone(self) -> None:
        with pytest.raises(TypeError, match=r"expected the nn.Module, got list"):
            full([nn.Parameter(torch.zeros(1))])  # type: ignore[arg-type]

    def test_parameters_that_share_memory(self) -> None:
        model = made("twice")
        model.unused.weight = nn.Parameter(model.layer.weight.detach()[:3])
        refused(ValueError, "share memory; make them one Parameter", full, model)

    @pytest.mark.parametrize("use", ["forward", "value", "state_dict"])
    def test_parameters_that_were_left_behind(self, use: str, tmp_path: Path) -> None:
        offload = full(model := made("twice"), tmp_path)
        offload.close(bring_back=False)
        with pytest.raises(RuntimeError, match=r"layer\.\w+ was left in the store of an Offload that is closed; save"):
            {"forward": lambda: model(batch(0)), "value": model.layer.weight.sum, "state_dict": model.state_dict}[use]()

    def test_two_at_once(self, pair: tuple[nn.Module, Offload]) -> None:
        refused(TypeError, "close the other Offload first", full, pair[0])


class TestDisk:
    """What a disk does to a run: an error that names it, and a model that is as it was, or is not used any more."""

    @pytest.mark.parametrize("fails", [1, 2, 3])
    def test_without_room_the_model_stays(self, fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reserve, calls = files.reserve, 0

        def full_at_last(fd: int, nbytes: int) -> None:
            nonlocal calls
            calls += 1
            if calls == fails:
                raise OSError(errno.ENOSPC, "No space left on device")
            reserve(fd, nbytes)

        monkeypatch.setattr(files, "reserve", full_at_last)
        expected = train(resident := made("twice"), adamw(resident.parameters()))
        with pytest.raises(StoreError, match=r"is full: .* free some, or name a folder on another disk"):
            full(model := made("twice"), tmp_path)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert same(train(model, adamw(model.parameters())), expected)

    @pytest.mark.parametrize("when", ["forward", "backward"])
    def test_parameters_cut_short_are_named(self, when: str, tmp_path: Path) -> None:
        offload = full(model := made("twice"), tmp_path)
        loss = model(batch(0)).sum() if when == "backward" else None
        assert away(offload)
        os.ftruncate(params_of(offload).store._fd, PAGE)  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match="cut short below this run; start again from the last checkpoint"):
            model(batch(0)) if loss is None else loss.backward()


class TestMeta:
    """Models without values, which get them in the store."""

    @pytest.mark.parametrize("in_files", [False, True])
    def test_is_filled_from_files(self, in_files: bool, tmp_path: Path) -> None:
        pytest.importorskip("safetensors")
        source = made("frozen")
        zero.export_weights(source, tmp_path / "weights", SimTransport(), max_file_bytes=1000)
        expected = train(source, adamw([p for p in source.parameters() if p.requires_grad]))
        with torch.device("meta"):
            model = made("frozen")
        fill = lambda empty: zero.materialize(empty, tmp_path / "weights")  # noqa: E731
        offload = full(model, tmp_path if in_files else "cpu", fill=fill)
        assert same(train(model, offload), expected)
        offload.close()

    def test_has_few_values_at_a_time_while_it_is_filled(self, tmp_path: Path) -> None:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
        most = 0

        def fill(empty: nn.Module) -> None:
            nonlocal most
            for p in empty.parameters():
                with torch.no_grad():
                    p.fill_(2.0)
                most = max(most, sum(q.untyped_storage().nbytes() for q in resident(empty)))

        def resident(empty: nn.Module) -> list[Tensor]:
            with plain():
                return [q for q in empty.parameters() if q.untyped_storage().nbytes()]

        offload = full(model, tmp_path, fill=fill)
        assert most == 4 * 64 * 64  # one layer of six
        assert all((p == 2.0).all() for p in model.parameters())
        offload.close()

    def test_masters_are_of_the_filled_values(self) -> None:
        with torch.device("meta"):
            model = nn.Linear(WIDTH, WIDTH).bfloat16()
        offload = full(model, fill=lambda empty: zero.materialize(empty, "reset_parameters"))
        twin = zero.materialize(nn.Linear(WIDTH, WIDTH, device="meta").bfloat16(), "reset_parameters")
        state = Offload(twin, adamw, "state")
        for each, optimizer in ((model, offload), (twin, state)):
            each(batch(0).bfloat16()).sum().backward()
            optimizer.step()
        assert same([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])
        shown = [entry["master"] for entry in offload.state_dict()["state"].values()]
        assert same(shown, [entry["master"] for entry in state.state_dict()["state"].values()])

    def test_what_is_not_filled_is_named(self) -> None:
        with torch.device("meta"):
            model = made("twice")

        def fill(empty: nn.Module) -> None:
            nn.init.zeros_(empty.layer.weight)

        refused(ValueError, r"layer.bias was on meta and fill\(\) has not written it", full, model, fill=fill)

    def test_no_values_and_no_fill(self) -> None:
        with torch.device("meta"):
            model = made("twice")
        refused(TypeError, "expected floats with values", full, model)

    @pytest.mark.parametrize("name", ["device", "fill"])
    def test_other_modes_leave_parameters(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name}= is for mode \"full\", got mode 'gradients'"):
            Offload(made("twice"), adamw, "gradients", **{name: "cpu"})  # type: ignore[arg-type]

    @pytest.mark.parametrize("mode", ["none", "state"])
    def test_gradients_that_are_not_stored_add_up_as_they_are(self, mode: str) -> None:
        with pytest.raises(ValueError, match=f'grad_dtype= is for modes "gradients" and "full".*in mode \'{mode}\''):
            Offload(made("twice").parameters(), adamw, mode, grad_dtype=torch.float32)
        with pytest.raises(ValueError, match=r"grad_dtype must be a floating-point dtype.*got torch.int8"):
            Offload(made("twice"), adamw, "gradients", grad_dtype=torch.int8)

    def test_vacated_parameters_stay_themselves(self) -> None:
        p = nn.Parameter(torch.ones(3, 4).t(), requires_grad=False)
        vacate(p, torch.device("cpu"))
        assert p.untyped_storage().nbytes() == 0 and p.shape == (4, 3) and p.stride() == (1, 4)
        assert type(p) is nn.Parameter and not p.requires_grad
