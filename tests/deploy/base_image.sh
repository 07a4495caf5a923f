#!/usr/bin/env bash
# base_image.sh SUITE IMAGE: builds an image of a Debian suite with its own Python, for machines
# without a registry. An existing image is kept.
set -euo pipefail
suite=$1 image=$2
if buildah inspect --type image "$image" >/dev/null 2>&1; then exit; fi
command -v mmdebstrap >/dev/null || apt-get install -y --no-install-recommends mmdebstrap
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
# Mirrors may be outdated, so their validity date is not checked; signatures are.
mmdebstrap --variant=minbase --aptopt='Acquire::Check-Valid-Until "false"' \
    --include=python3,python3-venv,ca-certificates "$suite" "$context/base.tar"
# The image uses the certificates and package registries of this machine.
cp /etc/ssl/certs/ca-certificates.crt "$context/ca.crt"
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ntimeout = 180\n' >"$context/pip.conf"
printf '%s\n' 'FROM scratch' 'ADD base.tar /' 'COPY ca.crt /etc/ssl/certs/ca-certificates.crt' \
    'COPY pip.conf /etc/pip.conf' 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    >"$context/Dockerfile"
buildah bud --isolation chroot --format docker --network host --ulimit nofile=10000:10000 --ulimit nproc=10000:10000 \
    -t "$image" "$context"
