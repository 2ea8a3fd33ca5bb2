"""A real SLURM cluster on one machine: a host for slurmctld and four for slurmd, made of namespaces.

Each host has an address, a name, processes and shared memory of its own. So a node can lose its power, and no plugin
has to know that the nodes are one machine. Munge is shared; cgroups are not used.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import has_ended, until
from ttp.chaos import world
from ttp.chaos.namespaces import Namespaces

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "deploy" / "slurm.sbatch"
TRAIN = ROOT / "examples" / "digits" / "train.py"
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = 4
KILL_WAIT_S = 10
SILENCE_S = 10
"""After which slurmctld takes a node for dead (``SlurmdTimeout``; 300 by default)."""
GRACE_S = 40
"""What a job in the partition ``low`` gets when it is preempted."""

_CONF = """
ClusterName=one
SlurmctldHost={head}({head_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
ReturnToService=2
JobRequeue=0
{by_exit}
KillWait={kill_wait_s}
SlurmdTimeout={silence_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime={grace_s} PreemptMode=REQUEUE
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""


def obstacle() -> str:
    """Return why no cluster can run here; empty: it can."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "slurmd wants to be root"
    if not world.inside():
        return "the hosts of a cluster need a world of their own: python -m tests.slurm"
    return ""


class Cluster:
    """The hosts of a cluster, with their daemons.

    Args:
        folder: for configuration, state and logs; a short path, as it holds a socket.
        by_exit: jobs are requeued and held by their exit code (``RequeueExit``, ``RequeueExitHold``).
    """

    def __init__(self, folder: Path, by_exit: bool = False) -> None:
        self.folder = folder
        self.hosts = Namespaces(1, NODES + 1, folder)
        self.nodes = self.hosts.names[1:]
        self._daemons: list[subprocess.Popen[bytes]] = []
        lines = [
            f"NodeName={name} NodeAddr={address} CPUs=2 RealMemory=1000 Gres=gpu:1"
            for name, address in zip(self.nodes, self.hosts.addresses[1:], strict=True)
        ]
        text = _CONF.format(
            head=self.hosts.names[0],
            head_address=self.hosts.addresses[0],
            folder=folder,
            nodes="\n".join(lines),
            by_exit="RequeueExit=75\nRequeueExitHold=64" if by_exit else "",
            kill_wait_s=KILL_WAIT_S,
            silence_s=SILENCE_S,
            grace_s=GRACE_S,
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
        (folder / "state").mkdir()
        self._munge()
        self._start(0, "slurmctld", "-D", "-i")
        for host in range(1, NODES + 1):
            self.start_node(host)
        until(lambda: self.states() == ["idle"] * NODES, every_s=0.2)

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        socket = f"--socket={self.folder}/munge.socket"
        subprocess.run(["munged", "--force", f"--key-file={key}", socket, *files], check=True, timeout=30)

    def _start(self, host: int, *command: str) -> None:
        env = {"PATH": os.environ["PATH"], "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons.append(self.hosts.start(host, command, env, self.folder / f"{command[0]}-{host}.out"))

    def start_node(self, host: int) -> None:
        """Start slurmd on host 1 to 4."""
        (self.folder / f"spool-{self.hosts.names[host]}").mkdir(exist_ok=True)
        self._start(host, "slurmd", "-D")

    def states(self) -> list[str]:
        """Return the state of each node, from ``sinfo``."""
        said = self.command("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T")
        return said.split()

    def command(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Return the output of a SLURM client on the head.

        Raises:
            AssertionError: it failed.
        """
        wanted = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **(env or {})}
        enter = self.hosts.enter(0, "--net", "--uts", "--mount", "--pid", "--ipc")
        done = subprocess.run([*enter, *command], env=wanted, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 or command[0] == "sinfo", f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End all processes of the cluster, and remove its files."""
        self.hosts.close()
        for daemon in self._daemons:
            daemon.wait(30)
        munged = int((self.folder / "munge.pid").read_text())
        os.kill(munged, signal.SIGTERM)
        until(lambda: has_ended(munged))  # it writes its seed as it ends
        shutil.rmtree(self.folder)


class BatchJob:
    """``deploy/slurm.sbatch`` with the digits example, submitted as a user would.

    Args:
        cluster: where it runs.
        options: of sbatch.
        steps: of training.
        step_ms: shortest duration of a step.
        env: further variables.
    """

    def __init__(
        self, cluster: Cluster, *options: str, steps: int = 40, step_ms: int = 200, env: Mapping[str, str] | None = None
    ) -> None:
        self.cluster = cluster
        self.folder = Path(tempfile.mkdtemp(dir=cluster.folder))
        self.save_dir = self.folder / "saved"
        self.out = self.folder / "out"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "SLURM_"))}
        command = ["sbatch", "--parsable", f"--output={self.out}", f"--chdir={self.folder}", "--gpus-per-node=1"]
        training = [str(TRAIN), f"--steps={steps}", f"--step-ms={step_ms}", f"--save-dir={self.save_dir}"]
        kept |= {"HOME": str(self.folder), "TMPDIR": str(self.folder), "SAVE_DIR": str(self.save_dir)}
        kept |= {"OMP_NUM_THREADS": "1", **(env or {})}
        self.id = cluster.command(*command, "--nodes=2", *options, str(SBATCH), *training, env=kept).strip()

    def facts(self) -> dict[str, str]:
        """Return the output of ``scontrol show job``."""
        words = self.cluster.command("scontrol", "show", "job", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self) -> str:
        """Return ``RUNNING``, ``PENDING`` and so on."""
        return self.facts()["JobState"]

    def text(self) -> str:
        """Return the job's output so far, of all its launches."""
        return self.out.read_text() if self.out.exists() else ""

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        """Wait until the job has printed a text."""
        until(lambda: text in self.text(), timeout_s, lambda: f"{text!r} is not in:\n{self.text()}", 0.2)

    def wait_for_state(self, *states: str, timeout_s: float = 180) -> dict[str, str]:
        """Wait until the job is in one of these states, and return ``facts``."""

        def story() -> str:
            return f"it is not {' or '.join(states)}: {self.facts()}\n{self.text()[-8000:]}"

        until(lambda: self.state() in states, timeout_s, story, 1)
        return self.facts()

    def result(self) -> dict[str, str]:
        """Return the digests of the training's result."""
        found: dict[str, str] = json.loads((self.save_dir / "result.json").read_text())
        return found
