#!/usr/bin/env bash
# Builds localhost/conveyor:test. Without a registry the base is made from Debian packages.
set -euo pipefail
cd "$(git rev-parse --show-toplevel)"
limits=(--ulimit nofile=10000:10000 --ulimit nproc=10000:10000)
build=(buildah bud --isolation chroot --format docker --network host "${limits[@]}")
base=${BASE:-localhost/python-base:test}
if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    command -v mmdebstrap >/dev/null || apt-get install -y --no-install-recommends mmdebstrap
    context=$(mktemp -d)
    trap 'rm -rf "$context"' EXIT
    mmdebstrap --variant=minbase --include=python3,python3-venv,ca-certificates trixie "$context/base.tar"
    cp /etc/ssl/certs/ca-certificates.crt "$context/ca.crt"
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ntimeout = 180\n' >"$context/pip.conf"
    printf '%s\n' 'FROM scratch' 'ADD base.tar /' 'COPY ca.crt /etc/ssl/certs/ca-certificates.crt' \
        'COPY pip.conf /etc/pip.conf' 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        >"$context/Dockerfile"
    "${build[@]}" -t "$base" "$context"
fi
"${build[@]}" --build-arg BASE="$base" --build-arg BUILD="$(git rev-parse --short HEAD)" \
    -f deploy/Dockerfile -t localhost/conveyor:test .
