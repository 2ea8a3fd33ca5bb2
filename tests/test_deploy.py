"""The examples in ``deploy/`` decide as the exit codes mean it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ttp.config import Config
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED

DEPLOY = Path(__file__).parents[1] / "deploy"


JOBSET = "\n".join(line.partition(" # ")[0] for line in (DEPLOY / "kubernetes-jobset.yaml").read_text().split("\n"))
"""Without comments. Read with patterns: nothing that the tests need anyway reads YAML."""


def section(begin: str, end: str) -> list[str]:
    """The items of the list of rules between two keys."""
    _, _, rest = JOBSET.partition(f"{begin}:\n")
    rules = rest.partition(f"{end}:\n")[0].partition("rules:")[2]
    return re.split(r"\n +- (?=name|action)", rules)[1:]


def message(code: int, *, evicted: bool = False) -> str:
    """What the Job controller says of a pod, after the first rule that fits."""
    for index, rule in enumerate(section("podFailurePolicy", " template")):
        assert rule.startswith("action: FailJob") and ("onExitCodes" in rule) != ("onPodConditions" in rule)
        found = re.search(r"containerName: train, operator: In, values: \[([0-9, ]+)\]", rule)
        codes = [int(word) for word in found[1].split(",")] if found else []
        assert codes == sorted(codes) and 0 not in codes
        if code in codes:
            return f"Container train for pod ns/p failed with exit code {code} matching FailJob rule at index {index}"
        if evicted and '{ type: DisruptionTarget, status: "True" }' in rule:
            return f"Pod ns/p has condition DisruptionTarget matching FailJob rule at index {index}"
    return ""


def action(said: str) -> str:
    """What JobSet does: the first rule that fits, else a restart that is counted."""
    rules = section("failurePolicy", " replicatedJobs")
    assert len(rules) == 2
    for rule in rules:
        assert rule.startswith("name: "), "the CRD requires a name"
        assert "onJobFailureReasons: [PodFailurePolicy]" in rule
        _, _, patterns = rule.partition("onJobFailureMessagePatterns:")
        if said and any(re.search(pattern, said) for pattern in re.findall(r'"([^"]+)"', patterns)):
            return str(re.findall(r"action: (\w+)", rule)[0])
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("code", "evicted", "wanted"),
    [
        (EXIT_BAD_CONFIG, False, "FailJobSet"),
        (EXIT_NOT_SAVED, False, "FailJobSet"),
        (EXIT_BAD_CONFIG, True, "FailJobSet"),
        (EXIT_SAVED, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (EXIT_SAVED, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (137, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (1, False, "RestartJobSet"),
    ],
)
def test_jobset_counts_neither_saves_nor_evictions(code: int, evicted: bool, wanted: str) -> None:
    assert action(message(code, evicted=evicted)) == wanted


def test_jobset_leaves_the_time_to_save() -> None:
    grace_s = float(re.findall(r"terminationGracePeriodSeconds: (\d+)", JOBSET)[0])
    patience_s = float(re.findall(r'name: TTP_OT, value: "(\d+)"', JOBSET)[0])
    assert grace_s > patience_s >= Config().rescue_patience_s
    assert "restartPolicy: Never" in JOBSET and "backoffLimit: 0" in JOBSET


@pytest.mark.parametrize("srun", [0, 75, 64, 137])
@pytest.mark.parametrize(("verdict", "requeued"), [(0, False), (75, True), (70, False), (64, False)])
@pytest.mark.parametrize("by_exit", [False, True])
def test_slurm_decides_by_the_verdict(tmp_path: Path, srun: int, verdict: int, requeued: bool, by_exit: bool) -> None:
    """Whatever srun returns, which is the largest of many exit codes."""
    programs = {
        "srun": f"exit {srun}",
        "ttp": f'echo "ttp $*" >> {tmp_path}/calls; exit {verdict}',
        "scontrol": f'[ "$1" = show ] && echo n1 || echo "scontrol $*" >> {tmp_path}/calls',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_NNODES": "1",
        "HOME": str(tmp_path),
        "TTP_TOKEN_FILE": str(tmp_path / "srun"),
    }
    env |= {"SLURM_JOB_NODELIST": "n1", "SAVE_DIR": "/checkpoints"} | ({"REQUEUE_BY_EXIT": "1"} if by_exit else {})
    done = subprocess.run(["bash", str(DEPLOY / "slurm.sbatch")], env=env, capture_output=True, check=False, timeout=60)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == verdict, done.stderr
    assert calls[0].startswith("ttp verdict /checkpoints --run-id 17 --since ")
    assert calls[1:] == (["scontrol requeue 17"] if requeued and not by_exit else [])
