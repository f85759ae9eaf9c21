"""The templates of scripts/clusters: what they start trains, and ends when a rank dies.

Slurm is a stub, pods and nodes are processes of this host.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import slurm_stub
import yaml
from ranks import free_port, python_of_forks

from onebit.comm.transports.mpi import import_mpi

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts/clusters"
PROGRAM = ROOT / "tests/scripts/cluster_program.py"
LINE = re.compile(r"^rank (\d+) of (\d+) over (.*): (\S+)$", re.MULTILINE)
BIN = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    """PATH: first with a python and a torchrun whose processes are forks, then with this environment's programs."""
    return os.environ | {"PATH": search_path(), "OMP_NUM_THREADS": "1"} | more


def search_path() -> str:
    return f"{python_of_forks().parent}:{BIN}:{os.environ['PATH']}"


def check(text: str, ranks: int, over: str) -> None:
    found = LINE.findall(text)
    assert sorted(int(rank) for rank, *_ in found) == list(range(ranks)), text
    assert {(int(size), transport.split(" ")[0]) for _, size, transport, _ in found} == {(ranks, over)}, text
    assert len({bits for *_, bits in found}) == 1, text


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.s[bh]*")))
def test_the_shell_reads_it(script: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / script], check=True)


def slurm(tmp_path: Path, script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """As sbatch would run it, on two nodes of one task each; both are this host."""
    slurm_stub.install(tmp_path)
    job = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "localhost,localhost",
        "SLURM_CPUS_PER_TASK": "1",
    }
    env = environment(**job, **more)
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    command = ["bash", FOLDER / script, PROGRAM, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["srun.sbatch", "torchrun.sbatch"])
def test_a_slurm_job_trains(tmp_path: Path, script: str) -> None:
    done = slurm(tmp_path, script)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, 2, "torch.distributed")


@pytest.mark.thorough
def test_a_slurm_job_ends_when_a_rank_dies(tmp_path: Path) -> None:
    done = slurm(tmp_path, "srun.sbatch", "--die")
    assert done.returncode == 7, done.stdout + done.stderr


