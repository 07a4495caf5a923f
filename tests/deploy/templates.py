"""Loads the CloudFormation templates as data: short tags become their long form."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
AWS = ROOT / "deploy" / "aws"


class _Loader(yaml.SafeLoader):
    pass


def _parse_tag(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> dict[str, Any]:
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


_Loader.add_multi_constructor("!", _parse_tag)


@cache
def load(name: str) -> dict[str, Any]:
    text = (AWS / name).read_text(encoding="utf-8")
    template: dict[str, Any] = yaml.load(text, _Loader)
    return template


_PLACE = "us-east-1:111122223333"
# Example values of the data stack's exports and of the service stack's resources.
_NAMES = {
    "TableArn": f"arn:aws:dynamodb:{_PLACE}:table/conveyor",
    "BucketArn": "arn:aws:s3:::conveyor-bodies",
    "QueuePrefix": "conveyor-",
    "SecretKey": f"arn:aws:secretsmanager:{_PLACE}:secret:SecretKey-abcdef",
    "ApiKeys": f"arn:aws:secretsmanager:{_PLACE}:secret:ApiKeys-abcdef",
    "AdminKey": f"arn:aws:secretsmanager:{_PLACE}:secret:AdminKey-abcdef",
    "TaskDatabaseSecret": f"arn:aws:secretsmanager:{_PLACE}:secret:TaskDatabase-abcdef",
    "RedisUrl": f"arn:aws:secretsmanager:{_PLACE}:secret:RedisUrl-abcdef",
    "ApiLog": f"arn:aws:logs:{_PLACE}:log-group:api:*",
    "WorkerLog": f"arn:aws:logs:{_PLACE}:log-group:worker:*",
    "AWS::Partition": "aws",
    "AWS::Region": "us-east-1",
    "AWS::AccountId": "111122223333",
}


def resolve(value: Any) -> Any:
    """Replaces CloudFormation's functions in a policy document with example names."""
    match value:
        case {"Fn::ImportValue": {"Fn::Sub": str(name)}}:
            return _NAMES[name.removeprefix("${DataStack}-")]
        case {"Fn::Sub": [str(text), dict(names)]}:
            return _fill(text, {**_NAMES, **resolve(names)})
        case {"Fn::Sub": str(text)}:
            return _fill(text, _NAMES)
        case {"Fn::GetAtt": [name, "Arn"]} | {"Ref": name}:
            return _NAMES[name]
        case {"Fn::If": [_, chosen, _]}:
            return resolve(chosen)
        case dict():
            return {name: resolve(item) for name, item in value.items()}
        case list():
            return [resolve(item) for item in value]
    return value


def _fill(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(f"${{{name}}}", value)
    return text


def actions_of(role: str) -> set[str]:
    """Returns the actions that the policies of a role in service.yaml grant."""
    properties = load("service.yaml")["Resources"][role]["Properties"]
    granted: set[str] = set()
    for policy in properties["Policies"]:
        for statement in policy["PolicyDocument"]["Statement"]:
            actions = statement["Action"]
            granted |= {actions} if isinstance(actions, str) else set(actions)
    return granted
