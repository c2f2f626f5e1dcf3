"""The manifests in examples/kubernetes: what a schema can't say of them, and that they agree with the guide.

tests/docs/test_kubernetes_schemas.py compares them with published schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"
TRAININGS = ("job", "job-hostpath", "jobset", "trainjob")
GIB = 1 << 30
EVICTIONS = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")


def documents(name: str) -> dict[str, Any]:
    """By kind; no file has two of a kind."""
    found = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    kinds = {one["kind"]: one for one in found}
    assert len(kinds) == len(found)
    return kinds


class Training:
    """One of `TRAININGS`, however it is wrapped.

    Args:
        name: of its file.
    """

    def __init__(self, name: str) -> None:
        kinds = documents(name)
        self.kinds, self.trainer = kinds, {}
        if "Job" in kinds:
            self.job, self.jobset = kinds["Job"]["spec"], None
            service = kinds["Service"]
            assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
            assert service["spec"]["selector"] == {"job-name": kinds["Job"]["metadata"]["name"]}
            self.first_pod = f"{kinds['Job']['metadata']['name']}-0"
            self.subdomain = self.job["template"]["spec"]["subdomain"]
            assert self.subdomain == service["metadata"]["name"]
        else:
            top = kinds.get("JobSet") or kinds["TrainJob"]
            self.jobset = kinds["JobSet"]["spec"] if "JobSet" in kinds else self._of_runtime()
            (replicated,) = self.jobset["replicatedJobs"]
            assert replicated.get("replicas", 1) == 1
            self.job = replicated["template"]["spec"]
            self.first_pod = f"{top['metadata']['name']}-{replicated['name']}-0-0"
            self.subdomain = top["metadata"]["name"]  # JobSet's default
        self.pod = self.job["template"]["spec"]
        (self.container,) = self.pod["containers"]

    def _of_runtime(self) -> dict[str, Any]:
        runtime, self.trainer = self.kinds["TrainingRuntime"], self.kinds["TrainJob"]["spec"]["trainer"]
        reference = self.kinds["TrainJob"]["spec"]["runtimeRef"]
        assert reference == {"name": runtime["metadata"]["name"], "kind": "TrainingRuntime"}
        assert runtime["spec"]["mlPolicy"] == {"numNodes": self.trainer["numNodes"], "torch": {}}
        template = runtime["spec"]["template"]["spec"]
        labels = template["replicatedJobs"][0]["template"]["metadata"]["labels"]
        assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        return template

    @property
    def command(self) -> list[str]:
        return self.trainer.get("command") or self.container["command"]

    @property
    def env(self) -> dict[str, Any]:
        listed = self.trainer.get("env") or self.container["env"]
        return {one["name"]: one.get("value", one.get("valueFrom")) for one in listed}

    @property
    def resources(self) -> dict[str, Any]:
        return self.trainer.get("resourcesPerNode") or self.container["resources"]

    @property
    def pods(self) -> int:
        if self.trainer:
            return self.trainer["numNodes"]
        assert self.job["completionMode"] == "Indexed"
        assert self.job["completions"] == self.job["parallelism"]
        return self.job["completions"]

    def option(self, name: str) -> str:
        (found,) = [one.partition("=")[2] for one in self.command if one.startswith(f"--{name}=")]
        return found


@pytest.fixture(params=TRAININGS)
def training(request: pytest.FixtureRequest) -> Training:
    return Training(request.param)


def gib(quantity: str) -> int:
    number, unit = quantity[:-2], quantity[-2:]
    assert unit == "Gi"
    return int(number) * GIB


def test_torchrun_is_launched_as_the_job_is(training: Training) -> None:
    assert training.option("nnodes") == str(training.pods)
    gpus = training.resources["limits"]["nvidia.com/gpu"]
    assert training.option("nproc-per-node") == gpus
    assert training.trainer.get("numProcPerNode", int(gpus)) == int(gpus)
    assert training.option("rdzv-endpoint") == f"{training.first_pod}.{training.subdomain}:29400"
    assert training.command[-3:] == ["--no-python", "ecemb-run", "train.py"]


def test_the_launch_options_are_those_of_several_hosts(training: Training) -> None:
    """docs/guides/hosts.md, but for the host's names and numbers."""
    hosts = (ROOT / "docs" / "guides" / "hosts.md").read_text()
    assert training.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in hosts
    for name in ("max-restarts", "rdzv-backend", "rdzv-conf", "monitor-interval"):
        assert f"--{name} {training.option(name)}" in hosts


