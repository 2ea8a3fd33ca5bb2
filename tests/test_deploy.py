"""The examples in ``deploy/`` react to each exit code as it is meant."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ttp.config import Config
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED

DEPLOY = Path(__file__).parents[1] / "deploy"


KUBERNETES = DEPLOY / "kubernetes"
CODES = {EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED}
Manifest = dict[str, Any]


def manifests(name: str) -> list[Manifest]:
    """Return the documents of a file."""
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def values(found: Any, key: str) -> Iterator[Any]:
    """Return all values of a key, at any depth."""
    for name, value in (
        found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    ):
        if name == key:
            yield value
        yield from values(value, key)


def job_says(rules: list[Manifest], code: int, evicted: bool) -> tuple[str, str]:
    """Return what the Job controller does about a pod, by the first rule that fits, and its message."""
    for index, rule in enumerate(rules):
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        assert (exits is None) != (conditions is None), "a rule has one of the two"
        if exits is not None and code in exits["values"]:
            said = f"Container {exits['containerName']} for pod ns/p failed with exit code {code}"
            return rule["action"], f"{said} matching {rule['action']} rule at index {index}"
        if evicted and conditions == [{"type": "DisruptionTarget", "status": "True"}]:
            return rule[
                "action"
            ], f"Pod ns/p has condition DisruptionTarget matching {rule['action']} rule at index {index}"
    return "Count", ""


def jobset_does(spec: Manifest, code: int, evicted: bool) -> str:
    """Return what JobSet does: the first rule that fits, else a counted restart."""
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0 and job["podReplacementPolicy"] == "Failed"
    action, said = job_says(job["podFailurePolicy"]["rules"], code, evicted)
    for rule in spec["failurePolicy"]["rules"]:
        assert rule["name"] and rule["onJobFailureReasons"] == ["PodFailurePolicy"], "the CRD requires a name"
        if action == "FailJob" and any(re.search(pattern, said) for pattern in rule["onJobFailureMessagePatterns"]):
            return str(rule["action"])
    return "RestartJobSet"


def volcano_does(spec: Manifest, code: int, evicted: bool) -> str:
    """Return what Volcano does: the first policy that fits."""
    for policy in spec["policies"]:
        assert ("exitCode" in policy) != ("event" in policy), "a policy has one of the two"
        if policy.get("exitCode") == code or policy.get("event") == ("PodEvicted" if evicted else "PodFailed"):
            return str(policy["action"])
    return "SyncJob"


def action(name: str, code: int, evicted: bool) -> str:
    """Return what happens to the job: ``end``, ``again`` (restart, not counted) or ``count`` (restart, counted)."""
    spec = next(d["spec"] for d in manifests(name) if d["kind"] not in ("Service", "TrainJob"))
    if name == "job.yaml":
        done, _ = job_says(spec["podFailurePolicy"]["rules"], code, evicted)
    elif name == "volcano.yaml":
        done = volcano_does(spec, code, evicted)
    else:
        done = jobset_does(spec["template"]["spec"] if name == "kubeflow-runtime.yaml" else spec, code, evicted)
    ends = ("FailJob", "FailJobSet", "TerminateJob")
    again = ("Ignore", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob")
    return "end" if done in ends else "again" if done in again else "count"


ALL = ("job.yaml", "jobset.yaml", "kubeflow-runtime.yaml", "volcano.yaml")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("code", "evicted", "wanted"),
    [
        (EXIT_BAD_CONFIG, False, "end"),
        (EXIT_NOT_SAVED, False, "end"),
        (EXIT_BAD_CONFIG, True, "end"),
        (EXIT_SAVED, False, "again"),
        (EXIT_SAVED, True, "again"),
        (137, True, "again"),
        (1, False, "count"),
    ],
)
def test_a_cluster_decides_as_the_exit_codes_mean_it(name: str, code: int, evicted: bool, wanted: str) -> None:
    if name == "volcano.yaml" and wanted == "count":
        wanted = "again"  # it counts all restarts
    assert action(name, code, evicted) == wanted


@pytest.mark.parametrize("name", ALL)
def test_a_manifest_names_our_exit_codes_and_no_others(name: str) -> None:
    found = [each for document in manifests(name) for each in values(document, "onExitCodes")]
    named = [code for each in found for code in each["values"]]
    named += [code for document in manifests(name) for code in values(document, "exitCode")]
    assert sorted(named) == sorted(CODES)
    assert all(each["values"] == sorted(each["values"]) and each["operator"] == "In" for each in found)
    patterns = [
        p for document in manifests(name) for each in values(document, "onJobFailureMessagePatterns") for p in each
    ]
    assert {int(code) for pattern in patterns for code in re.findall(r"\d+", pattern)} <= CODES


@pytest.mark.parametrize("name", ALL)
def test_a_pod_has_the_time_to_save_and_is_asked_by_name(name: str) -> None:
    pod = next(each for each in _pods(name) if "containers" in each)
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert pod["terminationGracePeriodSeconds"] > float(env["TTP_OT"]) >= Config().rescue_patience_s
    assert pod["restartPolicy"] == "Never"
    Config.from_env({key: value for key, value in env.items() if key.startswith("TTP_") and value is not None})
    named = {each["containerName"] for document in manifests(name) for each in values(document, "onExitCodes")}
    assert named <= {container["name"]}, "the rules are about this container"
    command = next(iter(values(manifests(name), "command")))
    assert command == ["ttp", "run"], "it is the process 1, which gets the SIGTERM"


def _pods(name: str) -> Iterator[Manifest]:
    for document in manifests(name):
        yield from (template["spec"] for template in values(document, "template") if "containers" in template["spec"])


def test_slurm_leaves_the_time_to_save() -> None:
    text = (DEPLOY / "slurm.sbatch").read_text()
    (lead_s,) = map(float, re.findall(r"--signal=TERM@(\d+)", text))
    assert lead_s >= Config().rescue_patience_s


def test_slurm_gives_each_job_ports_of_its_own() -> None:
    """A job's two ports differ, and so do those of jobs whose ids are near: they may share their first node."""
    text = (DEPLOY / "slurm.sbatch").read_text()
    formulas = re.findall(r"=\$\(\((\d+) \+ SLURM_JOB_ID % (\d+)\)\)", text)
    (first, count), (second, same_count) = [(int(start), int(number)) for start, number in formulas]
    assert count == same_count and first + count <= second and second + count <= 32768, "the kernel draws from there"
    assert "$MASTER_ADDR:$meet" in text
    assert f"$(({first} + job % {count}))" in (DEPLOY.parent / "docs" / "operations.md").read_text()


