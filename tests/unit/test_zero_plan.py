"""The estimator: it says what the optimizers hold and send, and what is known of ZeRO."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from headless import Headless
from late_streams import LateStreams, in_use
from torch import nn

from onebit import LocalSteps
from onebit.cli.plan import main, table
from onebit.comm import SignCodec, SimTransport, Transport, codec_named, run_ranks
from onebit.comm.hierarchy import Hierarchy, hierarchical
from onebit.dense import average_gradients
from onebit.zero import Offload
from onebit.zero.config.optimizers import OPTIMIZERS, OptimizerChoice, build_optimizer
from onebit.zero.config.schema import keys_of
from onebit.zero.offload.encode_plan import EncodeRun, chosen_place, encode_plan, encode_plans
from onebit.zero.offload.plan import ROWS, OffloadRun, _copy_buffers, chosen
from onebit.zero.offload.plan import plan as offload_plan
from onebit.zero.offload.plan import plans as offload_plans
from onebit.zero.plan import DTYPE_BYTES, LOCAL, SHARDED, Run, optimizers, plan, plans
from onebit.zero.sharded.adam import ShardedOnebitAdam

N = 1 << 18


def measured(
    transport: Transport, name: str, error_bytes: int = 4, warmup_codec: str | None = None
) -> tuple[float, float, float]:
    """Bytes of state and bits sent, per parameter, once compression has begun; bits sent in the first step."""
    codec = None if warmup_codec is None else codec_named(warmup_codec, 256)
    p = nn.Parameter(torch.zeros(N))
    if name.startswith("sharded"):
        p = nn.Parameter(p.detach().bfloat16())
        options = {"differences": name.split()[1], "warmup_steps": 1, "warmup_codec": codec, "check_replicas_every": 0}
        optimizer = ShardedOnebitAdam([p], lr=1e-3, transport=transport, **options)
    else:
        params = OPTIMIZERS[name].params
        made = params(**({"freeze_step": 1} if "freeze_step" in keys_of(params) else {}))
        error_dtype = {2: torch.bfloat16, 4: torch.float32}[error_bytes]
        options = {"error_dtype": error_dtype, "gradient_codec": codec, "check_replicas_every": 0}
        model = Headless(torch.zeros(N // 256, 256))
        p, options["model"] = model.matrix, model
        optimizer = build_optimizer(OptimizerChoice(name, made), [p], transport=transport, **options)
    first = 0.0
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + transport.rank)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
        first = optimizer.stats.bits_per_parameter if step == 0 else first
    sent = optimizer.stats.bits_per_parameter
    for _ in range(40):  # variance rounds of 0/1 Adam, the first 16 of them in a row
        if sent < 3 / Hierarchy.of(transport).local_size:
            break
        optimizer.step()
        sent = optimizer.stats.bits_per_parameter
    return optimizer.state_bytes() / N, sent, first


ONE_BIT = [name for name in optimizers() if name in SHARDED or (name in OPTIMIZERS and OPTIMIZERS[name].is_one_bit)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_BIT)
@pytest.mark.parametrize(("hosts", "codec"), [(2, "log4"), (4, None)])
def test_it_agrees_with_what_a_run_measures(name: str, hosts: int, codec: str | None) -> None:
    run = Run(N, hosts, dtype="fp32", warmup_codec=codec)
    expected = plan(run, name, 1 if name.startswith("sharded") else 0)
    assert expected is not None
    state, bits, first = run_ranks(hosts, lambda transport: measured(transport, name, warmup_codec=codec))[0]
    assert state == pytest.approx(expected.state, rel=0.01)
    assert bits == pytest.approx(expected.bits, rel=0.02)
    assert first == pytest.approx(expected.warmup_bits, rel=0.02)


def sent_by_dense(transport: Transport) -> float:
    """Bits to other hosts, per parameter and step, of a rank that averages float32 gradients."""
    p, before = nn.Parameter(torch.zeros(N)), transport.sent_bytes_inter_node
    p.grad = torch.ones(N)
    average_gradients([p], transport)
    return 8 * (transport.sent_bytes_inter_node - before) / N


PLACED = [name for name in optimizers() if name in OPTIMIZERS]
"""One shape takes them all: the plan makes the traffic of any other from the same numbers."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hosts", "ranks"),
    [
        *((name, 2, 2) for name in PLACED),
        *(("OneBitAdam", 1, 4), ("OneBitAdam", 2, 4), ("AdamW", 4, 2), ("AdamW", 2, 4)),
    ],
)
def test_hosts_of_several_ranks_send_what_it_says_at_stage_0(name: str, hosts: int, ranks: int) -> None:
    expected = plan(Run(N, hosts, ranks, dtype="fp32"), name, 0)
    assert expected is not None

    def rank(flat: SimTransport) -> tuple[float, float, float]:
        transport = hierarchical(flat, ranks if hosts > 1 else 1)  # as comm.init() does
        if name == "AdamW":
            return expected.state, sent_by_dense(transport), expected.warmup_bits
        return measured(transport, name)

    first_host = run_ranks(hosts * ranks, rank)[:ranks]
    state, bits, first = (sum(column) / ranks for column in zip(*first_host, strict=True))
    assert state == pytest.approx(expected.state, rel=0.01)
    if hosts == 1:
        assert expected.bits == expected.warmup_bits == expected.run_bits == 0.0
        return
    assert bits == pytest.approx(expected.bits, rel=0.03)
    assert first == pytest.approx(expected.warmup_bits, rel=0.03)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_a_host_send_what_it_says(ranks: int) -> None:
    """The replicas of a shard exchange it, one of as many as a host has ranks."""
    found = run_ranks(2, lambda transport: measured(transport, "OneBitAdam"))[0]
    for stage in (1, 2, 3):
        made = plan(Run(ranks * N, 2, ranks, dtype="fp32"), "OneBitAdam", stage)
        assert made is not None
        expected = made.state, made.bits, made.warmup_bits
        assert [number / ranks for number in found] == pytest.approx(expected, rel=0.03)


