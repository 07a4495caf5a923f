#!/usr/bin/env bash
# other_python.sh SUITE [pytest arguments]: runs the tests on the Python of a Debian suite, in a container:
# bookworm has 3.11.2, the oldest that is supported; trixie has 3.13; forky has 3.14, the newest.
# Without arguments: the domain, the use cases, the API, streamed submits, and a job from end to end.
set -euo pipefail
cd "$(git rev-parse --show-toplevel)"
suite=$1
shift
[ $# -gt 0 ] || set -- tests/domain tests/usecases tests/api tests/e2e/test_walk.py tests/e2e/test_stop.py
image=localhost/debian-$suite:test
tests/deploy/base_image.sh "$suite" "$image"
run=(podman --runtime runc run --rm --interactive --network host --ulimit nofile=10000:10000 --ulimit nproc=10000:10000
    --volume "conveyor-python-$suite:/opt/python" "$image")
# Copies the working tree. The volume keeps the environment until the requirements change.
git ls-files -z | tar --create --null --files-from=- | "${run[@]}" sh -c 'set -e
    mkdir -p /src && cd /src && tar --extract
    python3 --version
    if ! cat pyproject.toml constraints.txt | cmp -s - /opt/python/requirements; then
        python3 -m venv --clear /opt/python/venv
        /opt/python/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[aws,postgres,test]"
        cat pyproject.toml constraints.txt > /opt/python/requirements
    fi
    /opt/python/venv/bin/python -m pytest -q -p no:cacheprovider "$@"' sh "$@"
