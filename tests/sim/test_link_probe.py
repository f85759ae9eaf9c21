"""Whether compression pays: the rule, what happens where it does not, and that all ranks and a resumed run agree."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from family import FAMILY, flat, fresh, loss_of, model
from ranks import run_torchrun
from torch import Tensor

import onebit
from onebit.comm import IdentityCodec, SimTransport, run_ranks
from onebit.comm.messages import gather_bytes
from onebit.step import link_probe
from onebit.step.link_probe import LinkProbe
from onebit.step.stats import StopWatch


@pytest.mark.parametrize(
    ("compute_s", "onebit_s", "bf16_s", "should_compress"),
    [
        (0.5, 0.5, 6.0, True),  # 25 M parameters at 100 Mbit/s
        (0.0, 1.0, 1.04, False),  # gains less than it is worth
        (0.0, 1.0, 1.1, True),
        (3.0, 0.1, 1.9, False),  # backward hides either
        (3.0, 0.1, 3.0, True),
        (1.0, 2.0, 0.1, False),  # the codec costs more than the wire
        (1.0, 0.0, 0.0, False),
    ],
)
def test_the_rule(compute_s: float, onebit_s: float, bf16_s: float, should_compress: bool) -> None:
    assert LinkProbe(compute_s, onebit_s, bf16_s).should_compress is should_compress


def test_the_stop_watch_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 1.5, 4.0, 10.0, 12.0])
    monkeypatch.setattr(link_probe.time, "perf_counter", lambda: next(now))
    watch = StopWatch()
    watch.stop()  # before the first step there is nothing to measure
    assert watch.median_s() == 0.0
    watch.start()
    with watch.paused():
        pass
    watch.stop()
    assert watch.median_s() == 3.5
    watch.start()
    watch.stop()
    assert watch.median_s() == 2.75


@pytest.fixture
def a_network_where_it(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Simulated ranks count as a network, with this result of measuring."""
    monkeypatch.setattr(SimTransport, "has_network", True)
    monkeypatch.setattr(
        "onebit.step.link_probe.measure", lambda *_: LinkProbe(1.0, 0.1, 10.0 if request.param else 0.1)
    )


def train(transport: SimTransport, name: str, steps: range, state: dict | None = None, **options: object) -> tuple:
    net, optimizer = fresh(transport, name, lr=0.01, **options)
    if state is not None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    bits = []
    for step in steps:
        loss_of(net, step, transport.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        bits.append(optimizer.stats.bits_per_parameter)
    if isinstance(optimizer, onebit.ZeroOneAdam):
        optimizer.sync()
    return flat(net), bits, copy.deepcopy({"net": net.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.slow
@pytest.mark.parametrize("a_network_where_it", [False], indirect=True)
@pytest.mark.parametrize("name", FAMILY)
def test_where_it_does_not_pay_gradients_travel_in_bfloat16(
    name: str, a_network_where_it: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, by rank 0; resumes to the bit; and the run stays within bfloat16 of a dense twin's."""
    with caplog.at_level(logging.INFO):
        whole = run_ranks(2, lambda transport: train(transport, name, range(20)))
    assert sum("does not pay" in record.message for record in caplog.records) == 1
    assert torch.equal(whole[0][0], whole[1][0])
    elements = sum(p.numel() for p in model().parameters())
    buckets = len(whole[0][2]["optimizer"]["onebit"]["buckets"])
    padded = sum(-(-p.numel() // 256) * 256 for p in model().parameters())
    rest = 256 * buckets  # a bucket is a whole number of blocks on either rank
    for bits in whole[0][1][10:]:  # 16 bits, both phases, half of which stay at home; votes and trust ratios
        assert 16.0 * padded / elements <= bits <= 16.0 * (padded + rest) / elements + 2.0

    def resumed(transport: SimTransport) -> Tensor:
        state = train(transport, name, range(11))[2]
        return train(transport, name, range(11, 20), state)[0]

    assert torch.equal(run_ranks(2, resumed)[0], whole[0][0])


@pytest.mark.parametrize("a_network_where_it", [False], indirect=True)
def test_onebit_adam_without_compression_is_adamw(a_network_where_it: None) -> None:
    """On the mean gradient, to what bfloat16 changes: 2 % of the distance travelled."""
    ours = run_ranks(2, lambda transport: train(transport, "OnebitAdam", range(30), warmup_codec=IdentityCodec()))[0][0]
    net = model()
    twin = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(30):
        twin.zero_grad()
        (sum(loss_of(net, step, rank) for rank in range(2)) / 2).backward()
        twin.step()
    start = flat(model())
    assert (ours - flat(net)).norm() < 0.02 * (flat(net) - start).norm()


@pytest.mark.parametrize("a_network_where_it", [True], indirect=True)
@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
def test_where_it_pays_it_is_as_always(name: str, a_network_where_it: None) -> None:
    auto = run_ranks(2, lambda transport: train(transport, name, range(15)))
    always = run_ranks(2, lambda transport: train(transport, name, range(15), compression="always"))
    assert torch.equal(auto[0][0], always[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
def test_the_step_that_measures_the_network_counts_its_own_traffic_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring sends real buckets: they belong to no step, and the step's own traffic is not lost with them."""

    def measure(transport: SimTransport, *_: object) -> LinkProbe:
        gather_bytes(transport, bytes(1000), torch.device("cpu"))
        return LinkProbe(1.0, 0.1, 10.0)

    monkeypatch.setattr("onebit.step.link_probe.measure", measure)
    asked = run_ranks(2, lambda transport: train(transport, name, range(20), compression="always"))[0][1]
    monkeypatch.setattr(SimTransport, "has_network", True)
    assert run_ranks(2, lambda transport: train(transport, name, range(20)))[0][1] == asked


def test_a_bad_option_is_refused() -> None:
    with pytest.raises(ValueError, match='"auto" or "always"'):
        onebit.OnebitAdam([torch.nn.Parameter(torch.ones(3))], compression="never", transport=SimTransport())


def decide() -> list[bool]:
    """One rank over Gloo: what it decides with nothing to compute, and with more than any exchange takes."""
    decisions = []
    transport = onebit.comm.init()
    for compute_s in (0.0, 3600.0 if transport.rank else 0.0):
        optimizer = onebit.OnebitAdam(
            [torch.nn.Parameter(torch.ones(300_000))], transport=transport, bucket_cap_mb=0.25
        )
        optimizer.policy.computing._times.append(compute_s)
        decisions.append(optimizer.policy.decide())
    transport.close()
    return decisions


@pytest.mark.processes
def test_all_ranks_decide_alike_and_a_long_computation_hides_everything() -> None:
    results = run_torchrun(3, decide, timeout_s=90).check().results
    assert results[0] == results[1] == results[2]
    assert results[0][1] is False
