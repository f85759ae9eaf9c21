"""`onebit serve` as a command: a model of transformers over one and two ranks, how it ends, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import byte_llama
import pytest
import ranks

from onebit.cli import UserError
from onebit.cli import main as onebit_command
from onebit.cli.serve.command import _load, _parse
from onebit.cli.serve.command import main as serve
from onebit.cli.serve.text import Text
from onebit.zero import init_inference

for needed in ("fastapi", "transformers"):
    pytest.importorskip(needed, reason="pip install onebit[serve]")
httpx = pytest.importorskip("httpx")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """1.2 s of CPU for each server otherwise."""
    modules = ("transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5", "onebit.cli.serve.app")
    ranks.preload(*modules, "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama.save(tmp_path_factory.mktemp("served") / "little-llama")


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama.save_t5(tmp_path_factory.mktemp("served") / "little-t5")


@contextmanager
def served(folder: Path, *words: str, port: int, world: int = 1) -> Iterator[list[Any]]:
    """The ranks of a server that answers. They are killed at the end."""
    told = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    told = told | {"MASTER_PORT": str(ranks.free_port())} if world > 1 else {}
    started, output = [], folder / "output"
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        started.append(ranks.start("serve", *words, "--port", str(port), output=output, **told, **own))
    try:
        end = time.monotonic() + 90
        while True:
            with _quiet():
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                    break
            assert all(each.poll() is None for each in started) and time.monotonic() < end, output.read_text()
            time.sleep(0.2)
        yield started
    finally:
        for each in started:
            each.kill()


@contextmanager
def _quiet() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError:
        return


def ask(port: int, path: str = "completions", **fields: object) -> httpx.Response:
    fields = {"max_tokens": 12, "temperature": 0} | fields
    return httpx.post(f"http://127.0.0.1:{port}/v1/{path}", json=fields, timeout=30)


def expected(model: Path) -> str:
    answer = init_inference(str(model)).generate([list(b"abc")], max_new_tokens=1)
    assert len(answer[0]) == 4
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokens = init_inference(str(model)).generate([tokenizer("Once")["input_ids"]], max_new_tokens=12)[0]
    return str(tokenizer.decode(tokens.tolist()[4:], skip_special_tokens=True))


def test_a_server_answers_and_ends_by_a_signal(model: Path, tmp_path: Path) -> None:
    port, text = ranks.free_port(), expected(model)
    with served(tmp_path, str(model), "--tokens", "64", port=port) as (process,):
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["id"] == "little-llama"
        assert ask(port, prompt="Once").json()["choices"][0]["text"] == text
        talk = [{"role": "user", "content": "Once"}]
        assert ask(port, "chat/completions", messages=talk).json()["choices"][0]["message"]["content"] == text
        fields = {"prompt": "Once", "max_tokens": 50, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=fields, timeout=30) as streamed:
            process.send_signal(signal.SIGTERM)  # the answer under way is ended
            assert b"".join(streamed.iter_raw()).endswith(b"data: [DONE]\n\n")
        assert process.wait(40) == 0


@pytest.mark.parametrize("way", ["--tp", "--pp"])
@pytest.mark.parametrize("lost", [None, 1])
def test_two_ranks_answer_as_one_and_end_together(model: Path, tmp_path: Path, way: str, lost: int | None) -> None:
    """By rows of each layer, and by layers."""
    port = ranks.free_port()
    words = (str(model), way, "2", "--tokens", "64", "--dtype", "fp32")
    with served(tmp_path, *words, port=port, world=2) as processes:
        assert ask(port, prompt="Once").json()["choices"][0]["text"] == expected(model)
        if lost is None:  # launchers and Ctrl+C send it to all of them
            for process in processes:
                process.send_signal(signal.SIGTERM)
            assert [process.wait(60) for process in processes] == [0, 0]
        else:  # rank 0 sees it by its next message, and ends
            processes[lost].kill()
            with _quiet():
                assert ask(port, prompt="Once").status_code == 503
            assert processes[0].wait(60) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_a_server_of_an_encoder_decoder(translator: Path, tmp_path: Path, world: int) -> None:
    """Texts of unlike lengths at once, of which some are drawn; each answer is that of the text alone."""
    port, texts = ranks.free_port(), ["Once", "a", "Once upon a time there was", "b" * 64]
    engine = init_inference(str(translator), max_out_tokens=64)
    tokenizer = byte_llama.tokenizer_of_bytes()

    def alone(text: str, **how: Any) -> str:
        (answer,) = engine.generate([tokenizer(text)["input_ids"]], max_new_tokens=20, **how)
        return str(tokenizer.decode(answer.tolist(), skip_special_tokens=True))

    words = ("--tp", "2") if world > 1 else ()
    with served(tmp_path, str(translator), "--tokens", "64", *words, port=port, world=world):
        for how, options in (
            ({"temperature": 0}, {}),
            ({"temperature": 1.5, "seed": 3}, {"do_sample": True, "temperature": 1.5, "seed": 3}),
        ):
            with ThreadPoolExecutor(len(texts)) as pool:
                given = list(pool.map(lambda text, how=how: ask(port, prompt=text, max_tokens=20, **how).json(), texts))
            assert [one["choices"][0]["text"] for one in given] == [alone(text, **options) for text in texts]
        assert given[2]["usage"]["prompt_tokens"] == len(texts[2])
        assert "do not fit" in ask(port, prompt="b" * 65).json()["error"]["message"]
        talk = [{"role": "user", "content": "Once"}]
        assert "no chat template" in ask(port, "chat/completions", messages=talk).json()["error"]["message"]


def test_a_model_that_encodes_speech_is_refused_by_name(tmp_path: Path) -> None:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=258, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, num_mel_bins=8,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=8, pad_token_id=0,
        bos_token_id=0, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    byte_llama.tokenizer_of_bytes().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot be served: WhisperForConditionalGeneration encodes input_features"):
        serve([str(tmp_path), "--port", str(ranks.free_port())])


def test_pieces_are_whole_if_the_tokenizer_cleans_up_spaces(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    asks = ("clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | dict.fromkeys(asks, True)))
    about, _ = _load(_parse([str(folder)]), None)
    said = "I do n't know , it ' s . Yes"
    tokens, text = about.encode(said), Text(about.decode)
    pieces = [text.piece(tokens[:n], is_last=n == len(tokens)) for n in range(1, len(tokens) + 1)]
    assert "".join(pieces) == about.decode(tokens) == said


def test_a_name_that_is_no_folder_may_be_a_strangers(caplog: pytest.LogCaptureFixture) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name} is not there")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="runs/mistyped cannot be served"):
        patch.setattr("transformers.AutoTokenizer.from_pretrained", absent)
        serve(["runs/mistyped", "--port", "0"])
    assert "runs/mistyped is no folder here" in caplog.text


def test_what_is_refused(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="lets other machines ask"):
        serve([str(model), "--host", "0.0.0.0"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="lets other machines ask"):
        patch.setenv("ONEBIT_SERVE_TOKEN", "")  # an empty token is none
        serve([str(model), "--host", "0.0.0.0"])
    with pytest.raises(UserError, match="0-65535"):
        serve([str(model), "--port", "70000"])
    with pytest.raises(UserError, match=r"cannot be served: [^\n]+\Z"):
        serve([str(tmp_path)])
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        serve([str(model), "--token-file", str(tmp_path / "token")])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=r"uvicorn.*onebit\[serve\]"):
        patch.setitem(sys.modules, "uvicorn", None)
        serve([str(model)])
    for wrong in (["--rows", "0"], ["--dtype", "int3"], ["--answer-timeout", "-1"]):
        with pytest.raises(SystemExit):
            serve([str(model), *wrong])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status = onebit_command(["serve", str(model), "--port", str(taken.getsockname()[1])])
    assert status == 1 and "Address already in use" in capfd.readouterr().err
