"""Kubernetes' own schemas, strict: unknown fields are faults. Each is compiled once."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate.utils import all_versions, schema_contents
from referencing import Registry, Resource

OLDEST, NEWEST = all_versions()[0], all_versions()[-1]


def schema_faults(document: Mapping[str, Any], version: str) -> list[str]:
    """What this version of Kubernetes would refuse: "path: message"."""
    found = _validator(document["kind"], document["apiVersion"], version).iter_errors(document)
    return [f"{'/'.join(map(str, fault.absolute_path))}: {fault.message}" for fault in found]


@cache
def _validator(kind: str, api_version: str, version: str) -> Draft202012Validator:
    group, _, number = api_version.rpartition("/")
    name = "-".join(filter(None, [kind.lower(), group.partition(".")[0], number]))
    schema = schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{name}.json", version)
    return Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    contents = schema_contents(f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version)
    registry: Registry[Any] = Resource.from_contents(contents) @ Registry()
    return registry