def test_every_key_of_a_manifest_is_one_that_its_model_knows() -> None:
    """The models drop unknown keys, so a lost key is a typo. ``nox -s manifests`` installs them."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    of_kind = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for name in ALL:
        for document in manifests(name):
            if document["kind"] in of_kind:
                assert lost(document, of_kind[document["kind"]].from_dict(document).to_dict()) == []
        for pod in _pods(name):
            assert lost(pod, models.IoK8sApiCoreV1PodSpec.from_dict(pod).to_dict()) == []
    job = manifests("job.yaml")[1]
    assert lost(job["spec"], models.IoK8sApiBatchV1JobSpec.from_dict(job["spec"]).to_dict()) == []
    typo = json.loads(json.dumps(job["spec"]).replace("podReplacementPolicy", "podReplacementPolicies"))
    assert lost(typo, models.IoK8sApiBatchV1JobSpec.from_dict(typo).to_dict()) == ["podReplacementPolicies"]


def lost(given: Any, kept: Any, at: str = "") -> list[str]:
    """Return the paths of keys that were given and not kept."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            path
            for key in given
            for path in ([f"{at}{key}"] if key not in kept else lost(given[key], kept[key], f"{at}{key}."))
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [path for index, one in enumerate(given) for path in lost(one, kept[index], f"{at}{index}.")]
    return [] if given == kept else [at.rstrip(".")]


ENUMS = {
    "action": {"FailJob", "Ignore", "FailJobSet", "RestartJobSetAndIgnoreMaxRestarts", "TerminateJob", "RestartJob"},
    "restartStrategy": {"BlockingRecreate"},
    "completionMode": {"Indexed"},
    "podReplacementPolicy": {"Failed"},
    "operator": {"In"},
    "event": {"PodEvicted", "PodFailed"},
    "medium": {"Memory"},
}
"""Words that the projects' own schemas know, which the models take any text for."""


@pytest.mark.parametrize("name", ALL)
def test_words_are_spelled_as_the_schemas_have_them(name: str) -> None:
    for key, known in ENUMS.items():
        assert set(values(manifests(name), key)) <= known


@pytest.mark.parametrize("srun", [0, 137])
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
    assert re.fullmatch(rf"ttp verdict /checkpoints --run-id 17 --since \d+ --launcher-code {srun}", calls[0])
    assert calls[1:] == (["scontrol requeue 17"] if requeued and not by_exit else [])
