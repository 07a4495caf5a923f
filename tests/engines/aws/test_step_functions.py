"""Step Functions: waiting state machines are called back, and refusals are classified."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio

from conveyor.engines.aws.client.auth import StaticAccess
from conveyor.engines.aws.client.boto_transport import open_boto_transport
from conveyor.engines.aws.client.client import RetryingAwsClient
from conveyor.engines.aws.engine import StepFunctions
from conveyor.engines.aws.errors import AwsError
from conveyor.ports.webhook_sender import Callback, Delivered, NotDelivered
from tests.aws import REGION, TRANSPORTS, an_access, an_aws_client, an_http_transport
from tests.engines.aws.client.test_strict_signatures import a_user
from tests.engines.aws.scripted import LOST, THROTTLED, UNSENT, ScriptedTransport
from tests.servers import ACCESS_KEY

NUMBERS = itertools.count()


def a_callback(token: str = "token", *, is_success: bool = True) -> Callback:
    event_type = "run.completed" if is_success else "run.stopped"
    return Callback(
        token=token, is_success=is_success, event_type=event_type, payload='{"run_id":"R"}'
    )


@pytest.fixture(params=TRANSPORTS)
async def client(
    request: pytest.FixtureRequest, ministack: str
) -> AsyncGenerator[RetryingAwsClient, None]:
    access = an_access(stepfunctions=ministack, sqs=ministack)
    async with TRANSPORTS[request.param](access) as transport:
        yield an_aws_client(transport)


class Machine:
    """A state machine with one task, which puts its token on a queue and waits."""

    def __init__(self, client: RetryingAwsClient) -> None:
        self.client = client
        self.name = f"waits-{next(NUMBERS)}"
        self.execution = ""

    async def start(self) -> str:
        """Starts the machine and returns the token of the task that waits."""
        queue = (await self.client.call("sqs", "CreateQueue", {"QueueName": self.name}))["QueueUrl"]
        task = {
            "Type": "Task",
            "Resource": "arn:aws:states:::sqs:sendMessage.waitForTaskToken",
            "Parameters": {"QueueUrl": queue, "MessageBody.$": "$$.Task.Token"},
            "End": True,
        }
        machine = await self._call(
            "CreateStateMachine",
            name=self.name,
            definition=json.dumps({"StartAt": "Wait", "States": {"Wait": task}}),
            roleArn=f"arn:aws:iam::{ACCESS_KEY}:role/any",
        )
        started = await self._call("StartExecution", stateMachineArn=machine["stateMachineArn"])
        self.execution = started["executionArn"]
        received = await self.client.call(
            "sqs", "ReceiveMessage", {"QueueUrl": queue, "WaitTimeSeconds": 10}
        )
        return str(received["Messages"][0]["Body"])

    async def end(self) -> dict[str, Any]:
        with trio.fail_after(20):
            while True:
                execution = await self._call("DescribeExecution", executionArn=self.execution)
                if execution["status"] != "RUNNING":
                    return execution
                await trio.sleep(0.05)

    async def _call(self, operation: str, **params: Any) -> dict[str, Any]:
        return await self.client.call("stepfunctions", operation, params)


@pytest.mark.slow
async def test_a_waiting_state_machine_continues_with_the_summary(
    client: RetryingAwsClient,
) -> None:
    machine = Machine(client)
    token = await machine.start()

    outcome = await StepFunctions(client).call_back(a_callback(token))

    end = await machine.end()
    assert outcome == Delivered(200)
    assert end["status"] == "SUCCEEDED"
    assert json.loads(end["output"]) == {"run_id": "R"}


@pytest.mark.slow
async def test_a_waiting_state_machine_fails_with_an_error_that_it_can_catch(
    client: RetryingAwsClient,
) -> None:
    machine = Machine(client)
    token = await machine.start()

    outcome = await StepFunctions(client).call_back(a_callback(token, is_success=False))

    end = await machine.end()
    assert outcome == Delivered(200)
    assert (end["status"], end["error"]) == ("FAILED", "Conveyor.run.stopped")
    assert json.loads(end["cause"]) == {"run_id": "R"}


@pytest.mark.slow
async def test_a_second_callback_is_refused_permanently(client: RetryingAwsClient) -> None:
    machine = Machine(client)
    token = await machine.start()
    await StepFunctions(client).call_back(a_callback(token))
    await machine.end()

    outcome = await StepFunctions(client).call_back(a_callback(token))

    assert outcome == NotDelivered("step_functions:TaskDoesNotExist", 400, gone=True)


@pytest.mark.slow
async def test_the_signature_of_the_client_is_accepted_by_step_functions(
    strict_ministack: str,
) -> None:
    keys = await a_user(strict_ministack, "caller-back")
    access = StaticAccess(REGION, keys, {"stepfunctions": strict_ministack})

    async with an_http_transport(access) as lean, open_boto_transport(access) as boto:
        outcome = [
            await StepFunctions(an_aws_client(p)).call_back(a_callback()) for p in (lean, boto)
        ]

    assert outcome == [NotDelivered("step_functions:TaskDoesNotExist", 400, gone=True)] * 2


@pytest.mark.parametrize(
    "code",
    ["InvalidOutput", "InvalidToken", "TaskDoesNotExist", "TaskTimedOut", "ValidationException"],
)
async def test_an_error_that_cannot_change_is_permanent(code: str) -> None:
    refusing = ScriptedTransport(AwsError(code, "no"))

    outcome = await StepFunctions(an_aws_client(refusing)).call_back(a_callback())

    assert outcome == NotDelivered(f"step_functions:{code}", 400, gone=True)


async def test_an_error_that_an_operator_can_fix_is_retried() -> None:
    refusing = ScriptedTransport(AwsError("AccessDeniedException", "no"))

    outcome = await StepFunctions(an_aws_client(refusing)).call_back(a_callback())

    assert outcome == NotDelivered("step_functions:AccessDeniedException", 400)


@pytest.mark.parametrize("trouble", [THROTTLED, UNSENT])
async def test_a_short_outage_is_retried_at_once(
    trouble: Any, autojump_clock: trio.testing.MockClock
) -> None:
    transport = ScriptedTransport(trouble, {})

    outcome = await StepFunctions(an_aws_client(transport)).call_back(a_callback())

    assert outcome == Delivered(200)


async def test_a_callback_with_a_lost_answer_is_left_to_the_schedule() -> None:
    transport = ScriptedTransport(LOST, {})

    outcome = await StepFunctions(an_aws_client(transport)).call_back(a_callback())

    assert outcome == NotDelivered("transport_error:step functions")
    assert len(transport.asked) == 1


def test_a_callback_does_not_show_its_token() -> None:
    assert "secret-token" not in repr(a_callback("secret-token"))
