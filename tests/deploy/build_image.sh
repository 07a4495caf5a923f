#!/usr/bin/env bash
# Builds localhost/conveyor:test and localhost/conveyor-gateway:test. BASE is the base image; by
# default it is built from Debian packages.
set -euo pipefail
cd "$(git rev-parse --show-toplevel)"
base=${BASE:-localhost/python-base:test}
[ -n "${BASE:-}" ] || tests/deploy/base_image.sh trixie "$base"
build() {
    # --layers caches the dependencies when only the program has changed.
    buildah bud --layers --isolation chroot --format docker --network host \
        --ulimit nofile=10000:10000 --ulimit nproc=10000:10000 \
        --build-arg BASE="$base" --build-arg BUILD="$(git rev-parse --short HEAD)" \
        -f deploy/Dockerfile "$@" .
}
build -t localhost/conveyor:test
build --target gateway -t localhost/conveyor-gateway:test
