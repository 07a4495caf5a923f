#!/bin/sh
# Submits URLs, waits for the run, and prints each result with its body: sh examples/curl.sh URL ...
# It needs curl and python3, which reads the JSON.
set -eu
server=${CONVEYOR_URL:-http://127.0.0.1:8080}
key=${CONVEYOR_API_KEY:-dev}
[ $# -gt 0 ] || set -- https://example.com/

api() { curl -sS --fail-with-body --noproxy localhost,127.0.0.1 -H "X-API-Key: $key" "$@"; }
field() { python3 -c "import functools, json, sys; print(functools.reduce(lambda v, k: v[k], sys.argv[1:], json.load(sys.stdin)))" "$@"; }

list=$(python3 -c 'import json, sys; print(json.dumps({"tasks": [{"url": u} for u in sys.argv[1:]]}))' "$@")
# The key makes a repetition of this command harmless: the server submits the list once.
job=$(api "$server/v1/jobs" -H 'Content-Type: application/json' -H "Idempotency-Key: curl-$$" -d "$list" | field job_id)
echo "job $job"

until [ "$(api "$server/v1/jobs/$job" | field latest_run terminal)" = True ]; do sleep 1; done

api "$server/v1/jobs/$job/results?limit=100" | python3 -c '
import json, sys
for task in json.load(sys.stdin)["results"]:
    print(task["status"], task["url"], task["result_url"] or "-")
' | while read -r status url body; do
    [ "$body" = - ] && size=0 || size=$(curl -sS --fail --noproxy localhost,127.0.0.1 "$body" | wc -c)
    echo "$status $url $size bytes"
done