def test_every_option_of_a_job_is_sbatchs() -> None:
    known = {
        *("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "output", "gpus-per-task", "gpus-per-node")
    }
    for script in FOLDER.glob("*.sbatch"):
        said = re.findall(r"^#+SBATCH --([a-z-]+)=\S+$", script.read_text(), re.MULTILINE)
        assert len(said) == len(re.findall("^#+SBATCH", script.read_text(), re.MULTILINE)) and set(said) <= known


def nodes_train(commands: list[list[str | Path]], environments: list[dict[str, str]]) -> None:
    """A command for each node; all nodes are this host, and the later ones wait for the first one's port."""
    started = [
        subprocess.Popen(
            command, env=environment(**more), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command, more in zip(commands, environments, strict=True)
    ]
    try:
        said = [process.communicate(timeout=90) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(commands), said
    check("".join(out for out, _ in said), len(commands), "torch.distributed")


def pods(name: str) -> list[dict]:
    """The objects of a manifest."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def command_of(pod: dict) -> tuple[list[str], dict[str, str]]:
    """What its container runs, with the test's program, and its environment."""
    (container,) = pod["spec"]["containers"]
    command = [word.replace("train.py", str(PROGRAM)) for word in container["command"]]
    return command, {entry["name"]: entry["value"] for entry in container["env"]} | {"OMP_NUM_THREADS": "1"}


def test_a_kubernetes_job_trains() -> None:
    """Its pods call torchrun.sh, as nodes without a scheduler do."""
    service, job = pods("job.yaml")
    spec, name = job["spec"], job["metadata"]["name"]
    command, env = command_of(spec["template"])
    assert env["NODES"] == str(spec["completions"]) == str(spec["parallelism"]) and spec["completionMode"] == "Indexed"
    assert (
        service["metadata"]["name"] == spec["template"]["spec"]["subdomain"] and service["spec"]["clusterIP"] == "None"
    )
    assert service["spec"]["selector"] == {"job-name": name}
    first = f"{name}-0.{service['metadata']['name']}"
    assert sum(word.count(first) for word in command) == 1
    env |= {"PORT": str(free_port()), "PATH": f"{FOLDER}:{search_path()}"}
    nodes_train(
        [[word.replace(first, "127.0.0.1") for word in command]] * 2,
        [env | {"JOB_COMPLETION_INDEX": str(node)} for node in range(2)],
    )


def test_a_pytorch_job_trains() -> None:
    """With the variables that the operator sets."""
    (job,) = pods("pytorchjob.yaml")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert [(name, replica["replicas"]) for name, replica in replicas.items()] == [("Master", 1), ("Worker", 1)]
    commands, environments = zip(*(command_of(replica["template"]) for replica in replicas.values()), strict=True)
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    nodes_train(list(commands), [env | ranks | {"RANK": str(k)} for k, env in enumerate(environments)])


def test_skypilots_task_trains() -> None:
    (task,) = pods("sky.yaml")
    run = task["run"].replace("scripts/train.py", str(PROGRAM))
    ranks = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    ranks |= {"SKYPILOT_NUM_GPUS_PER_NODE": "0", "PORT": str(free_port())}
    nodes_train([["bash", "-euc", run]] * 2, [ranks | {"SKYPILOT_NODE_RANK": str(node)} for node in range(2)])


def test_kubernetes_schemas_accept_the_manifests() -> None:
    """The pods of Kubeflow's job count as pods: its own schema is in no package."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate: 108 MB")
    replicas = pods("pytorchjob.yaml")[0]["spec"]["pytorchReplicaSpecs"].values()
    wrapped = [{"apiVersion": "v1", "kind": "Pod", **replica["template"]} for replica in replicas]
    for manifest in [*pods("job.yaml"), *wrapped]:
        kubernetes.validate(manifest, "1.33", strict=True)


def test_torchrun_without_words_says_how() -> None:
    done = subprocess.run([FOLDER / "torchrun.sh", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "NODE NODES FIRST_HOST SCRIPT" in done.stderr


def local_hosts(template: str, tmp_path: Path) -> Path:
    """The template's first line of a node, for two ranks on this host. Its nodes have a line of the same form each."""
    lines = [line for line in (FOLDER / template).read_text().splitlines() if not line.startswith("#")]
    assert [line.replace("node2", "node1") for line in lines] == [lines[0]] * 2
    hosts = tmp_path / template
    hosts.write_text(lines[0].replace("node1", "localhost").replace("1", "2") + "\n")
    return hosts


def test_open_mpi_takes_the_hosts(tmp_path: Path) -> None:
    assert "Open MPI" in import_mpi().Get_library_version()
    hosts = local_hosts("hosts.openmpi", tmp_path)
    command = ["mpirun", "--allow-run-as-root", "--hostfile", hosts, "-x", "OMP_NUM_THREADS=1", "python", PROGRAM]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, 2, "MPI")


@pytest.mark.thorough
def test_mpich_takes_the_hosts_and_trains(tmp_path: Path) -> None:
    """MPICH of its own, from the index that everything here comes from, beside this environment's torch."""
    venv.create(tmp_path / "mpich")  # without pip, which would take 5 s of CPU: this environment's installs into it
    python = tmp_path / "mpich/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "mpich", "mpi4py"], check=True, timeout=110)
    beside = next((tmp_path / "mpich/lib").glob("python*/site-packages")) / "beside.pth"
    beside.write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + f"\n{ROOT}\n")
    hosts = local_hosts("hosts.mpich", tmp_path)
    command = [python.with_name("mpiexec"), "-f", hosts, "-n", "2", "-genv", "OMP_NUM_THREADS", "1", python, PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, 2, "MPI")


def test_the_image_installs_what_there_is() -> None:
    """A workflow builds it. Its commands name extras, files and an entry that exist; torch's index is torch's alone."""
    text = (FOLDER / "Dockerfile").read_text()
    assert "PIP_INDEX_URL" not in text and text.count("TORCH_INDEX:+") == 1
    extras = re.search(r'"/src\[([a-z,]+)\]"', text)
    assert extras is not None
    listing = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        assert f"\n{extra} = [" in listing
    for file in re.findall(r"/src/(\S+)", text.replace('"/src[', "")):
        assert (ROOT / file).is_file(), file
    for line in re.findall(r"^CMD (.*)$|^ENTRYPOINT (.*)$", text, re.MULTILINE):
        json.loads("".join(line))
