"""Lists of layers: what a stage builds, how layers are shared out, and what is refused before anybody communicates."""

from __future__ import annotations

import itertools

import pipeline_model
import pytest
import torch
from errors import refused
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from onebit import zero
from onebit.zero import LayerSpec, PipelineModule, TiedLayerSpec
from onebit.zero.config.sections import Pipelining
from onebit.zero.pipeline import run as pipeline
from onebit.zero.pipeline.layers import Stages, balance


def whole(model: PipelineModule) -> nn.Module:
    return model.stages([range(len(model))])[0]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.integers(1, 8))
def test_the_heaviest_stage_is_as_light_as_can_be(weights: list[float], parts: int) -> None:
    if parts > len(weights):
        refused(ValueError, "cannot be divided", balance, weights, parts)
        return
    found = balance(weights, parts)
    assert [k for part in found for k in part] == list(range(len(weights))) and all(found)
    cuts = itertools.combinations(range(1, len(weights)), parts - 1)
    best = min(max(sum(weights[i:j]) for i, j in itertools.pairwise((0, *cut, len(weights)))) for cut in cuts)
    assert max(sum(weights[part.start : part.stop]) for part in found) == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("tied", [True, False])
def test_stages_have_the_names_and_values_of_the_whole(stages: int, tied: bool) -> None:
    model = pipeline_model.model(tied)
    expected = dict(whole(model).named_parameters())
    torch.manual_seed(17)  # initial values do not depend on it
    found: dict[str, torch.Tensor] = {}
    for stage in (model.stages([part])[0] for part in model.cut(stages)):
        for name, p in stage.named_parameters():
            assert torch.equal(p, expected[name])
            found[name] = p
    assert found.keys() == expected.keys()


def test_building_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    whole(pipeline_model.model())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_one_after_the_other_are_the_whole(stages: int) -> None:
    model = pipeline_model.model()
    x, _ = next(pipeline_model.micro_batches(0, 1, 1))
    expected = value = whole(model)(x)
    value = x
    for part in model.cut(stages):
        value = model.stages([part])[0](value)
    assert torch.equal(value, expected)


def test_stages_of_one_rank_share_what_is_tied_and_keep_their_names() -> None:
    model = pipeline_model.model()
    first, last = model.stages([range(0, 2), range(4, len(model))])
    both = Stages([first, last])
    names = [name for name, _ in both.named_parameters()]
    assert first.tied["table"] is last.tied["table"]
    assert names.count("tied.table.weight") == 1 and set(both.state_dict()) == set(names)
    assert {name for stage in (first, last) for name, _ in stage.named_parameters()} == set(names)
    both.eval()
    assert not first.training and not last.training


