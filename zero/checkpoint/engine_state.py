"""The content of an engine's checkpoint, and how a run of the same or of another layout loads it.

`files.py` writes and reads files. Their content is defined here: the model's weights (and a dense optimizer's moments)
once, under their names; and for each rank its optimizer's state with the slices of the parameters that it covers,
schedule, data position, loss scale and random numbers. `reshard.py` converts states from one layout to another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import StateDict

from ...checkpoint.files import CheckpointError
from ...comm.messages import gather_bytes, raise_on_all_ranks
from ..config.whole import Config
from ..feature import Feature, Training
from ..form import Form
from ..grid import AXES, GridShape
from ..precision import LossScale
from . import reshard
from .files import Checkpoints, Loaded
from .reshard import CopyPlan, ParamSlice
from .weights import plain, set_extra_states

log = logging.getLogger(__name__)

# Optimizers that load each other's states.
_SAME_STATE = {"AdamW", "HostAdam"}
_FORMER_NAMES = {"whole": "replicated", "inside": "intra_node", "across": "inter_node"}  # in the first files
_ENGINES_OWN = {"scheduler", "loader", "loss_scale", "counts", "rng", "cuda_rng", "client"}


@dataclass(frozen=True)
class Contents:
    """The parts of a checkpoint to write or load. Weights always are.

    counts: steps, loss scale, data position, random numbers. frozen: weights without gradients. strict: whether all
    weights of the model, and no others, must be there; without it only frozen ones may lack beside the optimizer's
    state, which the others would not fit.
    """

    optimizer: bool = True
    scheduler: bool = True
    counts: bool = True
    frozen: bool = True
    strict: bool = True


class Saved(Training, Protocol):
    """The engine, as a checkpoint sees it. Loading sets the counts and the loss scale."""

    fp16_scale: LossScale
    micro_steps: int
    global_steps: int
    skipped_steps: int
    global_samples: int
    micro_steps_of_step: int

    @property
    def config(self) -> Config: ...
    @property
    def form(self) -> Form: ...
    @property
    def scheduler(self) -> LRScheduler | None: ...
    @property
    def active_features(self) -> Sequence[Feature]: ...
    @property
    def has_gradients(self) -> bool: ...
    def gradient_accumulation_steps(self) -> int: ...
    def agree_on_loss_scale(self) -> None: ...
    def zero_grad(self) -> None: ...


def save(
    engine: Saved,
    checkpoints: Checkpoints,
    client_state: object,
    contents: Contents,
    *,
    in_background: bool,
    is_latest: bool,
    then: Callable[[], None] | None,
) -> None:
    """Write a checkpoint, after synchronising the ranks. All ranks. Raises CheckpointError within a step."""
    _refuse_within_step(engine)
    if engine.form.steps_apart:
        engine.sharding.release()
    else:
        engine.synchronise(lands=not engine.grid.transport.ranks_change)  # one member saves, the others train on
    tensors, rest = _state(engine)
    if not contents.frozen:
        for name in _frozen(engine):
            del tensors[name]
    features = {name: value for feature in engine.active_features for name, value in feature.state().items()}
    steps = [engine.micro_steps, engine.global_steps, engine.skipped_steps]
    own = {
        "optimizer": rest,
        "pieces": reshard.packed_pieces(reshard.pieces_of(engine.sharding.held, engine.optimizer)),
        "scheduler": None if engine.scheduler is None else engine.scheduler.state_dict(),
        "loader": None if engine.loader is None else engine.loader.state_dict(),
        "loss_scale": engine.fp16_scale.state_dict(),
        # The first checkpoints have three counts, then four; dropped tokens were counted before there were features.
        "counts": [*steps, engine.global_samples, features.pop("layer_tokens", 0)],
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "client": client_state,
    }
    if features:
        own["features"] = features
    about = _about(engine) | {"without_frozen": not contents.frozen}
    with engine.form.shown():
        checkpoints.save(
            engine.global_steps, tensors, own, about, in_background=in_background, is_latest=is_latest, then=then
        )


def load(engine: Saved, checkpoints: Checkpoints, tag: str | None, contents: Contents) -> tuple[str | None, object]:
    """See `Engine.load_checkpoint`. All ranks."""
    name = checkpoints.find(tag)
    if name is None:
        return None, None  # before the optimizer begins a state to read into
    if not contents.optimizer:
        engine.synchronise()  # else the residuals of differing replicas would belong to weights that are gone
    else:
        engine.sharding.release()
    frozen = _frozen(engine)
    recutting: list[_Recutting] = []
    own: StateDict = {}
    begun: set[str] = set()  # parameters of which the checkpoint has a dense optimizer's state

    def check(found: Loaded) -> None:
        if contents.optimizer:
            _check_stamp(engine, found.stamp)
        saved = found.own.metadata.state_dict_metadata
        begun.update(_parameter_of(name) for name in saved if name.startswith("model/optimizer.state."))
        own.update(found.own.read(_source(engine, found), *_ENGINES_OWN, "features"))
        if missing := sorted(_ENGINES_OWN - own.keys()):
            raise CheckpointError(f"{found.folder} has no {missing[0]} of rank {engine.grid.world.rank}: it is damaged")
        if contents.optimizer and not (engine.form.shares_state or _is_same_cut(engine, found)):
            recutting.append(_Recutting.of(engine, found))

    def may_lack(found: Loaded, name: str) -> bool:
        if name.startswith("optimizer."):
            return not contents.optimizer or _parameter_of(name) not in begun
        if name in frozen and (not contents.strict or found.stamp.get("without_frozen")):
            return True
        return not (contents.strict or contents.optimizer)

    with engine.form.begun_state() if contents.optimizer else nullcontext():
        tensors = _state(engine)[0] if contents.optimizer else _weights(engine)
        loaded = checkpoints.load(tensors, name, check=check, may_lack=may_lack)
    assert loaded is not None
    # If the slices of one rank differ, all ranks recut: all replicas then take the mean of the residuals.
    is_recut = any(said != b"\0" for said in gather_bytes(engine.grid.world, bytes([bool(recutting)])))

    def take_over(loaded: Loaded) -> None:
        set_extra_states(engine.module, {name.removeprefix("model."): x for name, x in tensors.items()})
        engine.form.weights_were_loaded()
        engine.sharding.gather()
        if not contents.optimizer:
            engine.form.adopt_parameters()
        elif engine.form.shares_state:
            engine.form.load_shared(*_shared_state(loaded, tensors), begun)
        elif is_recut:
            _load_recut(engine, loaded, recutting[0] if recutting else _Recutting.of(engine, loaded))
        else:
            _load_own(engine, loaded)
        engine.sharding.gather()
        for feature in engine.active_features:
            feature.weights_were_loaded()
        if contents.counts:
            _load_rest(engine, own, contents)

    checkpoints.together(take_over, loaded)
    if engine.form.steps_apart and contents.counts:
        engine.agree_on_loss_scale()
    engine.micro_steps_of_step = 0
    engine.zero_grad()  # they belong to the old weights
    return str(loaded.folder), own["client"]


def _refuse_within_step(engine: Saved) -> None:
    """Raise CheckpointError within a step: checkpoints have no gradients, so earlier micro-batches would be lost."""
    count = engine.gradient_accumulation_steps()
    done, problem = engine.micro_steps_of_step, None
    if done or engine.has_gradients:
        when = (
            f"{'before' if engine.has_gradients else 'after'} the step() of micro-batch {done + engine.has_gradients}"
        )
        problem = (
            f"rank {engine.grid.world.rank}: checkpoints hold no gradients and are taken between steps; this one is "
            f"asked for {when} of {count}; save when engine.micro_steps is a multiple of "
            "engine.gradient_accumulation_steps()"
        )
    raise_on_all_ranks(engine.grid.world, problem, CheckpointError)


def _load_rest(engine: Saved, own: StateDict, contents: Contents) -> None:
    """Load a rank's state other than the optimizer's."""
    if contents.scheduler and engine.scheduler is not None and own["scheduler"] is not None:
        engine.scheduler.load_state_dict(own["scheduler"])
    if engine.loader is not None and own["loader"] is not None:
        engine.loader.load_state_dict(own["loader"])
    engine.fp16_scale = engine.fp16_scale.with_state(own["loss_scale"])
    _, engine.global_steps, engine.skipped_steps, *samples = own["counts"]
    engine.global_samples = samples[0] if samples else engine.global_steps * engine.config.train_batch_size
    engine.micro_steps = engine.global_steps * engine.config.gradient_accumulation_steps
    state = {**own.get("features", {}), "layer_tokens": samples[1] if len(samples) > 1 else 0}
    for feature in engine.active_features:
        feature.load_state(engine, state)
    torch.set_rng_state(own["rng"])
    if own["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda_rng"])


def _about(engine: Saved) -> StateDict:
    return {
        "form": engine.form.name,
        "optimizer": engine.form.optimizer_name(),
        "sizes": dict(zip(AXES, engine.grid.shape.sizes, strict=True)),
        "stage": engine.config.zero_optimization.stage,
        "train_batch_size": engine.config.train_batch_size,
    }


def _source(engine: Saved, found: Loaded) -> int:
    """The old rank whose own state this one takes over: under local steps one with the same part of the model."""
    if engine.form.steps_apart and _differs_in_replicas_alone(engine, found.stamp):
        place, there = engine.grid.coordinates, _shape(found.stamp)
        return there.rank(place | {"replica": place["replica"] % there.size("replica")})
    return engine.grid.world.rank % len(found.own)


def _check_stamp(engine: Saved, stamp: Mapping[str, object]) -> None:
    mine, form = _about(engine), engine.form
    if _shape(stamp).world_size != stamp["world_size"]:
        raise CheckpointError(f"{_shape(stamp)} is no grid of {stamp['world_size']} ranks: the checkpoint is damaged")
    there = _form(stamp)
    if there not in form.same_state | {form.name}:
        raise CheckpointError(
            f"the checkpoint's form is {there}, this run's is {form.name}, whose state differs; start it with the "
            "same stage, onebit.sharding and onebit.local_steps, or take over only the weights (save_16bit_model, "
            "import_weights)"
        )
    if stamp.get("optimizer") != mine["optimizer"] and {stamp.get("optimizer"), mine["optimizer"]} != _SAME_STATE:
        raise CheckpointError(f"the checkpoint's optimizer is {stamp.get('optimizer')}, not {mine['optimizer']}")
    if form.fixed_cut and not _differs_in_replicas_alone(engine, stamp):
        raise CheckpointError(
            f"the checkpoint is of a grid of {_shape(stamp)}, this run's is {engine.grid.shape}; {form.fixed_cut} "
            "takes over a state only if just the number of replicas changes: keep the other sizes, or take over only "
            "the weights (save_16bit_model, import_weights)"
        )
    batch, then = engine.config.train_batch_size, stamp.get("train_batch_size", engine.config.train_batch_size)
    if batch != then and engine.grid.world.rank == 0:
        log.warning(
            "a step has %s samples, in the checkpoint it had %s: the run continues with other batches", batch, then
        )


def _form(stamp: Mapping[str, object]) -> str:
    """The form (`forms/`) of the run that wrote the checkpoint."""
    form = cast(str, stamp.get("form"))
    return _FORMER_NAMES.get(form, form)


def _shape(stamp: Mapping[str, object]) -> GridShape:
    sizes = cast(dict[str, int], stamp["sizes"])
    return GridShape(tuple(sizes.get(axis, 1) for axis in AXES))


def _differs_in_replicas_alone(engine: Saved, stamp: Mapping[str, object]) -> bool:
    there, here = _shape(stamp), engine.grid.shape
    return all(there.size(axis) == here.size(axis) for axis in AXES if axis != "replica")


def _is_same_cut(engine: Saved, found: Loaded) -> bool:
    """Whether this rank holds the same slices as the old rank at its place, or as another replica of that."""
    if not _differs_in_replicas_alone(engine, found.stamp):
        return False
    there = _shape(found.stamp)
    outline = cast(StateDict, found.own.outline(there.rank(engine.grid.coordinates | {"replica": 0})))
    if "pieces" not in outline:  # the first files have no slices: they follow from form and grid
        return _form(found.stamp) == engine.form.name
    return reshard.saved_pieces(outline["pieces"]) == reshard.pieces_of(engine.sharding.held, engine.optimizer)


def _state(engine: Saved) -> tuple[dict[str, Tensor], StateDict]:
    """(tensors of all ranks together, by name; the rest of the optimizer's state, separate on each rank)."""
    model = _weights(engine)
    tensors, rest = engine.form.state()
    return model | {f"optimizer.{name}": x for name, x in tensors.items()}, rest


def _parameter_of(name: str) -> str:
    """The parameter of a tensor of a dense optimizer's state in a checkpoint."""
    return name.partition("optimizer.state.")[2].rpartition(".")[0]


def _weights(engine: Saved) -> dict[str, Tensor]:
    return {f"model.{plain(name)}": x for name, x in engine.form.weights().items()}


def _frozen(engine: Saved) -> set[str]:
    named = engine.module.named_parameters(remove_duplicate=False)
    return {f"model.{plain(name)}" for name, p in named if not p.requires_grad}


def _load_own(engine: Saved, loaded: Loaded) -> None:
    """Load this rank's own state; for another number of replicas, those of all ranks with its part of the model."""
    place, there = engine.grid.coordinates, _shape(loaded.stamp)
    ranks = there.along("replica", there.rank(place | {"replica": 0}))
    engine.form.load_own(_States(loaded, ranks))


@dataclass(frozen=True)
class _States(Sequence[StateDict]):
    """The optimizer states of some ranks, each read on access."""

    loaded: Loaded
    ranks: Sequence[int]

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: int) -> StateDict:  # type: ignore[override]
        return cast(StateDict, self.loaded.own.read(self.ranks[index], "optimizer")["optimizer"])