def test_containers_restart_in_their_pods(training: Training) -> None:
    """Nothing that happens often ends the Job, which deletes all pods."""
    assert training.pod["restartPolicy"] == "OnFailure"
    assert training.job["backoffLimit"] == (1 << 31) - 1
    assert "podFailurePolicy" not in training.job  # not with OnFailure
    assert (
        "podReplacementPolicy" not in training.job
    )  # a node that is cut off never reports the end of its pods
    for key in EVICTIONS:
        (found,) = [one for one in training.pod["tolerations"] if one["key"] == key]
        assert found["operator"] == "Exists" and found["effect"] == "NoExecute"
        assert 0 < found["tolerationSeconds"] < 300
    assert training.pod["terminationGracePeriodSeconds"] > 30  # torchrun's --shutdown-timeout


def test_memory(training: Training) -> None:
    (mount,) = training.container["volumeMounts"]
    assert mount["mountPath"] == "/dev/shm"
    (volume,) = training.pod["volumes"]
    assert volume["name"] == mount["name"]
    limit = gib(training.resources["limits"]["memory"])
    requested = gib(training.resources["requests"]["memory"])
    if "emptyDir" in volume:
        assert volume["emptyDir"]["medium"] == "Memory"
        assert gib(volume["emptyDir"]["sizeLimit"]) < requested == limit
    else:
        assert requested + gib(keeper()["containers"][0]["resources"]["requests"]["memory"]) == limit


def test_two_pods_are_never_on_one_node(training: Training) -> None:
    rules = training.pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (rule,) = rules
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    selected, labels = rule["labelSelector"]["matchLabels"], training.job["template"]["metadata"]["labels"]
    assert selected.items() <= labels.items()


def keeper() -> dict[str, Any]:
    return documents("keeper")["DaemonSet"]["spec"]["template"]["spec"]


def test_the_keepers_folder_is_the_trainings() -> None:
    """Its path, its owner, its nodes; and the job's memory is named after the node."""
    training, pod = Training("job-hostpath"), keeper()
    daemons = documents("keeper")["DaemonSet"]["spec"]
    assert daemons["selector"]["matchLabels"] == daemons["template"]["metadata"]["labels"]
    assert training.pod["nodeSelector"] == pod["nodeSelector"]
    (container,) = pod["containers"]
    above, inside = pod["volumes"][0]["hostPath"]["path"], container["volumeMounts"][0]["mountPath"]
    made = re.search(r"install -d -m 0700 -o (\d+) -g (\d+) (\S+)", container["command"][-1])
    assert made and container["securityContext"]["runAsUser"] == 0
    held = training.pod["volumes"][0]["hostPath"]
    assert made[3].replace(inside, above, 1) == held["path"] and held["type"] == "Directory"
    security = training.pod["securityContext"]
    assert (made[1], made[2]) == (str(security["runAsUser"]), str(security["runAsGroup"]))
    assert training.env["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert 'host=os.environ["NODE_NAME"]' in GUIDE.read_text()


def test_the_hostpath_variant_is_the_job_but_for_its_memory() -> None:
    plain, other = Training("job"), Training("job-hostpath")
    assert plain.command == other.command and plain.kinds["Service"] == other.kinds["Service"]
    differ = {key for key in {*plain.pod, *other.pod} if plain.pod.get(key) != other.pod.get(key)}
    assert differ == {"nodeSelector", "securityContext", "containers", "volumes"}


def test_evictions_leave_what_parity_needs() -> None:
    training, budget = Training("job"), documents("pdb")["PodDisruptionBudget"]["spec"]
    assert budget["minAvailable"] == training.pods - 1
    assert budget["selector"]["matchLabels"].items() <= training.job["template"]["metadata"]["labels"].items()


def names() -> Iterator[str]:
    yield from (path.name for path in sorted(FOLDER.glob("*.yaml")))


def test_the_guide_names_each_manifest() -> None:
    text = GUIDE.read_text()
    linked = set(re.findall(r"examples/kubernetes/([a-z-]+\.yaml)", text))
    assert linked == set(names())
    assert len(text.splitlines()) <= 150
    shown = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert shown and shown[1] == (FOLDER / "job.yaml").read_text()
