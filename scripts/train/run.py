"""Train a small GPT on Python's standard library, on any number of ranks, with dense AdamW or with a one-bit optimizer.

A run is a function of its arguments and its number of ranks: the windows of text that a rank reads are seeded by
(seed, step, rank), so a resumed run continues to the bit. Ctrl-C, SIGTERM or SIGUSR1 ends all ranks after the same
step, with a checkpoint where one was asked for. Open MPI's mpirun kills its ranks 0.2 s after a Ctrl-C or SIGTERM,
which may be less than a step: there, `kill -USR1` mpirun. The model is in `model.py`, the optimizers with their traffic
in `methods.py` and `zero_method.py`, the text in `corpus.py`, the outputs in `report.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from onebit import comm
from onebit.cli.cluster import sent_on_wire
from onebit.comm.launch import Launch, detect
from onebit.comm.messages import gather_bytes, raise_on_all_ranks
from onebit.zero.config.optimizers import optimizer_flags
from onebit.zero.config.reader import write_block
from onebit.zero.config.schema import Key, keys_of
from onebit.zero.sparse_attention import read_sparsity
from train.checkpoint import CheckpointError
from train.corpus import Corpus, first_difference, read_corpus
from train.methods import SHARDED_ONLY, Method, RunCheckpoints, build_method, rising, size_of
from train.model import SIZES
from train.report import PROGRESS, Report, Row

EXIT_INTERRUPTED = 130
_VALIDATION_WINDOWS = 64
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
_WIRES = [name for name in comm.CODECS if name != "fp32"]
_FIXED_ON_RESUME = (
    "optimizer", "size", "seed", "batch_size", "accumulate", "steps", "lr", "warmup_lr_fraction", "weight_decay",
    "max_grad_norm", "compression", "codec", "warmup_codec", "local_steps", "outer_lr", "outer_momentum",
    "correction_steps", "differences", "context", "sparse_attention", "delay",
    "drop_tokens", "seqlen_from", "easy_until",
)  # fmt: skip

log = logging.getLogger("train")


class Windows:
    """Windows of text: pieces of context + 1 bytes. A training batch is a function of (seed, step, rank, part)."""

    def __init__(self, corpus: Corpus, context: int, device: torch.device | str = "cpu"):
        self._train = torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
        self._validation = torch.frombuffer(bytearray(corpus.validation), dtype=torch.uint8)
        self._device = device
        self._length = context + 1

    def training(self, batch_size: int, seed: int, step: int, rank: int, part: int) -> Tensor:
        """int64 [batch_size, context + 1], from random places."""
        digest = sha256(f"{seed}/{step}/{rank}/{part}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        starts = torch.randint(len(self._train) - self._length, (batch_size,), generator=generator)
        return self._cut(self._train, starts)

    def validation(self, rank: int, world_size: int, windows: int = _VALIDATION_WINDOWS) -> Tensor:
        """int64 [n, context + 1]: this rank's share of a fixed set, spread evenly over the held-out text."""
        starts = torch.linspace(0, len(self._validation) - self._length, windows).long()
        return self._cut(self._validation, starts[rank::world_size])

    def _cut(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts[:, None] + torch.arange(self._length)].to(self._device).long()