# ---------------------------------------------------------------- states of another layout


@dataclass(frozen=True)
class _Recutting:
    """The slices that this rank takes from old ranks. parts: the old ranks, by the part of the model that they hold."""

    here: list[ParamSlice]
    parts: list[list[int]]
    cuts: list[list[CopyPlan]]

    @classmethod
    def of(cls, engine: Saved, found: Loaded) -> _Recutting:
        """Read the old ranks' outlines. Raises CheckpointError if they lack slices that this rank needs."""
        here, parts = (
            reshard.pieces_of(engine.sharding.held, engine.optimizer),
            reshard.parts_of(_shape(found.stamp)),
        )
        outlines = [cast(StateDict, found.own.outline(ranks[0])) for ranks in parts]
        if any("pieces" not in outline for outline in outlines):
            raise CheckpointError(
                f"{found.folder} does not record the slices of its ranks, because an early version wrote it; load it "
                f"on a grid of {_shape(found.stamp)} and save it again"
            )
        try:
            cuts = reshard.plan([reshard.saved_pieces(outline["pieces"]) for outline in outlines], here)
        except ValueError as error:
            raise CheckpointError(f"{found.folder} cannot be cut for this layout: {error}") from error
        return cls(here, parts, cuts)


def _load_recut(engine: Saved, loaded: Loaded, recutting: _Recutting) -> None:
    """Load this rank's state, cut from those of the old ranks."""
    try:
        state = reshard.recut(
            engine.optimizer,
            recutting.here,
            recutting.cuts,
            lambda part: _States(loaded, recutting.parts[part]),
        )
        engine.optimizer.load_state_dict(state)
    except ValueError as error:
        raise CheckpointError(f"{loaded.folder} cannot be loaded in this layout: {error}") from error
    if engine.grid.world.rank == 0:
        log.info(
            "optimizer state of a grid of %s taken over by one of %s: residuals are kept, parameter by parameter",
            _shape(loaded.stamp),
            engine.grid.shape,
        )


def _shared_state(loaded: Loaded, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """A dense optimizer's state in the checkpoint: (tensors by name, the rest from the ranks of all layers)."""
    named = {k.removeprefix("optimizer."): x for k, x in tensors.items() if k.startswith("optimizer.")}
    rest: dict[str, object] = {}
    there = _shape(loaded.stamp)
    for stage in range(there.size("pipe")):
        rank = there.rank({axis: 0 for axis in AXES} | {"pipe": stage})  # the others of a stage wrote the same
        rest |= cast(StateDict, loaded.own.read(rank, "optimizer")["optimizer"])
    return named, rest
