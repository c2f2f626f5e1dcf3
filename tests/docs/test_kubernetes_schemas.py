"""The manifests in examples/kubernetes, by published schemas. `make test-kubernetes` has the packages.

Core kinds by Kubernetes' own JSON schemas, which kubernetes-validate carries, where an unknown field is an
error. JobSet, TrainingRuntime and TrainJob by the models that Kubeflow Trainer publishes, made of the OpenAPI
schemas of these kinds: types, required fields, and, as nothing may be lost on the way, the names of fields.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

WHY = "is not in this environment: run `make test-kubernetes`"
schemas = pytest.importorskip("kubernetes_validate", reason=f"kubernetes-validate {WHY}")
models = pytest.importorskip("kubeflow_trainer_api.models", reason=f"kubeflow-trainer-api {WHY}")

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
VERSIONS = ("1.31", "1.34", "1.37")
"""Of Kubernetes."""
OWN_KINDS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
MANIFESTS = {
    f"{path.stem}-{one['kind']}": one
    for path in sorted(FOLDER.glob("*.yaml"))
    for one in yaml.safe_load_all(path.read_text())
}
CORE = {name: one for name, one in MANIFESTS.items() if one["kind"] not in OWN_KINDS}
OWN = {name: one for name, one in MANIFESTS.items() if one["kind"] in OWN_KINDS}


def jobs_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The Jobs that a JobSet or a runtime makes, as core manifests."""
    spec = manifest["spec"].get("template", manifest)["spec"]
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "made"}}
    return [{**head, "spec": one["template"]["spec"]} for one in spec["replicatedJobs"]]


def check_own(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError where a model refuses a manifest, or drops a part of it."""
    read = OWN_KINDS[manifest["kind"]].from_dict(copy.deepcopy(dict(manifest)))
    lost = sorted(set(paths(manifest)) - set(paths(read.to_dict())))
    if lost:
        raise ValueError(f"no such fields: {lost}")


def paths(value: Any, at: str = "") -> list[str]:
    if isinstance(value, Mapping):
        return [path for key, one in value.items() for path in paths(one, f"{at}.{key}")]
    if isinstance(value, list):
        return [path for number, one in enumerate(value) for path in paths(one, f"{at}[{number}]")]
    return [at]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CORE)
def test_core_kinds(name: str, version: str) -> None:
    schemas.validate(CORE[name], version, strict=True)


@pytest.mark.parametrize("name", OWN)
def test_kinds_of_jobset_and_trainer(name: str) -> None:
    check_own(OWN[name])
    if OWN[name]["kind"] != "TrainJob":
        for job in jobs_of(OWN[name]):
            for version in VERSIONS:
                schemas.validate(job, version, strict=True)


def test_every_kind_is_there() -> None:
    kinds = {one["kind"] for one in MANIFESTS.values()}
    assert kinds == {"Service", "Job", "DaemonSet", "PodDisruptionBudget", *OWN_KINDS}


def test_a_wrong_manifest_is_found() -> None:
    job = copy.deepcopy(CORE["job-Job"])
    job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(schemas.ValidationError, match="restartpolicy"):
        schemas.validate(job, VERSIONS[0], strict=True)
    jobset = copy.deepcopy(OWN["jobset-JobSet"])
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(ValueError, match=r"no such fields: \['.spec.failurePolicy.maxRestart'\]"):
        check_own(jobset)
    del jobset["spec"]["failurePolicy"]["maxRestart"]
    jobset["spec"]["failurePolicy"]["maxRestarts"] = "three"
    with pytest.raises(ValueError, match="maxRestarts"):
        check_own(jobset)