class Interrupt:
    """Turns a Ctrl-C, SIGTERM or SIGUSR1 into a wish that the ranks act on together; a second Ctrl-C kills at once.

    A launcher may send SIGTERM after a Ctrl-C of its own accord, so only Ctrl-C counts as a second one.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, self._receive)

    def __call__(self) -> bool:
        return self.is_wanted

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.is_wanted = True
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class Training:
    """One run on one rank. `run` is the loop; everything it calls is called by all ranks."""

    def __init__(self, args: argparse.Namespace, transport: comm.Transport, is_stop_wanted: Callable[[], bool]):
        self.args, self.transport, self._is_stop_wanted = args, transport, is_stop_wanted
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
        )
        self.corpus = _read_same_corpus(args.manifest, transport, self.device)
        self.windows = Windows(self.corpus, size_of(args).context, self.device)
        self.method: Method = build_method(args, transport, self.device)
        self.first_step = 0
        self.checkpoints = None if args.checkpoint is None else self.method.checkpoints(args.checkpoint)
        if self.checkpoints is not None:
            self._resume_or_refuse(self.checkpoints)

    def run(self, report: Report) -> bool:
        """Train to the last step; False where a signal ended it early (then with a checkpoint, if there are any)."""
        last_step = self.args.steps if self.args.stop_after is None else min(self.args.stop_after, self.args.steps)
        for step in range(self.first_step, last_step):
            row, is_stop = self._step(step)
            done = step + 1
            is_last = done == last_step or is_stop
            if done % self.args.eval_every == 0 or done == self.args.steps:
                row.val_loss = self.validate()
                row.error_norm_ratio = self.method.error_norm_ratio()
            report.add(row)
            if self.checkpoints is not None and (is_last or done % self.args.checkpoint_every == 0):
                self._save(self.checkpoints, done)
            if is_stop and done < last_step:
                where = "" if self.checkpoints is None else f", saved in {self.checkpoints.folder}"
                log.info("stopped after step %d%s", done, where)
                return False
        return True

    def validate(self) -> float:
        """Mean loss over the fixed held-out windows, in nats per byte, the same on every rank. Synchronises."""
        self.method.synchronise()
        layers = [] if self.method.dropping is None else list(self.method.dropping.layers.values())
        for layer in layers:
            layer.eval()  # with all tokens
        try:
            return self._validate()
        finally:
            for layer in layers:
                layer.train()

    def _validate(self) -> float:
        share, shares = self.method.data
        count = _VALIDATION_WINDOWS
        if self.args.pipe is not None:  # which takes parts of one size
            each = shares * self.args.accumulate
            count = -(-count // each) * each
        return self.method.evaluate(self.windows.validation(share, shares, count))

    def _step(self, step: int) -> tuple[Row, bool]:
        """Advance by one step. The row tells of all ranks' losses; the flag says whether any rank wants to stop."""
        start, sent_before, wire_before = time.perf_counter(), self._sent_bytes(), sent_on_wire()
        lr = float(self.method.schedule.get_last_lr()[0])
        batch_size, seed, share = self.args.batch_size, self.args.seed, self.method.data[0]
        parts = [self.windows.training(batch_size, seed, step, share, k) for k in range(self.args.accumulate)]
        if self.args.seqlen_from is not None:
            length = rising(self.args, self.args.seqlen_from)(step + 1)
            parts = [windows[:, : length + 1] for windows in parts]
        if self.method.dropping is not None:
            self.method.dropping.advance(step)
        loss = self.method.train(parts)
        exchange = self.method.step()
        pulse = struct.pack("<?d", self._is_stop_wanted(), loss)
        pulses = [struct.unpack("<?d", said) for said in gather_bytes(self.transport, pulse, self.device)]
        sent_bytes, wire_after = self._sent_bytes() - sent_before, sent_on_wire()
        row = Row(
            step=step + 1,
            loss=sum(loss for _, loss in pulses) / len(pulses),
            lr=lr,
            sent_bytes=sent_bytes,
            bits_per_parameter=8 * sent_bytes / (self.method.parameters * self.method.share),
            comm_ms=exchange.comm_ms,
            step_s=time.perf_counter() - start,
            phase=exchange.phase,
            skipped=exchange.skipped_steps,
            wire_bytes=None if wire_before is None or wire_after is None else wire_after - wire_before,
        )
        return row, any(is_wanted for is_wanted, _ in pulses)

    def _sent_bytes(self) -> int:
        return sum(transport.sent_bytes for transport in self.method.transports)

    def _save(self, checkpoints: RunCheckpoints, step: int) -> None:
        checkpoints.save(step, {"args": _fixed(self.args), "corpus": self.corpus.sha256})

    def _resume_or_refuse(self, checkpoints: RunCheckpoints) -> None:
        if not self.args.resume:
            if not checkpoints.is_empty():
                raise CheckpointError(f"{checkpoints.folder} holds a run: add --resume, or name another folder")
            return
        step = checkpoints.load(lambda about: _check_same_run(self.args, self.corpus, about))
        if step is None:
            log.info("no checkpoint in %s: starting at step 0", checkpoints.folder)
            return
        self.first_step = step
        log.info("resumed after step %d of %d", self.first_step, self.args.steps)


