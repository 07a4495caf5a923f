"""Runs ministack and writes every decision of its policy evaluation to the file in DECISIONS."""

from __future__ import annotations

import os
from typing import Any

from ministack.core import iam_evaluator  # type: ignore[import-not-found]

_FILE = open(os.environ["DECISIONS"], "a", buffering=1)  # noqa: SIM115 (until the process ends)
_evaluate, _enforce = iam_evaluator.evaluate, iam_evaluator.enforce
_principals: list[str] = [""]


def evaluate(context: Any, *policies: Any) -> Any:
    _principals[0] = context.principal_arn
    return _evaluate(context, *policies)


def enforce(
    access_key: str, action: str, service: str, region: str, *rest: Any, **more: Any
) -> Any:
    """Records the decision for a request, from the policies of the role and of the resource."""
    _principals[0] = ""
    refused = _enforce(access_key, action, service, region, *rest, **more)
    role = _principals[0].split("/")[1] if "/" in _principals[0] else "root"
    decision = "Allow" if refused is None else "Deny"
    _FILE.write(f"{decision} {role} {action} {rest[0] if rest else '*'}\n")
    return refused


iam_evaluator.evaluate, iam_evaluator.enforce = evaluate, enforce

if __name__ == "__main__":
    # After the patch: the application imports the functions by name.
    from ministack.app import main  # type: ignore[import-not-found]

    main()
