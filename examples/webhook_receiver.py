"""Receives events and checks their signatures: python examples/webhook_receiver.py PORT.

First create a key with `conveyor webhooks rotate` and put its secret into CONVEYOR_WEBHOOK_SECRET.
Then submit jobs with `--webhook URL --sign`. In production the receiver is behind a proxy with TLS.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = base64.b64decode(os.environ["CONVEYOR_WEBHOOK_SECRET"])
# An event that was recorded by somebody else and is sent again later is refused.
AGE_S_MAX = 300
BODY_BYTES_MAX = 1_000_000
SEEN: set[str] = set()  # A real receiver keeps the ids in its database.


def is_genuine(headers: dict[str, str], body: bytes) -> bool:
    """Checks one event as Standard Webhooks defines."""
    event_id, sent_at = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not sent_at.isdigit() or abs(time.time() - int(sent_at)) > AGE_S_MAX:
        return False
    digest = hmac.digest(SECRET, f"{event_id}.{sent_at}.".encode() + body, hashlib.sha256)
    expected = f"v1,{base64.b64encode(digest).decode()}"
    # While keys are rotated, there are two signatures.
    signatures = headers.get("webhook-signature", "").split()
    return any(hmac.compare_digest(expected, signature) for signature in signatures)


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(min(size, BODY_BYTES_MAX))
        headers = {name.lower(): value for name, value in self.headers.items()}
        if not is_genuine(headers, body):
            self.answer(401)
            return
        # An event may arrive twice: any answer but 2xx, or none, makes the server repeat it.
        if headers["webhook-id"] not in SEEN:
            SEEN.add(headers["webhook-id"])
            event = json.loads(body)
            print(event["event_type"], event["job_id"], event.get("stats"), flush=True)
        self.answer(204)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver)
    print(f"listening on http://127.0.0.1:{server.server_address[1]}/", flush=True)
    server.serve_forever()
