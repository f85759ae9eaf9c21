#!/usr/bin/env python3
"""What `onebit doctor` predicts of a step, against the step: models, rates, hosts and computing, on emulated hosts.

    python scripts/predict.py --record scripts/records/predict_2026-11.md
    python scripts/predict.py --rates 100mbit --hosts 2 --models 4e6 --methods OnebitAdam

Computing is emulated by sleeping, a third of it forward: as on an accelerator, it needs no processor. On every network
the doctor's samples are taken first, of each model; then whole steps of the model are timed. A case is a network, a
model and its computing; it holds where every contender's prediction is within 10 % of what is then measured. Needs root
and iproute2; see `onebit emulate`. On a busy machine it measures the other work as well.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from provenance import record_path, revision, write_record

from onebit import comm
from onebit.cli.cluster import Cluster, available
from onebit.cli.doctor import links, samples
from onebit.cli.doctor.contenders import METHODS
from onebit.cli.numbers import number

RATES, HOSTS = ("100mbit", "300mbit", "1gbit"), (2, 4)
MODELS = (4e6, 8e6, 12e6)
COMPUTES = ((4e6, 0.15), (4e6, 0.6), (8e6, 0.3), (8e6, 1.0), (12e6, 0.5))
"""Cases of a network: a model and the seconds that it computes."""
ALWAYS, IN_TURN = ("DDP float32", "OnebitAdam"), ("DDP bfloat16", "OnebitLamb", "ZeroOneAdam", "PowerSGD rank 4",
                                                  "sharded, int4 down")  # fmt: skip
WITHIN, TARGET = 0.10, 0.80
REPEATS = 3
STUCK_S = 600.0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--rates", nargs="+", default=list(RATES), metavar="RATE")
    add("--hosts", nargs="+", type=int, default=list(HOSTS), metavar="N")
    add("--models", nargs="+", type=number, default=list(MODELS), metavar="N", help="of the cases, those with these")
    add("--methods", nargs="+", choices=[m.name for m in METHODS], help="default: two in every case, five in turn")
    add("--repeats", type=int, default=REPEATS, help="steps whose median counts")
    add("--record", type=record_path, metavar="FILE", help="write the tables there, and the numbers beside it")
    add("--worker", metavar="FILE", help="be one rank; rank 0 writes there")
    return parser.parse_args(argv)


def cases_of(args: argparse.Namespace, network: int) -> list[tuple[float, float, list[str]]]:
    """(parameters, seconds of computing, contenders) on the network of this number."""
    chosen = []
    for k, (params, compute_s) in enumerate(COMPUTES):
        names = args.methods or [*ALWAYS, IN_TURN[(network + k) % len(IN_TURN)]]
        if params in args.models:
            chosen.append((params, compute_s, names))
    return chosen


# ---------------------------------------------------------------- one rank


def work(args: argparse.Namespace) -> None:
    """Sample, predict, then measure, on the hosts this rank finds itself among."""
    cases = json.loads(os.environ["PREDICT_CASES"])
    transport = comm.init("gloo")
    nodes = links.find_nodes(transport)
    slowest = min(link.bytes_per_s for link in links.measure(transport, nodes))
    taken: dict[tuple[float, str], list[samples.Sample]] = {}
    lines = []
    for params, compute_s, names in cases:
        shapes = samples.model_shapes(params)
        for method in (m for m in METHODS if m.name in names):
            if (params, method.name) not in taken:
                rows = samples.take_samples([method], shapes, transport, slowest)
                taken.update({(params, name): found for name, found in rows.items()})
            found = {method.name: taken[params, method.name]}
            predicted = samples.predictions([method], found, shapes, compute_s)[method.name]
            measured = samples.measure(method, shapes, transport, compute_s=compute_s, repeats=args.repeats)
            lines.append(
                {
                    "params": sum(samples.numels_of(shapes)), "compute_s": compute_s, "contender": method.name,
                    "predicted_s": predicted.hidden, "nothing_hidden_s": predicted.behind,
                    "measured_s": measured[method.name].seconds, "link_bytes_per_s": slowest,
                    "samples": [(one.elements, one.step.seconds, one.step.backward_s, one.step.update_s)
                                for one in taken[params, method.name]],
                }
            )  # fmt: skip
            if transport.rank == 0:
                Path(args.worker).write_text(json.dumps(lines))
    transport.close()


# ---------------------------------------------------------------- all networks


def run(args: argparse.Namespace) -> list[dict]:
    lines: list[dict] = []
    networks = [(hosts, rate) for rate in args.rates for hosts in args.hosts]
    for k, (hosts, rate) in enumerate(networks):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, Cluster(hosts, rate) as cluster:
            out = Path(folder) / "lines.json"
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(out), "--repeats"]
            environment = {"PREDICT_CASES": json.dumps(cases_of(args, k))}
            ended = cluster.run([*command, str(args.repeats)], launcher="none", env=environment, timeout_s=STUCK_S)
            if ended.status:
                raise SystemExit(f"the ranks on {hosts} hosts at {rate} ended with status {ended.status}")
            lines += [{"hosts": hosts, "rate": rate, **line} for line in json.loads(out.read_text())]
        print(f"{hosts} hosts at {rate}: {time.monotonic() - began:.0f} s", flush=True)
    return lines


def error_of(line: dict) -> float:
    return line["predicted_s"] / line["measured_s"] - 1.0


def by_case(lines: Sequence[dict]) -> dict[tuple, list[dict]]:
    cases: dict[tuple, list[dict]] = {}
    for line in lines:
        cases.setdefault((line["hosts"], line["rate"], line["params"], line["compute_s"]), []).append(line)
    return cases


def report(lines: Sequence[dict], command: str, seconds: float) -> str:
    """As Markdown."""
    cases = by_case(lines)
    good_lines = sum(abs(error_of(line)) <= WITHIN for line in lines)
    good = sum(all(abs(error_of(line)) <= WITHIN for line in members) for members in cases.values())
    text = [
        "# Predictions of `onebit doctor` against steps",
        "",
        f"{datetime.now(timezone.utc).date()}, revision {revision()}: `{command}`, {seconds:.0f} s. "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} at the end; torch {torch.__version__}.",
        "",
        f"Within {WITHIN:.0%}: {good} of {len(cases)} cases with all of their contenders "
        f"({good / len(cases):.0%}; wanted {TARGET:.0%}), {good_lines} of {len(lines)} predictions "
        f"({good_lines / len(lines):.0%}). Hosts are network namespaces with one rank each; computing is emulated by "
        "sleeping. Predicted from samples that were taken on the same network just before; measured: the median of "
        "whole steps, of the slowest rank.",
        "",
        "| hosts | rate | M parameters | computes s | contender | predicted s | measured s | error |",
        "| ---: | --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for members in cases.values():
        for line in members:
            mark = "" if abs(error_of(line)) <= WITHIN else " !"
            text.append(
                f"| {line['hosts']} | {line['rate']} | {line['params'] / 1e6:.2f} | {line['compute_s']:g} | "
                f"{line['contender']} | {line['predicted_s']:.3f} | {line['measured_s']:.3f} | "
                f"{error_of(line):+.1%}{mark} |"
            )
    return "\n".join(text) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.worker:
        work(args)
        return 0
    if (reason := available()) is not None:
        sys.exit(f"predict.py: {reason}")
    began = time.monotonic()
    lines = run(args)
    command = shlex.join(["python", "scripts/predict.py", *(sys.argv[1:] if argv is None else argv)])
    text = report(lines, command, time.monotonic() - began)
    print(text)
    if args.record is not None:
        write_record(args.record, text)
        write_record(args.record.with_suffix(".jsonl"), "".join(json.dumps(line) + "\n" for line in lines))
    cases = by_case(lines)
    good = sum(all(abs(error_of(line)) <= WITHIN for line in members) for members in cases.values())
    return 0 if good >= TARGET * len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
