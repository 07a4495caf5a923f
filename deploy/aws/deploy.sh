#!/usr/bin/env bash
# From an AWS account to a running service, in one command; again for every update:
#   deploy/aws/deploy.sh [Parameter=value ...]      the parameters of service.yaml (docs/deploy.md)
# NAME (default conveyor) names the stacks and the repository. IMAGE takes an image that is already in
# a registry; otherwise this script builds one and pushes it to ECR. DATA_PARAMETERS go to data.yaml.
# It needs the AWS CLI with credentials, and docker or podman unless IMAGE is set.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
name=${NAME:-conveyor}
fail() { echo "deploy.sh: $*" >&2; exit 1; }

command -v aws >/dev/null || fail "install the AWS CLI first"
region=${AWS_REGION:-${AWS_DEFAULT_REGION:-$(aws configure get region || true)}}
[ -n "$region" ] || fail "set AWS_REGION"
# Version 1 of the AWS CLI reads only the second one.
export AWS_REGION=$region AWS_DEFAULT_REGION=$region
account=$(aws sts get-caller-identity --query Account --output text) || fail "no AWS credentials"

image=${IMAGE:-}
if [ -z "$image" ]; then
    builder=$(command -v docker || command -v podman) || fail "install docker or podman, or set IMAGE"
    build=$(git -C "$root" rev-parse --short=12 HEAD)
    git -C "$root" diff --quiet HEAD || build="$build-$(date +%s)"
    registry=$account.dkr.ecr.$region.amazonaws.com
    image=$registry/$name:$build
    aws ecr describe-repositories --repository-names "$name" >/dev/null 2>&1 \
        || aws ecr create-repository --repository-name "$name" \
            --image-scanning-configuration scanOnPush=true --image-tag-mutability IMMUTABLE >/dev/null
    "$builder" build -f "$root/deploy/Dockerfile" --build-arg BUILD="$build" -t "$image" "$root"
    aws ecr get-login-password | "$builder" login --username AWS --password-stdin "$registry"
    "$builder" push "$image"
fi

deploy() {
    local stack=$1 template=$2; shift 2
    # A failed creation leaves a stack that can only be removed. It holds nothing yet.
    if [ "$(aws cloudformation describe-stacks --stack-name "$stack" \
            --query 'Stacks[0].StackStatus' --output text 2>/dev/null || true)" = ROLLBACK_COMPLETE ]; then
        aws cloudformation delete-stack --stack-name "$stack"
        aws cloudformation wait stack-delete-complete --stack-name "$stack"
    fi
    local parameters=()
    [ $# -eq 0 ] || parameters=(--parameter-overrides "$@")
    aws cloudformation deploy --stack-name "$stack" --template-file "$here/$template" \
        --capabilities CAPABILITY_IAM --no-fail-on-empty-changeset "${parameters[@]}" \
        || fail "$stack failed and was rolled back: aws cloudformation describe-stack-events --stack-name $stack"
}

read -ra data_parameters <<<"${DATA_PARAMETERS:-}"
# The data stack first: the service imports its names.
deploy "$name-data" data.yaml "${data_parameters[@]}"
deploy "$name" service.yaml "DataStack=$name-data" "Image=$image" "$@"

output() {
    aws cloudformation describe-stacks --stack-name "$1" --query "Stacks[0].Outputs[?OutputKey=='$2'].OutputValue" --output text
}
show="aws secretsmanager get-secret-value --query SecretString --output text --secret-id"
echo "Conveyor runs at $(output "$name" Url), behind the load balancer $(output "$name" LoadBalancer)"
echo "Its API keys: $show $(output "$name-data" ApiKeys)"
echo "The key of operators, for the dashboard: $show $(output "$name-data" AdminKey)"
