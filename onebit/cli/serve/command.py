"""`onebit serve`: a model of transformers on a port, with OpenAI's interface."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import comm
from ...checkpoint.files import CheckpointError
from ...zero import ContinuousBatch, init_inference
from ...zero.inference.config import DTYPES
from .. import UserError
from ..numbers import seconds
from ..run import read_token

if TYPE_CHECKING:
    from .app import Served

log = logging.getLogger(__name__)

TOKEN = "ONEBIT_SERVE_TOKEN"
LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")
_ABOUT = """\
Serves a model of transformers: completions and chat completions in OpenAI's form, and a page to try it.

  onebit serve runs/llama --dtype int8
  torchrun --nproc-per-node 2 --no-python onebit serve runs/llama --tp 2
  torchrun --nproc-per-node 2 --no-python onebit serve runs/llama --pp 2
  curl 127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Once", "max_tokens": 20}'
"""
_EPILOG = f"""\
Requests join a running batch; each is answered as alone. Only this machine may ask, unless --host names an address of
it; then requests must have a token, from {TOKEN} or --token-file. There is no encryption: put a proxy with TLS before
a network that you do not trust. Ctrl+C or SIGTERM lets answers end, for --grace seconds. Exit status: 0 success; 1 the
model cannot be served, or a rank was lost; 2 wrong arguments.
"""


def _at_least(least: int) -> Any:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text!r}")
        return int(text)

    return count


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="onebit serve", description=_ABOUT, epilog=_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("model", help="folder of a model of transformers with its tokenizer, or its name")
    add("--name", help="the model's name in answers (default: the folder's)")
    add("--dtype", choices=DTYPES, help="of weights (default: the model's)")
    add("--tp", type=_at_least(1), default=1, metavar="RANKS", help="how many ranks compute each layer together")
    add("--pp", type=_at_least(1), default=1, metavar="RANKS", help="among how many ranks the layers are divided")
    add("--compile", action="store_true", help="compile the decode step; the first requests wait for it")
    add("--rows", type=_at_least(1), default=8, help="requests that are answered at once (default: %(default)s)")
    add("--tokens", type=_at_least(2), default=2048, help="most of a prompt with its answer (default: %(default)s)")
    add("--waiting", type=_at_least(0), default=64, help="requests that may wait for a row (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_at_least(0), default=8000, help="port; 0 takes a free one (default: %(default)s)")
    add("--token-file", type=Path, metavar="FILE", help=f"read the token from FILE (default: {TOKEN}, or none)")
    add(
        "--answer-timeout", type=seconds, default=600.0, metavar="SECONDS", help="for one answer (default: %(default)g)"
    )
    add("--grace", type=seconds, default=30.0, metavar="SECONDS", help="for answers at the end (default: %(default)g)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    try:
        import uvicorn

        from .app import Limits, make_app
        from .guard import Punctual
        from .worker import CLOSING, Worker
    except ImportError as error:
        raise UserError(f"a package is missing: {error}; pip install 'onebit[serve]'") from error
    token = read_token(args.token_file) if args.token_file else os.environ.get(TOKEN) or None
    is_local = _is_local(args.host)
    if not is_local and token is None:
        raise UserError(f"--host {args.host} lets other machines ask: set {TOKEN}, or give --token-file")
    transport = comm.init() if max(args.tp, args.pp) > 1 else None
    port = _bind(args.host, args.port) if transport is None or transport.rank == 0 else None
    try:
        served, engine = _load(args, transport)
        batch = ContinuousBatch(engine, args.rows)
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        why = " ".join(str(error).split())  # those of transformers have several lines
        raise UserError(f"{args.model} cannot be served: {why}") from error
    # Launchers send both to all ranks: those beside rank 0 end when it does. uvicorn handles them on rank 0 while it
    # runs, and then raises them again for whoever handled them before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    if port is None:
        assert transport is not None
        batch.follow()
        transport.close()
        return 0
    idle_s = 5.0 if transport is None else min(5.0, transport.timeout_s / 4)
    server: uvicorn.Server

    def stop() -> None:
        server.should_exit = True

    worker = Worker(batch, args.waiting, idle_s, stop)
    hosts = LOCAL if is_local else None
    limits = Limits(answer_s=args.answer_timeout, hosts=hosts)
    config = uvicorn.Config(
        make_app(served, worker, limits, token), http=Punctual, timeout_keep_alive=round(limits.read_s),
        log_config=None, access_log=False, server_header=False,
        timeout_graceful_shutdown=round(min(args.grace, 1e6)), limit_concurrency=args.rows + args.waiting + 64,
    )  # fmt: skip
    server = uvicorn.Server(config)
    log.info("onebit serve: %s at http://%s:%d", served.name, *port.getsockname()[:2])
    server.run(sockets=[port])
    if transport is not None and worker.failure == CLOSING:
        transport.close()
    return 0 if worker.failure in (None, CLOSING) else 1


def _bind(host: str, port: int) -> socket.socket:
    """A socket with this address, before the model is read, which may take minutes."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(f"--host {host} --port {port}: {getattr(error, 'strerror', None) or error}") from error
    return bound


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _load(args: argparse.Namespace, transport: comm.Transport | None) -> tuple[Served, Any]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"{error}; pip install 'onebit[serve]'") from error

    from .app import Served

    if not Path(args.model).exists():
        log.warning(
            "%s is no folder here: a model of this name on huggingface.co is served, of whoever owns it", args.model
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    ranks = {"tensor_parallel": {"tp_size": args.tp}, "pipeline_parallel": {"pp_size": args.pp}}
    keys = {"kernel_inject": args.compile, "max_out_tokens": args.tokens, **ranks}
    engine = init_inference(args.model, keys | ({"dtype": args.dtype} if args.dtype else {}), transport=transport)

    def chat(messages: list[dict[str, str]]) -> list[int]:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])

    def decode(tokens: list[int]) -> str:
        # Without the clean-up that some tokenizers ask for: it takes back spaces that an earlier piece has shown.
        return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    served = Served(
        name=args.name or re.split(r"[\\/]", args.model.rstrip("\\/"))[-1],
        slots=engine.slots,
        encode=lambda text: list(tokenizer(text)["input_ids"]),
        decode=decode,
        chat=chat if tokenizer.chat_template else None,
    )
    return served, engine
