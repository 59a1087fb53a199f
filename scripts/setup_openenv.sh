#!/usr/bin/env bash
# Make an environment with OpenEnv, for servers that env.environment=openenv:COMMAND starts.
#
#   scripts/setup_openenv.sh            in .venv-openenv
#   scripts/setup_openenv.sh FOLDER     elsewhere
#
# It is not the .venv of the trainer, because OpenEnv asks for other versions of packages that vLLM needs.
# PYTHON names the interpreter to build on, Python 3.10 or newer (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly OPENENV_VERSION=0.10.0
venv=${1:-.venv-openenv}
python=${PYTHON:-python3}

say() { printf 'setup_openenv: %s\n' "$*" >&2; }
die() { printf 'setup_openenv: error: %s\n' "$*" >&2; exit 2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
    || die "$python is no Python 3.10 or newer; name one: PYTHON=/path/to/python3.12 scripts/setup_openenv.sh"
say "making $venv on $("$python" --version)"
"$python" -m venv --clear "$venv" \
    || die "'$python -m venv' failed; on Debian and Ubuntu install the package python3-venv and try again"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "openenv==$OPENENV_VERSION"
say "ready: for the tests, set OPENENV_PYTHON=$venv/bin/python"
