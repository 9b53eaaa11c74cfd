"""Pieces of JSON schemas: closed objects, and what Kubernetes' own objects look like."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Schema = dict[str, Any]


def closed(
    description: str,
    further: Mapping[str, Schema] = MappingProxyType({}),
    *,
    required: tuple[str, ...] = (),
    **properties: Schema,
) -> Schema:
    """A closed object of `properties` and `further` ones."""
    schema: Schema = {
        "description": description,
        "type": "object",
        "additionalProperties": False,
        "properties": properties | dict(further),
    }
    return schema | ({"required": list(required)} if required else {})


def text(description: str, **rules: Any) -> Schema:
    return {"description": description, "type": "string", **rules}


def flag(description: str) -> Schema:
    return {"description": description, "type": "boolean"}


def whole(description: str, **rules: Any) -> Schema:
    return {"description": description, "type": "integer", "minimum": 0, **rules}


def number(description: str) -> Schema:
    return {"description": description, "type": "number", "exclusiveMinimum": 0}


def choice(description: str, *values: str) -> Schema:
    return {"description": description, "enum": list(values)}


def list_of(description: str, items: Schema) -> Schema:
    return {"description": description, "type": "array", "items": items}


def map_of(description: str, values: Schema, names: str = "^.+$") -> Schema:
    return {
        "description": description,
        "type": "object",
        "patternProperties": {names: values},
        "additionalProperties": False,
    }


STRINGS = map_of("", text(""), "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|[kMGTPE]i?|Ki)?$"}
PATH = "^(/[A-Za-z0-9._-]+)+$"
DEFINITIONS: dict[str, Schema] = {}


def _shared(name: str, schema: Schema) -> Schema:
    """Written once, under `definitions`."""
    DEFINITIONS[name] = schema
    return {"$ref": f"#/definitions/{name}"}


_EXPRESSION = closed(
    "A match expression.",
    required=("key", "operator"),
    key=text("Key."),
    operator=choice("Operator.", "In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
    values=list_of("Values.", text("")),
)
_SELECTOR = _shared(
    "selector",
    closed(
        "A label selector.",
        matchLabels=STRINGS | {"description": "Labels."},
        matchExpressions=list_of("Expressions.", _EXPRESSION),
    ),
)
_NODE_TERM = closed(
    "A term of nodes.",
    matchExpressions=list_of("Expressions over labels.", _EXPRESSION),
    matchFields=list_of("Expressions over fields.", _EXPRESSION),
)
_WEIGHT = whole("Weight.", minimum=1, maximum=100)
_POD_TERM = _shared(
    "podTerm",
    closed(
        "A term of pods.",
        required=("topologyKey",),
        topologyKey=text("Label of nodes."),
        labelSelector=_SELECTOR,
        namespaceSelector=_SELECTOR,
        namespaces=list_of("Namespaces.", text("")),
        matchLabelKeys=list_of("Keys.", text("")),
        mismatchLabelKeys=list_of("Keys.", text("")),
    ),
)
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def _pod_affinity(description: str) -> Schema:
    weighted = closed(
        "A preference.", required=("weight", "podAffinityTerm"), weight=_WEIGHT, podAffinityTerm=_POD_TERM
    )
    return closed(
        description, {_REQUIRED: list_of("Must.", _POD_TERM), _PREFERRED: list_of("Should.", weighted)}
    )


AFFINITY = _shared(
    "affinity",
    closed(
        "Kubernetes' affinity.",
        nodeAffinity=closed(
            "To nodes.",
            {
                _REQUIRED: closed(
                    "Must.", required=("nodeSelectorTerms",), nodeSelectorTerms=list_of("Terms.", _NODE_TERM)
                ),
                _PREFERRED: list_of(
                    "Should.",
                    closed(
                        "A preference.",
                        required=("weight", "preference"),
                        weight=_WEIGHT,
                        preference=_NODE_TERM,
                    ),
                ),
            },
        ),
        podAffinity=_pod_affinity("To pods."),
        podAntiAffinity=_pod_affinity("Away from pods."),
    ),
)
TOLERATION = _shared(
    "toleration",
    closed(
        "A toleration.",
        key=text("Key of the taint."),
        operator=choice("Operator.", "Exists", "Equal"),
        value=text("Value of the taint."),
        effect=choice("Effect of the taint.", "NoSchedule", "PreferNoSchedule", "NoExecute"),
        tolerationSeconds=whole("Seconds."),
    ),
)
SPREAD = _shared(
    "spread",
    closed(
        "A constraint; the chart adds the labels of the pods.",
        required=("maxSkew", "topologyKey", "whenUnsatisfiable"),
        maxSkew=whole("Difference, at most.", minimum=1),
        topologyKey=text("Label of nodes."),
        whenUnsatisfiable=choice("Otherwise.", "DoNotSchedule", "ScheduleAnyway"),
        minDomains=whole("Domains, at least.", minimum=1),
        nodeAffinityPolicy=choice("Nodes outside the affinity.", "Honor", "Ignore"),
        nodeTaintsPolicy=choice("Nodes with taints.", "Honor", "Ignore"),
    ),
)
PEER = _shared(
    "peer",
    closed(
        "A peer.",
        namespaceSelector=_SELECTOR,
        podSelector=_SELECTOR,
        ipBlock=closed(
            "Addresses.",
            {"except": list_of("But these.", text(""))},
            required=("cidr",),
            cidr=text("Range."),
        ),
    ),
)
SUBJECT = closed(
    "A subject.",
    required=("kind", "name"),
    kind=choice("Kind.", "User", "Group", "ServiceAccount"),
    name=text("Name.", minLength=1),
    namespace=text("Of a ServiceAccount."),
    apiGroup=text("rbac.authorization.k8s.io of a User or a Group."),
)
PARENT = closed(
    "A Gateway.",
    required=("name",),
    name=text("Name.", minLength=1),
    namespace=text("Namespace."),
    sectionName=text("Listener."),
    port=whole("Port.", minimum=1, maximum=65535),
)