@pytest.mark.parametrize("interval", [0, 1, 2, 100])
def test_recomputed_activations_give_the_same_bits(interval: int) -> None:
    x, y = next(pipeline_model.micro_batches(0, 1, 1))
    grads = []
    for k in (0, interval):
        stage = whole(pipeline_model.model(activation_checkpoint_interval=k))
        pipeline_model.loss_of(stage(x), y).backward()
        grads.append([p.grad for p in stage.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_how_layers_are_shared_out() -> None:
    model = pipeline_model.model()
    assert [len(part) for part in model.cut(3, "uniform")] == [2, 2, 2]
    blocks = [sum(isinstance(model.layers[k], LayerSpec) and model.layers[k].kind == "Block" for k in part)
              for part in model.cut(2, "type:block")]  # fmt: skip
    assert blocks == [1, 1]
    sizes = [sum(p.numel() for p in model.stages([part])[0].parameters()) for part in model.cut(2)]
    assert max(sizes) < 0.65 * sum(sizes)
    with pytest.raises(ValueError, match="matches none of the layers: Embedding, Positions, Block, LayerNorm"):
        model.cut(2, "type:attention")
    refused(ValueError, "partition_method must be", model.cut, 2, "weight")


def test_measured_time_shares_out_what_takes_long() -> None:
    layers = [LayerSpec(nn.Linear, 512, 512)] + [LayerSpec(nn.Linear, 512, 512, bias=False)] * 2
    slow = [lambda x: x + 0 * torch.linalg.qr(x.T @ x)[0].sum().detach()]
    model = PipelineModule(
        slow + layers + slow, loss_fn=torch.nn.functional.mse_loss, partition_method="time", example=torch.ones(8, 512)
    )
    seconds = model.seconds()
    assert len(seconds) == 5 and min(seconds[0], seconds[-1]) > max(seconds[1:-1])


def test_lists_that_make_no_model_are_refused() -> None:
    layer = nn.Linear(2, 2)
    for layers, kind, says in [
        ([], ValueError, "at least one layer"),
        ([layer, layer], ValueError, "tie it with TiedLayerSpec"),
        ([3], TypeError, "layer 0: expected a LayerSpec, a module or a function, got int"),
    ]:
        refused(kind, says, PipelineModule, layers, loss_fn=torch.nn.functional.mse_loss)
    refused(TypeError, "expected loss_fn, called as", PipelineModule, [layer], loss_fn="mse")
    refused(TypeError, "its last layer must return the loss", PipelineModule([layer]).loss_fn, torch.ones(2), None)
    refused(TypeError, "takes a class", LayerSpec, layer)
    refused(ValueError, "must not contain a dot", TiedLayerSpec, "a.b", nn.Linear, 2, 2)
    with pytest.raises(ValueError, match="pass example="):
        PipelineModule([layer], loss_fn=torch.nn.functional.mse_loss, partition_method="time")


@pytest.mark.parametrize(
    ("stages", "block", "micro_batches", "zero_stage", "says"),
    [
        (2, {"schedule": "1f1b", "chunks": 2}, 4, 0, "has one stage on each rank"),
        (2, {"schedule": "zbv", "chunks": 3}, 4, 0, "has two stages on each rank"),
        (2, {"schedule": "zbv"}, 4, 1, "FSDP2 cannot shard"),
        (2, {"schedule": "zero-bubble"}, 4, 3, "use stage 2"),
        (2, {"partition": "time"}, 2, 0, "pass example=, the inputs of a micro-batch, to PipelineModule"),
        (4, {"schedule": "interleaved", "chunks": 3}, 4, 0, "6 layers cannot be divided among 12 stages"),
        (2, {"schedule": "interleaved"}, 5, 0, "a multiple of 2"),
        (2, {"partition": "weight"}, 4, 0, "partition_method must be"),
    ],
)
def test_what_no_schedule_can_run_is_refused_before_there_is_a_process_group(
    monkeypatch: pytest.MonkeyPatch, stages: int, block: dict, micro_batches: int, zero_stage: int, says: str
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "OneBitAdam"},
        "zero_optimization": {"stage": zero_stage},
        "pipeline": {"stages": stages, **block},
    }
    refused(ValueError, says, zero.initialize, model=pipeline_model.model(), config=config)
    assert not torch.distributed.is_initialized()


def test_a_module_is_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = {"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}, "pipeline": {"stages": 2}}
    refused(TypeError, "the model is a Linear", zero.initialize, model=nn.Linear(2, 2), config=config)
    with pytest.raises(ValueError, match="8 ranks cannot be divided by the 3 that read each batch together"):
        zero.initialize(model=pipeline_model.model(), config=config | {"pipeline": {"stages": 3}})
    assert not torch.distributed.is_initialized()


def test_who_holds_which_stage() -> None:
    assert [pipeline.stages_of(Pipelining(stages=3), place) for place in range(3)] == [[0], [1], [2]]
    looped = Pipelining(stages=2, schedule="interleaved")
    assert [pipeline.stages_of(looped, place) for place in range(2)] == [[0, 2], [1, 3]]
    assert [pipeline.stages_of(Pipelining(stages=2, schedule="zbv"), place) for place in range(2)] == [[0, 3], [1, 2]]


@pytest.mark.parametrize("schedule", list(pipeline.SCHEDULES))
def test_one_rank_is_one_stage_whatever_the_schedule(schedule: str) -> None:
    """As where a run of several stages goes on in a single process."""
    for chunks in (None, 2):
        alone = Pipelining(schedule=schedule, chunks=chunks)
        assert pipeline.stages_of(alone, 0) == [0] and pipeline.chunks_of(alone) == 1


def test_what_one_stage_does_not_do_is_said() -> None:
    asked = Pipelining(schedule="zbv", activations="int8", activation_checkpoint_interval=1)
    names = ["schedule", "activations"]
    for model, said in (
        (pipeline_model.model(), names),
        (pipeline_model.Net(), ["activation_checkpoint_interval", *names]),
    ):
        lines = pipeline.without_effect(asked, model)
        assert sorted(line.split()[0] for line in lines) == sorted(f"pipeline.{name}" for name in said)
    assert pipeline.without_effect(Pipelining(), pipeline_model.Net()) == []


def test_the_first_layer_of_one_stage_may_take_a_dict() -> None:
    class First(nn.Linear):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(batch["x"])

    model = PipelineModule([First(3, 2)], loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    expected = nn.functional.mse_loss(model.layers[0](batch={"x": x}), y).item()
    config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zero.initialize(model=model, config=config)
    assert float(engine.eval_batch(iter([({"x": x}, y)]))) == pytest.approx(expected)
    engine.close()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_is_cut_at_named_places() -> None:
    net = pipeline_model.Net()
    x, y = next(pipeline_model.micro_batches(0, 1, 1))
    model = zero.split(net, ["blocks.0", "blocks.1", "head"], x, loss_fn=pipeline_model.loss_of)
    value, names = x, []
    for part in model.cut(4):
        stage = model.stages([part])[0]
        names += [name.split(".", 2)[2] for name, _ in stage.named_parameters()]
        value = stage(value)
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    assert torch.equal(value, net(x))
    assert len(zero.split(net, ["blocks.0"], x, loss_fn=pipeline_model.loss_of).layers) == 2  # once more
    assert not any({"forward", "_orig_forward"} & vars(module).keys() for module in net.modules())
    pipeline_model.loss_of(value, y).backward()
    with pytest.raises(ValueError, match=r"traced for inputs of shapes \[\(4, 8\)\], a micro-batch has \[\(3, 8\)\]"):
        model.stages([range(1)])[0](x[:3])
    refused(ValueError, r"no submodule 'layers\.0'", zero.split, net, ["layers.0"], x, loss_fn=pipeline_model.loss_of)
    with pytest.raises(ValueError, match=r"table.weight and head.weight are one parameter"):
        zero.split(pipeline_model.Net(tied=True), ["blocks.1"], x, loss_fn=pipeline_model.loss_of)