def _read_same_corpus(manifest: Path | None, transport: comm.Transport, device: torch.device) -> Corpus:
    """The corpus. Raises ValueError, on all ranks, where one has another text than the manifest or than rank 0."""
    corpus = read_corpus()
    problem = None
    if manifest is not None and (difference := first_difference(corpus, manifest)) is not None:
        problem = f"{difference}; use that Python, or leave --manifest out to train on the text that is here"
    raise_on_all_ranks(transport, problem, ValueError, device)
    hashes = gather_bytes(transport, corpus.sha256.encode(), device)
    if len(set(hashes)) > 1:
        other = next(rank for rank, sha in enumerate(hashes) if sha != hashes[0])
        raise ValueError(f"rank {other} has another corpus than rank 0: all hosts need the same Python version")
    return corpus


def _fixed(args: argparse.Namespace) -> dict:
    names = [*_FIXED_ON_RESUME, *_optimizer_keys(), *(() if args.zero is None else ("dtype",))]
    return {name: getattr(args, name) for name in names}


def _check_same_run(args: argparse.Namespace, corpus: Corpus, shared: dict) -> None:
    """Raise CheckpointError where a resumed run would not be the interrupted one continued."""
    if not (isinstance(shared.get("args"), dict) and isinstance(shared.get("corpus"), str)):
        raise CheckpointError("the checkpoint does not say which run it is of: it is no checkpoint of train.py")
    for name, now in _fixed(args).items():
        then = shared["args"].get(name, now)  # not in the first checkpoints
        if then != now:
            flag = _flag_of(name)
            raise CheckpointError(
                f"the checkpoint's run had {flag} {then}, this one has {now}; resume with {flag} {then}"
            )
    if corpus.sha256 != shared["corpus"]:
        raise CheckpointError(f"the checkpoint's run read another text (corpus {shared['corpus'][:12]}...)")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--optimizer", choices=(*optimizer_flags(), SHARDED_ONLY), default="onebit-adam")
    add("--size", choices=SIZES, default="small")
    add("--context", type=_positive, metavar="BYTES", help="of a sequence; else as --size has it")
    add(
        "--sparse-attention",
        type=_sparsity,
        metavar="MODE",
        help='attend by blocks: a mode, or the block of a DeepSpeed JSON, as {"mode": "fixed", "block": 32}',
    )
    add("--steps", type=_positive, default=200)
    add("--batch-size", type=_positive, default=8, help="sequences per rank, step and part")
    add("--accumulate", type=_positive, metavar="K", help="parts per step, whose gradients add up; else --pipe's, or 1")
    add("--lr", type=float, default=1e-3)
    add("--warmup-lr-fraction", type=float, default=0.1, help="share of the steps in which the learning rate rises")
    add("--weight-decay", type=float, default=0.01)
    for key, flags in _optimizer_keys().items():
        entry = optimizer_flags()[flags[0]]
        default = getattr(entry.params(), key)
        text = f"{', '.join(flags)}: {entry.flag_keys[key]} (default: {default})"
        add(_flag_of(key), type=partial(_value, keys_of(entry.params)[key]), default=default, help=text)
    add("--zero", type=int, choices=(0, 1, 2, 3), help="shard: optimizer state, also gradients, also parameters")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="with --zero: compute in it")
    add("--ranks-per-node", type=_positive, metavar="N", help="with --zero: shard over so many; else the launcher's")
    add(
        "--tensor",
        type=_positive,
        default=1,
        metavar="N",
        help="with --zero: so many ranks compute each layer together",
    )
    add("--sequence", type=_positive, default=1, metavar="N", help="with --zero: ranks that share each sequence")
    add("--pipe", type=_positive, metavar="N", help="with --zero: so many stages; 1: a run that others can go on with")
    add("--schedule", choices=_SCHEDULES, default="1f1b", help="with --pipe: the order of --accumulate micro-batches")
    add("--activations", choices=_WIRES, help="with --pipe: what goes from stage to stage; else as it is computed")
    add("--activation-gradients", choices=_WIRES, help="with --pipe: what comes back")
    add("--recompute", type=int, default=0, metavar="K", help="with --pipe: keep activations of every K-th layer only")
    add("--codec", choices=comm.momentum_codecs(), default="sign", help="one-bit optimizers: what momentum travels in")
    add("--warmup-codec", choices=comm.CODECS, help="what their gradients travel in; else the optimizer's default")
    add("--compression", choices=("auto", "always"), default="auto", help="auto: bfloat16 where one bit gains nothing")
    add("--delay", type=int, choices=(0, 1), default=0, help="1: onebit-adam's exchange travels under the next step")
    add(
        "--local-steps",
        type=_interval,
        metavar="H",
        help="a dense optimizer on each rank, a round every H steps; or auto",
    )
    add("--differences", choices=comm.CODECS, default="sign", help="with --local-steps: what a round travels in")
    add("--outer-lr", type=float, default=1.0, help="with --local-steps: of the mean difference; DiLoCo's is 0.7")
    add("--outer-momentum", type=float, default=0.0, help="with --local-steps: Nesterov's; DiLoCo's is 0.9")
    add(
        "--correction-steps",
        type=int,
        default=0,
        metavar="N",
        help="with --local-steps: of SCAFFOLD's correction, 80 for one; 0: none",
    )
    add("--max-grad-norm", type=float, default=0.0, help="clip the gradient's norm here; 0 does not")
    add("--drop-tokens", type=_positive, metavar="N", help="middle layers keep N tokens at first; see --easy-until")
    add("--seqlen-from", type=_positive, metavar="N", help="sequences have N tokens at first; see --easy-until")
    add("--easy-until", type=float, default=0.5, metavar="SHARE", help="of the steps, then all tokens are there")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--seed", type=int, default=0)
    add("--eval-every", type=_positive, default=25, metavar="STEPS")
    add("--manifest", type=Path, metavar="FILE", help="refuse to train on another text than this one")
    add("--checkpoint", type=Path, metavar="DIR", help="save here at the end, on Ctrl-C and every --checkpoint-every")
    add("--checkpoint-every", type=_positive, default=100, metavar="STEPS")
    add("--keep-checkpoints", type=_positive, metavar="N", help="keep this run's newest N checkpoints; else all")
    add("--resume", action="store_true", help="continue from --checkpoint where there is one")
    add("--stop-after", type=_positive, metavar="STEP", help="end after this step; --resume goes on from there")
    add("--csv", type=Path, metavar="FILE", help="one line per step")
    add("--json", type=Path, metavar="FILE", help="a summary at the end")
    add("--tensorboard", type=Path, metavar="DIR")
    add("--progress", choices=PROGRESS, default="auto", help="auto: a bar on a terminal, otherwise lines")
    args = parser.parse_args(argv)
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR")
    needs_engine = args.ranks_per_node or args.tensor > 1 or args.sequence > 1 or args.pipe
    if args.zero is None and (args.dtype != "fp32" or needs_engine):
        parser.error("--dtype, --ranks-per-node, --tensor, --sequence and --pipe need --zero; --zero 0 shards nothing")
    if args.optimizer == SHARDED_ONLY and args.zero not in (1, 2):
        parser.error(f"--optimizer {SHARDED_ONLY} needs --zero 1 or --zero 2")
    if args.local_steps is not None and args.zero is not None:
        parser.error("--local-steps goes without --zero: the engine averages gradients in every step")
    if args.delay and args.optimizer != "onebit-adam":
        parser.error(f"--delay goes with --optimizer onebit-adam, got {args.optimizer}")
    size = size_of(args)
    if args.drop_tokens is not None and size.layers < 3:
        parser.error(f"--drop-tokens: --size {args.size} has no layer between the first and the last")
    if max(args.drop_tokens or 1, args.seqlen_from or 1) > size.context:
        parser.error(f"--drop-tokens and --seqlen-from: a sequence has {size.context} tokens")
    if not 0 < args.easy_until <= 1:
        parser.error(f"--easy-until: expected a share of the steps, above 0 and at most 1, got {args.easy_until:g}")
    if args.accumulate is None:  # a pipeline's schedule needs a part for each stage
        args.accumulate = args.pipe or 1
    return args


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _interval(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _sparsity(text: str) -> dict[str, object]:
    """The block "sparse_attention" of a mode's name, or of JSON; all of its keys."""
    try:
        given = json.loads(text) if text.lstrip().startswith("{") else {"mode": text}
        return write_block(read_sparsity(given))
    except (TypeError, ValueError) as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from wrong


def _optimizer_keys() -> dict[str, list[str]]:
    """The hyper-parameters that have a flag of their own, and the optimizers that take them."""
    takers: dict[str, list[str]] = {}
    for flag, entry in optimizer_flags().items():
        for key in entry.flag_keys:
            takers.setdefault(key, []).append(flag)
    return takers


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value(rule: Key, text: str) -> object:
    """A number or a word, as the configuration's key takes it."""
    try:
        value: float | str = float(text)
    except ValueError:
        value = text
    try:
        return rule.read(value, "value")
    except (TypeError, ValueError) as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from wrong


def set_threads(launch: Launch) -> None:
    """Share this host's cores among its ranks, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (launch.local_size or 1)))


def connect(args: argparse.Namespace, launch: Launch) -> comm.Transport:
    """The transport of this launch for tensors on --device. With --zero torch.distributed's, as FSDP2 needs it."""
    if args.zero is not None:
        return comm.init("nccl" if args.device == "cuda" else "gloo", levels=1)
    if args.device == "cuda" or launch.launcher == "a single process":
        return comm.init()
    return comm.init("mpi" if launch.is_mpi else "gloo")


def train(args: argparse.Namespace, transport: comm.Transport, is_stop_wanted: Callable[[], bool]) -> int:
    """Run as one rank over `transport`; the exit code. Raises ValueError, CheckpointError, OverflowError."""
    torch.manual_seed((args.seed << 20) + transport.rank)  # torch's own seed is another in every process
    training = Training(args, transport, is_stop_wanted)
    with Report(args, transport, training.corpus, training.method.parameters, training.first_step) as report:
        is_whole = training.run(report)
    training.method.close()
    return 0 if is_whole else EXIT_INTERRUPTED


def main() -> int:
    args = parse_args()
    interrupt = Interrupt()
    launch = detect(os.environ)
    if args.progress == "auto" and launch.is_mpi:
        args.progress = "lines"  # mpirun gives every rank a terminal of its own, whatever the output goes to
    is_first = launch.rank == 0
    logging.basicConfig(level=logging.INFO if is_first else logging.WARNING, format="%(message)s", stream=sys.stdout)
    set_threads(launch)
    transport = connect(args, launch)
    try:
        code = train(args, transport, interrupt)
    except comm.PeerError as error:
        log.error("train.py: %s", error)
        return 1
    except (CheckpointError, ImportError, OverflowError, ValueError) as error:
        if is_first:
            log.error("train.py: %s", error)
        code = 2
    transport.close()
    return code
