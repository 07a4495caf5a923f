"""Runs ministack and writes every decision of its policy evaluation to the file in DECISIONS."""

from __future__ import annotations

import os
from typing import Any

from ministack.app import main  # type: ignore[import-not-found]
from ministack.core import iam_evaluator  # type: ignore[import-not-found]

_FILE = open(os.environ["DECISIONS"], "a", buffering=1)  # noqa: SIM115 (until the process ends)
_evaluate = iam_evaluator.evaluate


def evaluate(context: Any, *policies: Any) -> Any:
    result = _evaluate(context, *policies)
    role = context.principal_arn.split("/")[1] if "/" in context.principal_arn else "root"
    _FILE.write(f"{result.decision} {role} {context.action} {context.resource_arn}\n")
    return result


iam_evaluator.evaluate = evaluate

if __name__ == "__main__":
    main()