def test_a_link_carries_the_bits_of_all_ranks_of_its_host() -> None:
    """Nothing hidden, no computing: the seconds are the bits' but for headers, and latencies of little models."""
    for hosts, ranks in ((4, 1), (2, 2), (4, 2), (2, 4)):
        for made in plans(Run(1.5e9, hosts, ranks, link_bits_per_s=1e8)):
            if made.optimizer != LOCAL:
                wire = made.bits * ranks * 1.5e9 / 1e8 / (1448 / 1514)
                assert wire <= made.seconds[1] <= 1.1 * wire + 2.0, made


def test_a_run_of_500_steps_costs_less_than_2_2_bits() -> None:
    """28 steps send gradients: the first 4, of 4 to 11 each second, of 12 to 27 each fourth, and so on."""
    for codec, least, most in (("int8", 2.1, 2.2), ("log4", 1.8, 1.9)):
        made = plan(Run(1e9, 4, warmup_codec=codec, steps=500), "OneBitAdam", 0)
        assert made is not None and made.run_bits == pytest.approx((28 * made.warmup_bits + 472 * made.bits) / 500)
        assert least < made.run_bits < most
    made = plan(Run(1e9, 4, steps=500), "OneBitLamb", 0)
    assert made is not None and made.run_bits == pytest.approx((136 * made.warmup_bits + 364 * made.bits) / 500)
    dense = plan(Run(1e9, 4, steps=500), "AdamW", 0)
    assert dense is not None and dense.run_bits == dense.warmup_bits == dense.bits == 48
    with pytest.raises(ValueError, match="warmup_codec of"):
        Run(1e9, 4, warmup_codec="zip")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "ranks", "every", "error_bytes"), [(2, 1, 1, 4), (4, 1, 3, 4), (3, 1, 2, 2), (2, 2, 2, 4)]
)
def test_local_steps_hold_and_send_what_the_plan_says(hosts: int, ranks: int, every: int, error_bytes: int) -> None:
    made = plan(Run(N, hosts, ranks, dtype="fp32", error_bytes=error_bytes, local_steps=every), LOCAL, 0)
    assert made is not None and made.bits == made.warmup_bits == made.run_bits

    def rank(flat: SimTransport) -> tuple[float, float]:
        transport, p = hierarchical(flat, ranks), nn.Parameter(torch.zeros(N // 256, 256))
        optimizer = LocalSteps(
            torch.optim.AdamW([p]),
            every,
            transport=transport,
            error_dtype={2: torch.bfloat16, 4: torch.float32}[error_bytes],
        )
        for step in range(2 * every):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + transport.rank))
            optimizer.step()
        moments = sum(optimizer.state[p][name].nbytes for name in ("exp_avg", "exp_avg_sq"))
        return (optimizer.state_bytes() + moments) / N, optimizer.stats.mean_bits_per_parameter

    state, bits = run_ranks(hosts * ranks, rank)[0]
    assert state == pytest.approx(made.state, rel=0.01)
    assert bits == pytest.approx(made.bits, rel=0.02)


