#!/usr/bin/env bash
# Set the project up from the kit in which this script lies, without a package index (docs/offline.md).
#
#   bash KIT/setup.sh [FOLDER]      the project goes to FOLDER (default: torchrl-grpo), which must be new
#
# PYTHON names the interpreter, as for scripts/setup.sh. The kit is needed no longer than this takes, but for its
# models and data.
set -euo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
target=${1:-torchrl-grpo}

die() { printf 'setup: error: %s\n' "$*" >&2; exit 2; }

case "$kit" in *[[:space:],]*) die "$kit has a space or a comma, by which pip and uv separate folders; move the kit" ;; esac
[ ! -e "$target" ] || die "$target exists; name a new folder: bash $kit/setup.sh FOLDER"
(cd "$kit" && sha256sum --check --quiet --strict SHA256SUMS) \
    || die "files of the kit are missing or damaged (above); copy them again"
mkdir -p "$target"
tar -xf "$kit/project.tar" -C "$target"
cd "$target"
. "$kit/settings"
export ACCELERATOR VLLM PIP_NO_INDEX=1 UV_NO_INDEX=1 UV_OFFLINE=1 PIP_FIND_LINKS="$kit/wheels"
bash scripts/setup.sh
for folder in "$kit"/model/* "$kit"/data/*; do
    if [ -e "$folder" ]; then printf 'setup: the kit has %s\n' "$folder" >&2; fi
done
