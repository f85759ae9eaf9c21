"""A model's modules under offload of parameters: each has its own parameters here during its forward."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn
from torch.utils.hooks import RemovableHandle

from .stored_params import StoredParams


class Blocks:
    """Hooks on each module that has parameters of its own; `close` removes them.

    Backward needs none: autograd asks for what it saved. A module whose forward is called directly, or whose parameter
    another module uses, finds it as well, function by function.
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
            if called is module:  # a deep copy of the model has these hooks, too
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
        """Leave the modules as they were found."""
        for handle in self._handles:
            handle.remove()