def test_a_round_is_waited_for_or_lands_under_computing() -> None:
    run = Run(25e6, 4, dtype="fp32", link_bits_per_s=1e7, compute_s=0.3)
    (least, most), every_step = plan(run, LOCAL, 0).seconds, plan(run, "OneBitAdam", 0).seconds
    assert least == 0.3 < most == pytest.approx(0.3 + (every_step[1] - 0.3) / 32)
    assert plan(replace(run, local_steps=1), LOCAL, 0).seconds[1] == pytest.approx(every_step[1])
    assert plan(run, LOCAL, 1) is None and plan(replace(run, ranks_per_host=2), LOCAL, 3) is not None
    with pytest.raises(ValueError, match="local_steps >= 1"):
        replace(run, local_steps=0)


def test_errors_of_two_bytes() -> None:
    state, *_ = run_ranks(4, lambda transport: measured(transport, "OneBitAdam", 2))[0]
    made = plan(Run(N, 4, dtype="fp32", error_bytes=2), "OneBitAdam", 0)
    assert made is not None and state == pytest.approx(made.state, rel=0.01)


def test_the_sharded_form_holds_the_least_of_the_one_bit_forms_with_one_rank_per_host() -> None:
    """2 + 2 + 8/W bytes beside gradients, and 5.3 and 2.2 bits from the first step on.

    AdamW under ZeRO-1 holds 2 + 12/W: less, from three ranks on. What a rank has not sent yet cannot be sharded.
    """
    run = Run(1.5e9, 4)
    for name, bits in (("sharded int4", 5.3), ("sharded sign", 2.2)):
        made = plan(run, name, 1)
        assert made is not None and made.parameters + made.state <= 2 + 2 + 8 / 4 and made.bits <= bits
    held = {(p.optimizer, p.stage): p.parameters + p.state for p in plans(run)}
    assert held["AdamW", 1] == 2 + 12 / 4 < held["sharded int4", 1] < held["OneBitAdam", 0]


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_stage_holds_less_than_the_one_before(dtype: str) -> None:
    for name in optimizers():
        held = [p.bytes_per_parameter for p in plans(Run(1e9, 4, 4, dtype)) if p.optimizer == name]
        assert all(a >= b for a, b in pairwise(held)), (name, held)
    made = plan(Run(1e9, 4, 4, dtype), "OneBitAdam", 3)
    whole = plan(Run(1e9, 4, 1, dtype), "OneBitAdam", 0)
    assert made is not None and whole is not None and made.state == pytest.approx(whole.state / 4)


def test_a_slow_link_costs_dense_steps_more() -> None:
    for rate, least in ((1e8, 10), (1e9, 4)):
        run = Run(25e6, 4, dtype="fp32", link_bits_per_s=rate, compute_s=0.5)
        ours, dense = plan(run, "OneBitAdam", 0), plan(run, "AdamW", 0)
        assert ours is not None and dense is not None and ours.seconds[0] >= 0.5
        for slow, quick in zip(dense.seconds, ours.seconds, strict=True):
            assert slow - 0.5 > least * max(quick - 0.5, 0.05)


CONTENDERS = {
    "onebit-adam": ("OneBitAdam", 0), "onebit-lamb": ("OneBitLamb", 0), "zero-one-adam": ("ZeroOneAdam", 0),
    "ddp-fp32": ("AdamW", 0),
    "sharded sign": ("sharded sign", 2), "sharded int4": ("sharded int4", 2),
}  # fmt: skip


def recorded_steps() -> list[dict]:
    """Medians of the bench's record: whole steps of the 25 M GPT on emulated hosts, and what they take alone."""
    return json.loads((Path(__file__).parents[1] / "golden/recorded_steps.json").read_text())


def test_all_contenders_are_recorded() -> None:
    assert {row["contender"] for row in recorded_steps()} == set(CONTENDERS)


