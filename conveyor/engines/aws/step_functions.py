"""StepFunctions: ends the task of a state machine that waits for a run (SPEC.md 4.16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conveyor.engines.aws.client.client import AwsClient
from conveyor.engines.aws.errors import AwsError, NotAllowed
from conveyor.ports.errors import Unavailable
from conveyor.ports.webhook_sender import Callback, Delivered, NotDelivered

ERROR = "Conveyor."
# The task has ended, never existed, or does not accept this output. A retry changes nothing.
_FINAL = frozenset(
    {
        "InvalidOutput",
        "InvalidToken",
        "TaskDoesNotExist",
        "TaskTimedOut",
        "ValidationException",
    }
)


@dataclass(frozen=True, slots=True)
class StepFunctions:
    client: AwsClient

    async def call_back(self, callback: Callback) -> Delivered | NotDelivered:
        try:
            await self.client.call("stepfunctions", *_request_for(callback))
        except AwsError as error:
            why = f"step_functions:{error.code}"
            return NotDelivered(why, error.status, gone=error.code in _FINAL)
        # Before Unavailable, which is its base class: the operator sees the code of the refusal.
        except NotAllowed as error:
            return NotDelivered(f"step_functions:{error.code}", error.status)
        except Unavailable:
            return NotDelivered("transport_error:step functions")
        return Delivered(200)


def _request_for(callback: Callback) -> tuple[str, dict[str, Any]]:
    if callback.is_success:
        return "SendTaskSuccess", {"taskToken": callback.token, "output": callback.payload}
    # A state machine can catch an error by its name, such as Conveyor.run.stopped.
    error = ERROR + callback.event_type
    return "SendTaskFailure", {
        "taskToken": callback.token,
        "error": error,
        "cause": callback.payload,
    }
