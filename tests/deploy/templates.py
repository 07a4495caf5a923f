"""The CloudFormation templates as data: every short tag becomes its long form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
AWS = ROOT / "deploy" / "aws"


class _Loader(yaml.SafeLoader):
    pass


def _tagged(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    value: Any
    if isinstance(node, yaml.ScalarNode):
        value = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        assert isinstance(node, yaml.MappingNode)
        value = loader.construct_mapping(node, deep=True)
    if suffix in {"Ref", "Condition"}:
        return {suffix: value}
    if suffix == "GetAtt":
        return {"Fn::GetAtt": value.split(".", 1)}
    return {f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _tagged)


def load(name: str) -> dict[str, Any]:
    text = (AWS / name).read_text(encoding="utf-8")
    template: dict[str, Any] = yaml.load(text, _Loader)
    return template


def actions_of(role: str) -> set[str]:
    """The actions that the policies of a role in service.yaml grant."""
    properties = load("service.yaml")["Resources"][role]["Properties"]
    granted: set[str] = set()
    for policy in properties["Policies"]:
        for statement in policy["PolicyDocument"]["Statement"]:
            actions = statement["Action"]
            granted |= {actions} if isinstance(actions, str) else set(actions)
    return granted