@pytest.mark.parametrize(
    "row", recorded_steps(), ids=lambda row: f"{row['contender']}, {row['hosts']}, {row['network']}"
)
def test_recorded_steps_lie_within_the_estimate(row: dict) -> None:
    """But for 15 % at either end. On hosts that share two cores little is hidden: they lie near the upper end."""
    alone = row["compute_seconds"] + row["local_seconds"]
    run = Run(25.4e6, row["hosts"], dtype="fp32", link_bits_per_s={"100mbit": 1e8, "1gbit": 1e9}[row["network"]],
              compute_s=alone)  # fmt: skip
    made = plan(run, *CONTENDERS[row["contender"]])
    assert made is not None
    assert 0.85 * made.seconds[0] <= row["seconds"] <= 1.15 * made.seconds[1], made.seconds


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--params", "1.5e9", "--hosts", "4", "--ranks-per-host", "2", "--link", "1gbit"]
    assert main(arguments) == 0
    text, made = capsys.readouterr().out, list(plans(Run(1.5e9, 4, 2)))
    assert len(table(Run(1.5e9, 4, 2)).rows) == len(made) == 4 * 6
    assert all(f"{one.bytes_per_parameter:.2f}" in text for one in made)
    assert main([*arguments, "--json", "-"]) == 0
    said = capsys.readouterr().out
    assert json.loads(said[said.index("\n{") :])["plans"][0]["bits"] == made[0].bits
    with pytest.raises(SystemExit):
        main(["--params", "1e9", "--hosts", "4", "--link", "fast"])
    with pytest.raises(SystemExit):
        main(["--params", "1e9", "--hosts", "0"])
    assert "expected at least one parameter" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least one"):
        Run(0, 4)


def test_the_table_of_serving_is_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    """7e9 weights of 2 bytes are read at 20 GB/s; the products of 8 rows, which take 1 ms, do not count besides."""
    assert main(["--params", "7e9", "--hosts", "4", "--serve", "32x4096", "--rows", "8", "--link", "100mbit"]) == 0
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    bytes_per_s, latency = 1e8 / 8 * 1448 / 1514, 1.9e-4
    part = 4 * 8 * 4096  # sums are of float32, and layers hand on bfloat16
    expected: list[tuple[int, str, float, float, float, float]] = [(1, "", 14e9, 0.0, 0.7, 0.0)]
    for ranks, turns, each in ((2, 1, part), (4, 6, part / 4)):  # 4 ranks run an all-reduce: 6 messages of a fourth
        held = 14e9 / ranks
        waits = 64 * turns * (latency + each / bytes_per_s)
        expected.append((ranks, "rows", held, 64 * turns * each, held / 2e10, waits))
        waits = ranks * latency + (ranks - 1) * (2 * 4096 * 8 / ranks) / bytes_per_s  # as many groups of rows as ranks
        expected.append((ranks, "layers", held, 2 * 4096 * 8, ranks * held / 2e10, waits))
    for cells, (ranks, by, held, sent, reading, sending) in zip(lines, expected, strict=True):
        numbers = held / 1e9, sent / 1e6, 1e3 * reading, 1e3 * sending, 8 / (reading + sending)
        said = [str(ranks), by, *(f"{x:.3g}" for x in numbers), "better" if by == "layers" else "", "no" if by else ""]
        assert [cell.strip() for cell in cells] == said


