#!/usr/bin/env bash
# Make a folder from which a machine without a package index is set up (docs/offline.md).
#
#   ACCELERATOR=cuda scripts/offline_kit.sh FOLDER [--model FOLDER] [--data FOLDER]
#
# It runs on a machine with a package index. ACCELERATOR (cuda or cpu) says what the target has; a GPU is not needed
# here. PYTHON and VLLM choose as in scripts/setup.sh: the interpreter must have the target's version of Python. The
# target then runs `bash FOLDER/setup.sh`.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'offline_kit: %s\n' "$*" >&2; }
die() { printf 'offline_kit: error: %s\n' "$*" >&2; exit 2; }

absolute() { case "$1" in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$here/$1" ;; esac; }

[ $# -ge 1 ] || die "name the folder to make: scripts/offline_kit.sh FOLDER [--model FOLDER] [--data FOLDER]"
kit=$(realpath -m "$(absolute "$1")")
case "$kit" in *[[:space:],]*) die "$kit has a space or a comma, by which pip and uv separate folders; name another folder" ;; esac
case "${ACCELERATOR:-}" in cpu | cuda) ;; *) die "ACCELERATOR=${ACCELERATOR:-} does not say what the target has; write ACCELERATOR=cuda or ACCELERATOR=cpu" ;; esac
shift
declare -A copies=()
while [ $# -gt 0 ]; do
    case "$1" in
        --model | --data)
            if [ -z "${2:-}" ] || [ ! -d "$(absolute "$2")" ]; then die "$1 ${2:-}: there is no such folder"; fi
            folder=$(cd "$(absolute "$2")" && pwd)
            place=${1#--}/$(basename "$folder")
            [ -z "${copies[$place]:-}" ] || die "$1 $2: $place of the kit is ${copies[$place]} already; rename one of them"
            copies[$place]=$folder
            shift 2
            ;;
        *) die "unknown argument '$1'; use --model FOLDER or --data FOLDER" ;;
    esac
done
[ ! -e "$kit" ] || die "$kit exists; name a new folder"
git rev-parse --git-dir >/dev/null 2>&1 || die "this is no git checkout, and the kit holds what git has committed"
mkdir -p "$kit/wheels"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say "resolving"
bash scripts/setup.sh --lock "$work/pylock.toml"
python=$work/venv/bin/python
"$python" scripts/locked_wheels.py "$work/pylock.toml" >"$work/files"
# What scripts/setup.sh installs besides, and what builds the checkout.
sed -n 's/^readonly UV_VERSION=/uv==/p' scripts/setup.sh >>"$work/files"
grep -v '^#' requirements_smollm2.txt >>"$work/files"
sed -n 's/^requires = \["\(.*\)"\]/\1/p' pyproject.toml >>"$work/files"
say "downloading $(wc -l <"$work/files") packages"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$kit/wheels" -r "$work/files"

git archive --format=tar --output="$kit/project.tar" HEAD
for place in "${!copies[@]}"; do
    mkdir -p "$kit/${place%%/*}"
    cp -rL "${copies[$place]}" "$kit/$place"
done
cp scripts/offline_setup.sh "$kit/setup.sh"
printf 'ACCELERATOR=%s\nVLLM=%s\n' "$ACCELERATOR" "${VLLM:-0.32}" >"$kit/settings"
(cd "$kit" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)

say "checking that the wheels suffice"
rm -rf "$work/venv"
PIP_NO_INDEX=1 UV_NO_INDEX=1 UV_OFFLINE=1 PIP_FIND_LINKS=$kit/wheels bash scripts/setup.sh --lock "$work/pylock.offline.toml" \
    || die "a package is missing in $kit/wheels; uv's message is above"
say "$kit is ready, $(du -sh "$kit" | cut -f1); on the target: bash setup.sh"
