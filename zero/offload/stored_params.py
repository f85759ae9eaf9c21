"""Parameters in a store: brought to their device while they are used, in forward, backward or anywhere else.

Their storages are emptied and filled, so parameters, views of them and what autograd keeps stay valid. A storage that
other tensors share is not emptied until these are gone. `parameter.py` notices uses in functions, `Blocks` those in
modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .checks import check_movable
from .layout import Chunk, Piece
from .parameter import UNSEEN, Saved, Saving, StoredParameter, names_of, plain
from .reader import Reader, Stored
from .store import PAGE, Extent, Lender, MemoryStore, Store, rounded


class StoredParams:
    """All parameters of a model, in a store.

    Args:
        model: The model.
        trained: The parameters to train, in the order of the chunks' pieces. They come first in the store.
        chunks: The chunks that a step works on.
        open_store: Makes a store from its size and the size of its largest lease in bytes.
        staged: Makes the lender for the parameters' device from a store and the size of a lease.
        ahead: How many leases to read ahead.
        device: Where parameters are brought, and where buffers move; None for where each parameter is.
        fill: Called once with the model, which may be on "meta"; what it writes are the first values. May be None.

    Raises:
        TypeError: A parameter cannot be moved.
        ValueError: Parameters share memory, or `fill` has not written one.
        StoreError: The store fails.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[Tensor],
        chunks: Sequence[Chunk],
        open_store: Callable[[int, int], Store],
        staged: Callable[[Store, int], Lender],
        *,
        ahead: int,
        device: torch.device | None,
        fill: Callable[[nn.Module], object] | None,
    ):
        names = names_of(model)
        first = {id(p) for p in trained}
        held = [*trained, *(p for p in names if id(p) not in first)]
        check_movable(held, names, may_be_meta=fill is not None)
        _own_memory(held)
        self.all: list[Stored] = []
        offset = 0
        for p in held:
            home = Extent(offset, rounded(p.numel() * p.element_size()))
            offset += home.nbytes
            self.all.append(Stored(names[p], cast(StoredParameter, p), p.untyped_storage(), home))
        self._of = {s.param: s for s in self.all}
        widest = max(p.element_size() for p in held)
        steps = [sum(e.nbytes for e in self.extents(chunk.pieces)) for chunk in chunks]
        largest = max(_bytes_of(module) for module in model.modules())
        most = max(PAGE, rounded(min(max(c.size for c in chunks) * widest, largest)))
        self.store = open_store(offset, max([most, *steps]))
        self._lender: Lender = self.store
        self._reader = Reader(self.store, most, 0)
        self._here: dict[Stored, None] = {}
        self._idle: dict[Stored, None] = {}
        self.saving = Saving(self._describe, self._restore)
        self._is_showing = self._is_lost = False
        probe = nn.Parameter(torch.empty(1, dtype=torch.float32, device="cpu"))
        storage = probe.untyped_storage()
        self._alone = torch._C._storage_Use_Count(storage._cdata)  # the use count with only a parameter and a `Stored`
        self._leave(device)
        if ahead > 0 and isinstance(self.store, MemoryStore):  # leases of memory are free: read a whole module ahead
            most = max(most, rounded(-(-largest // ahead)))
        self._lender = staged(self.store, most)
        self._reader = Reader(self._lender, most, ahead)
        self._of_storage = {s.storage._cdata: s for s in self.all}
        if device is not None:
            _move_buffers(model, device)
        if fill is not None:
            fill(model)
            self._check_filled()

    def of(self, module: nn.Module) -> list[Stored]:
        """The parameters that belong to a module directly.

        Raises:
            RuntimeError: A parameter was replaced by another.
        """
        found = []
        for name, p in module._parameters.items():
            if p is not None:
                if p not in self._of:
                    raise RuntimeError(
                        f"{name} of {type(module).__name__} is another parameter than the one that is offloaded "
                        "(load_state_dict(assign=True)?); write into parameters, or make Offload afterwards"
                    )
                found.append(self._of[cast(StoredParameter, p)])
        return found

    # ---------------------------------------------------------------- uses

    def use(self, stored: Sequence[Stored], stack: ExitStack) -> None:
        """Keep these parameters here until the stack closes. What autograd saves of them takes no memory."""
        for s in stored:
            s.users += 1
            self._idle.pop(s, None)
        stack.callback(self._end_use, stored)
        with plain():
            self.bring(stored)
            self.saving.into(stack)

    def _end_use(self, stored: Sequence[Stored]) -> None:
        for s in stored:
            s.users -= 1
            if s.users == 0 and s.is_here:
                self._idle[s] = None

    def call(self, used: list[StoredParameter], run: Callable[[], object], func: object) -> object:
        stored = [self._of[p] for p in used]
        if self._is_showing and func is Tensor.detach:
            stored[0].was_written = True  # the holder of a state dict may write into it
            return self.shown(stored[0])
        with ExitStack() as stack:
            self.use(stored, stack)
            result = run()
        if func in UNSEEN:
            for s in stored:
                s.is_seen = False
        return result

    def replace(self, param: StoredParameter, values: Tensor) -> None:
        """`p.data = values`: copies the values into the parameter, which keeps its storage."""
        s = self._of[param]
        there, here = ((x.shape, x.dtype, x.device) for x in (values, param))
        if there != here:
            raise RuntimeError(
                f"{s.name} is {here[1]} {list(here[0])} on {here[2]} and would become {there[1]} {list(there[0])} on "
                f"{there[2]}; an offloaded parameter keeps these: cast and move the model before Offload"
            )
        with ExitStack() as stack, torch.no_grad():
            self.use([s], stack)
            torch.as_strided(s.bytes().view(param.dtype), param.shape, param.stride()).copy_(values)
            s.is_seen = False

    def _describe(self, x: Tensor) -> Saved | None:
        if x.layout != torch.strided:
            return None
        try:
            s = self._of_storage.get(x.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # tensors without a storage
            return None
        if s is None:
            return None
        return Saved(s.param, s.edition, s.param._version, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def _restore(self, saved: Saved) -> Tensor:
        s = self._of[saved.param]
        if (s.edition, s.param._version) != (saved.edition, saved.version):
            raise RuntimeError(
                f"{s.name} has been changed, by a step or in place, since the forward pass that this backward needs; "
                "call backward before step()"
            )
        self.bring([s])
        made = torch.empty(0, dtype=saved.dtype, device=s.storage.device)
        return made.set_(s.storage, saved.offset, saved.size, saved.stride)

    # ---------------------------------------------------------------- to the device and away

    def bring(self, wanted: Sequence[Stored]) -> None:
        """Bring the parameters that are away, after emptying those that are not in use."""
        missing = tuple(dict.fromkeys(s for s in wanted if not s.is_here))
        if not missing:
            return
        self._refuse_lost(missing[0])
        self.give_back(wanted)
        self._reader.read(missing)
        for s in missing:
            s.is_here, s.version, s.is_seen = True, s.param._version, True
            self._here[s] = None
            if s.users == 0:
                self._idle[s] = None

    def give_back(self, but: Sequence[Stored] = ()) -> None:
        """Empty the storages that are not in use, after storing what was written into them."""
        for s in [s for s in self._idle if s not in but and not self._is_lost]:
            if not s.may_leave or torch._C._storage_Use_Count(s.storage._cdata) > self._alone:
                continue
            self._keep(s)
            s.storage.resize_(0)
            s.is_here = False
            del self._idle[s], self._here[s]

    def _refuse_lost(self, s: Stored) -> None:
        if self._is_lost:
            raise RuntimeError(
                f"{s.name} was left in the store of an Offload that is closed; save the model before "
                "close(bring_back=False) or engine.close()"
            )

    def _keep(self, s: Stored) -> None:
        """Store what other code has written into a parameter."""
        if s.param.untyped_storage()._cdata != s.storage._cdata:
            raise RuntimeError(f"{s.name} was given another storage below Offload; write into it with copy_ instead")
        if s.is_seen and s.param._version == s.version:
            return
        self._reader.write(s)
        s.was_written, s.version = True, s.param._version

    def _leave(self, device: torch.device | None) -> None:
        """Store all values first, which may fail; then turn the parameters into offloaded ones, which cannot."""
        for s in self.all:
            if not s.param.is_meta:
                self._reader.write(s)
        self.store.flush()
        for s in self.all:
            s.is_empty = s.param.is_meta
            if s.is_empty or device not in (None, s.param.device):
                vacate(s.param, device or torch.device("cpu"))
                s.storage = s.param.untyped_storage()
            s.param.__class__ = StoredParameter
            s.param._home = self
            self._idle[s] = self._here[s] = None
            s.version = s.param._version
        with plain():
            self.give_back()

    def _check_filled(self) -> None:
        """Raise ValueError if `fill` has left a parameter without values."""
        self.sync()
        for s in self.all:
            if s.is_empty and not s.was_written and s.nbytes:
                raise ValueError(f"{s.name} was on meta and fill() has not written it; see onebit.zero.materialize")
            s.was_written = False

    # ---------------------------------------------------------------- between the step and the rest

    def extents(self, pieces: Sequence[Piece]) -> list[Extent]:
        """The pieces' places in the store, in whole pages."""
        found = []
        for piece in pieces:
            s = self.all[piece.param]
            width = s.param.element_size()
            found.append(Extent(s.home.offset + piece.start * width, rounded((piece.stop - piece.start) * width)))
        return found

    def sync(self) -> None:
        """Bring the store up to date with the parameters, and drop what was read ahead."""
        with plain():
            self._reader.forget()
            for s in self._here:
                self._keep(s)
            self.give_back()
            self._lender.settle()

    def stepped(self, params: Sequence[int]) -> None:
        """A step has changed these parameters in the store: those that are here are read again."""
        with plain():
            for k in params:
                s = self.all[k]
                s.edition, s.was_written = s.edition + 1, False
                if s.is_here and s.nbytes:
                    self._reader.read_again(s)
                    s.version = s.param._version

    def shown(self, s: Stored) -> Tensor:
        """The values in the parameter's shape, as a view of the store."""
        self._refuse_lost(s)
        p = s.param
        held = self.store.view(s.home.offset, s.nbytes) if s.nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.as_strided(held.view(p.dtype), p.shape, p.stride())

    def show(self, is_showing: bool) -> None:
        """While a state dict is made, `p.detach()` gives a view of the store, so that nothing has to be brought."""
        if is_showing and not self._is_showing:
            self.sync()
        self._is_showing = is_showing

    def close(self, *, bring_back: bool) -> None:
        """Bring all parameters back for good, if the device has room; or, without bring_back, make them unusable."""
        with plain():
            self.sync()
            self._is_lost = not bring_back
            for s in self.all if bring_back else ():
                self.bring([s])
                self._idle.pop(s, None)
                cast(nn.Parameter, s.param).__class__ = nn.Parameter
                del s.param._home
            self._reader.forget()
            self._lender.settle()


class Blocks:
    """Hooks that bring each module's own parameters during its forward. `close` removes them.

    Backward needs no hooks: autograd asks for what it saved. If forward is called directly, or another module uses the
    parameter, it is brought function by function.
    """

    def __init__(self, model: nn.Module, params: StoredParams):
        self._params = params
        self._entered: list[tuple[nn.Module, ExitStack]] = []
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            if any(p is not None for p in module._parameters.values()):
                self._attach(module)

    def _attach(self, module: nn.Module) -> None:
        def before(called: nn.Module, args: object) -> None:
            if called is module:  # a deep copy of the model has these hooks too
                self._entered.append((module, stack := ExitStack()))
                self._params.use(self._params.of(module), stack)

        def after(called: nn.Module, args: object, output: object) -> None:
            if called is module and self._entered and self._entered[-1][0] is module:
                self._entered.pop()[1].close()

        def before_state(called: nn.Module, prefix: str, keep_vars: bool) -> None:
            self._params.show(called is module and not keep_vars)

        def after_state(called: nn.Module, state: object, prefix: str, metadata: object) -> None:
            self._params.show(False)

        self._handles += [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
            module.register_state_dict_pre_hook(before_state),
            module.register_state_dict_post_hook(after_state),
        ]

    def close(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()


def _own_memory(params: Sequence[Tensor]) -> None:
    """Copy parameters in mapped files or numpy's memory: such storages cannot be emptied."""
    for p in params:
        if not p.is_meta and not p.untyped_storage().resizable():
            p.data = p.data.clone()


def vacate(p: Tensor, device: torch.device) -> None:
    """Put a parameter onto a device without memory for its values. It stays the same object."""
    hollow = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=device)
    hollow.untyped_storage().resize_(0)
    if p.is_meta:
        torch.utils.swap_tensors(p, nn.Parameter(hollow, requires_grad=p.requires_grad))
    else:
        p.data = hollow


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the computing device. Those on "meta" stay for `fill`."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, x in module._buffers.items():
            if x is not None and not x.is_meta:
                module._buffers[name] = moved.setdefault(id(x), x.to(device))


def _bytes_of(module: nn.Module) -> int:
    return sum(rounded(p.numel() * p.element_size()) for p in module._parameters.values() if p is not None)