class TestOffload:
    RUN = OffloadRun(13e9, device_bytes=32e9, host_bytes=256e9, disk_bytes=1e12)

    def test_a_card_of_32_gb_trains_13_billion_with_gradients_offloaded(self) -> None:
        assert [made.fits for made in offload_plans(self.RUN)] == [False, False, True, True, False, True, True]
        best = chosen(self.RUN)
        assert best is not None and (best.mode, best.to) == ("gradients", "cpu")
        buffers = 2 * 4 * 64 * 2**20 / 12  # of four chunks' gradients
        assert (
            best.device_bytes == pytest.approx(26e9 + buffers, rel=1e-4)
            and 13e9 * 14 < best.host_bytes < 13e9 * 14 + 1e9
        )

    @pytest.mark.parametrize("mode_to", ROWS)
    def test_the_largest_model_just_fits(self, mode_to: tuple[str, str]) -> None:
        largest = offload_plan(self.RUN, *mode_to).largest_params
        assert offload_plan(replace(self.RUN, params=largest), *mode_to).fits
        assert not offload_plan(replace(self.RUN, params=1.01 * largest), *mode_to).fits

    @pytest.mark.parametrize(("dtype", "frozen"), [("fp32", 0), ("bf16", 0), ("bf16", 2)])
    @pytest.mark.parametrize(("mode", "to"), [row for row in ROWS if row[0] != "none"])
    def test_bytes_are_those_of_the_stores(self, mode: str, to: str, dtype: str, frozen: int, tmp_path: Path) -> None:
        """Of a layer that is trained, alone and between frozen ones."""
        layers = [nn.Linear(512, 512, bias=False) for _ in range(1 + frozen)]
        model = nn.Sequential(*layers).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        for layer in layers[:1] + layers[2:] if frozen else []:
            layer.requires_grad_(False)
        trained, params = 512 * 512, (1 + frozen) * 512 * 512
        run = OffloadRun(params, host_bytes=1e9, disk_bytes=1e9, dtype=dtype, largest=trained, trained=trained)
        planned = offload_plan(run, mode, to)
        offload = Offload(model, torch.optim.AdamW, mode, "cpu" if to == "cpu" else tmp_path)
        stored = sum(store.nbytes for store in offload._stores.all)
        if to == "files":
            assert stored == planned.disk_bytes
        else:
            near = ((trained if mode == "full" else params) + trained) * run.dtype_bytes  # values and gradients
            scratch = trained * (8 + 4 * (dtype == "bf16"))
            assert planned.host_bytes == stored + near + scratch

    @pytest.mark.parametrize("buffer_count", [2, 4])
    @pytest.mark.parametrize(("mode", "to"), [row for row in ROWS if row[0] != "none"])
    def test_buffers_of_copies_are_those_that_are_made(
        self, mode: str, to: str, buffer_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        streams = in_use(monkeypatch, LateStreams())
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6))).bfloat16()
        numel = 512 * 512
        run = OffloadRun(6 * numel, 1e9, 1e9, 1e9, largest=numel, chunk_mb=1.0, buffer_count=buffer_count)
        where = "cpu" if to == "cpu" else tmp_path
        Offload(model, torch.optim.AdamW, mode, where, chunk_mb=1.0, buffer_count=buffer_count)
        assert (sum(streams.near.values()), sum(streams.host.values())) == _copy_buffers(run, mode, to)

    def test_a_first_step_makes_a_chunks_moments_beside_a_store_that_is_there(self) -> None:
        run = OffloadRun(100e6, host_bytes=1e12, disk_bytes=1e12, chunk_mb=12.0, buffer_count=3)
        chunk = 1024 * 1024
        assert offload_plan(run, "state", "files").host_bytes == 4 * 100e6 + chunk * (3 * 12 + 4 + 8 + 8)
        assert offload_plan(run, "state", "cpu").host_bytes == 16 * 100e6 + chunk * (4 + 8)
        locked = replace(run, device_bytes=1e12)
        copies = 2 * 2 * 2  # two buffers of gradients and two of values, in bfloat16
        assert offload_plan(locked, "state", "cpu").host_bytes == 12 * 100e6 + chunk * (4 + 8 + 8 + copies)

    @pytest.mark.parametrize("mode_to", ROWS)
    def test_all_trained_is_the_plan_without_a_frozen_base(self, mode_to: tuple[str, str]) -> None:
        assert offload_plan(replace(self.RUN, trained=13e9), *mode_to) == offload_plan(self.RUN, *mode_to)

    @pytest.mark.parametrize("to", ["cpu", "files"])
    def test_no_share_in_the_store_is_none(self, to: str) -> None:
        made, none = offload_plan(replace(self.RUN, ratio=0.0), "state", to), offload_plan(self.RUN, "none", "-")
        assert (made.device_bytes, made.host_bytes, made.disk_bytes) == (none.device_bytes, none.host_bytes, 0.0)
        assert made.seconds == none.seconds

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_a_share_is_planned_as_it_lies(self, dtype: str, tmp_path: Path) -> None:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        model = model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        numel = 4 * 512 * 512
        run = OffloadRun(numel, host_bytes=1e9, disk_bytes=1e9, dtype=dtype, ratio=0.25)
        offload = Offload(model, torch.optim.AdamW, "state", tmp_path, ratio=0.25)
        near, away = (store.nbytes for store in offload._stores.all)
        assert away == offload_plan(run, "state", "files").disk_bytes == numel // 4 * run.state_bytes("state")
        assert near == (numel - numel // 4) * run.near_state_bytes

    def test_a_share_fills_the_card(self) -> None:
        """13 billion on 100 GB: of 16 bytes of each, 4 stay in any case, and 12 of those whose state does."""
        run = replace(self.RUN, device_bytes=100e9, ratio=0.75)
        assert not offload_plan(run, "none", "-").fits
        made, all_away = offload_plan(run, "state", "cpu"), offload_plan(replace(run, ratio=1.0), "state", "cpu")
        assert made.fits and made.device_bytes == pytest.approx(13e9 * (4 + 12 * 0.25), rel=0.01)
        assert made.host_bytes == pytest.approx(0.75 * all_away.host_bytes, rel=0.01)
        assert made.seconds[1] < all_away.seconds[1]

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"ratio": -0.1}, "a ratio from 0 to 1"),
            ({"ratio": 1.1}, "a ratio from 0 to 1"),
            ({"trained": 0.0}, "of the model's 1.3e.10, got 0"),
            ({"trained": 14e9}, "of the model's 1.3e.10, got 1.4e.10"),
        ],
    )
    def test_shares_are_of_the_model(self, change: dict[str, float], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            replace(self.RUN, **change)

    def test_adapters_on_a_card_of_32_gb(self) -> None:
        run = replace(self.RUN, trained=1e8, host_bytes=40e9, disk_bytes=0.0, tokens=1.0)
        made = {(x.mode, x.to): x for x in offload_plans(run)}
        resident, away = made["none", "-"], made["full", "cpu"]
        assert resident.fits and 26e9 + 14e8 < resident.device_bytes < 26e9 + 14e8 + 0.2e9
        assert not made["full", "files"].fits and away.fits
        assert away.host_bytes == pytest.approx(26e9 + 14e8, abs=0.2e9)
        # there and back for both passes, and the gradients of the trained ones
        least = (4 * 13e9 + 2 * 1e8) / run.flops_per_s + (2 * 26e9 + 2e8) / run.pcie_per_s
        assert away.seconds[0] == pytest.approx(least)

    @pytest.mark.parametrize("mode_to", ROWS)
    def test_modules_take_host_memory(self, mode_to: tuple[str, str]) -> None:
        without, made = (offload_plan(replace(self.RUN, modules=n), *mode_to) for n in (0, 1000))
        assert made.host_bytes - without.host_bytes == pytest.approx(28e6)
        assert (made.device_bytes, made.disk_bytes) == (without.device_bytes, without.disk_bytes)

    def test_full_crosses_and_reads_more(self) -> None:
        def seconds(mode: str, to: str, dtype: str) -> float:
            run = OffloadRun(1e9, 32e9, 256e9, 1e12, dtype, tokens=1e-9, pcie_per_s=1e9, disk_per_s=1e9)
            return offload_plan(run, mode, to).seconds[1] - 28 * 1e9 / run.memory_per_s

        # crosses: forward, backward, gradient; files: the step's 24 and 3 gradients, forward, backward and the step
        assert seconds("full", "cpu", "bf16") == pytest.approx(3 * 2)
        assert seconds("full", "files", "bf16") == pytest.approx(3 * 2 + 24 + 3 * 2 + 3 * 2)
        assert seconds("full", "files", "fp32") == pytest.approx(3 * 4 + 16 + 3 * 4 + 4 * 4)

    def test_the_table_says_what_the_plan_says(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        words = ["--params", "13e9", "--hosts", "1", "--device-gb", "32", "--host-gb", "256", "--disk-gb", "1000"]
        assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
        rows = json.loads((tmp_path / "plan.json").read_text())["plans"]
        assert [row["device_bytes"] for row in rows] == [made.device_bytes for made in offload_plans(self.RUN)]
        assert "best" in capsys.readouterr().out

    def test_trained_parameters_are_said_and_need_a_place(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--params", "13e9", "--hosts", "1", "--trained", "1e8"]
        assert main([*words, "--device-gb", "32"]) == 0
        assert "1e+08 of them trained" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(words)
        assert "--device-gb or --host-gb" in capsys.readouterr().err


class TestWhereOneBitIsEncoded:
    ASKED = EncodeRun(Run(13e9, 4, link_bits_per_s=1e10, compute_s=3.0), 32e9, 256e9, largest=200e6)

    def test_a_card_of_32_gb_encodes_in_host_memory(self) -> None:
        best = chosen_place(self.ASKED)
        assert best is not None and (best.stage, best.place) == (2, "host")
        assert best.device_bytes == 2 * (13e9 + 200e6)
        frames = 13e9 * 2 * 3 / 4 * SignCodec().frame_bytes(N) / N
        state = 4 + SignCodec().frame_bytes(N) / N + 4 * (1 + 1 / 4)
        assert best.host_bytes == pytest.approx(13e9 * (4 + 4 + state) + 2 * frames)
        assert best.times == pytest.approx(
            {
                "compute": 3,
                "pcie": 8 * 13e9 / 25e9,
                "memory": 26.7 * 13e9 / 100e9,
                "network": 8 * frames / 1e10,
                "disk": 0,
            }
        )
        assert best.seconds == pytest.approx((3.0 + best.times["pcie"], sum(best.times.values())))

    def test_a_card_that_holds_the_state_encodes_on_it(self) -> None:
        best = chosen_place(replace(self.ASKED, device_bytes=260e9))
        assert best is not None and (best.place, best.bound) == ("device", "compute")
        assert chosen_place(replace(self.ASKED, host_bytes=100e9)) is None

    def test_state_in_files_is_read_and_written_in_every_step(self) -> None:
        asked = replace(self.ASKED, host_bytes=150e9, disk_bytes=400e9, disk_per_s=2e9)
        best = chosen_place(asked)
        assert best is not None and (best.stage, best.place, best.bound) == (2, "files", "disk")
        host = encode_plan(asked, 2, "host")
        assert best.device_bytes == host.device_bytes and best.disk_bytes == 13e9 * (12 + 4 * (1 + 1 / 4))
        state = 4 + SignCodec().frame_bytes(N) / N + 4 * (1 + 1 / 4)
        assert host.host_bytes - best.host_bytes == pytest.approx(13e9 * state)
        assert best.times == pytest.approx(host.times | {"disk": 13e9 * (4 + 8 * (1 + 1 / 4)) / 2e9})
        assert chosen_place(replace(asked, disk_bytes=200e9)) is None
        assert "files" not in {made.place for made in encode_plans(self.ASKED)}

    def test_stage_3_keeps_a_module_and_crosses_twice(self) -> None:
        twice, once = encode_plan(self.ASKED, 3, "host"), encode_plan(self.ASKED, 2, "host")
        assert twice.device_bytes == 2 * 2 * 200e6
        assert twice.times["pcie"] == pytest.approx(1.5 * once.times["pcie"])

    def test_ranks_of_a_host_share_its_memory(self) -> None:
        eight = replace(self.ASKED, run=replace(self.ASKED.run, ranks_per_host=2))
        for place, share in (("device", 0.5), ("host", 1.0)):
            one, two = (encode_plan(asked, 2, place).times for asked in (self.ASKED, eight))
            assert two["memory"] == pytest.approx(share * one["memory"])
            assert two["pcie"] == pytest.approx(0.5 * one["pcie"])

    def test_one_host_sends_nothing_and_small_errors_are_read_faster(self) -> None:
        alone = replace(self.ASKED, run=replace(self.ASKED.run, hosts=1, ranks_per_host=2, error_bytes=2))
        assert encode_plan(alone, 2, "host").times["network"] == 0.0
        assert encode_plan(alone, 2, "host").times["memory"] == pytest.approx(21.7 * 13e9 / 100e9)

    def test_the_table_says_what_the_plan_says(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        words = ["--params", "13e9", "--hosts", "4", "--device-gb", "32", "--host-gb", "256", "--link", "10gbit"]
        more = ["--largest", "200e6", "--compute", "3", "--disk-gb", "400", "--json", str(tmp_path / "plan.json")]
        assert main([*words, *more]) == 0
        rows = json.loads((tmp_path / "plan.json").read_text())["plans"]
        asked = replace(self.ASKED, disk_bytes=400e9)
        assert [row["times"] for row in rows] == [made.times for made in encode_plans(asked)]
        assert "best" in capsys.readouterr().out

    @pytest.mark.parametrize("more", [["--host-gb", "64"], ["--device-gb", "32", "--ratio", ".5"]])
    def test_what_several_ranks_have_not_is_refused(self, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["--params", "1e9", "--hosts", "2", *more])
        assert "several ranks, all parameters are trained" in capsys.readouterr().err
