#!/usr/bin/env bash
# Make an environment with SGLang, for inference_model.backend=sglang_server.
#
#   scripts/setup_sglang.sh            in .venv-sglang
#   scripts/setup_sglang.sh FOLDER     elsewhere
#
# It is not the .venv of the trainer, because SGLang pins another torch. Environment variables that matter:
#   PYTHON           the interpreter to build on, Python 3.11 or newer (default: python3)
#   ACCELERATOR      cuda or cpu (default: cuda where nvidia-smi lists a GPU)
#   PIP_FIND_LINKS   folder(s) with wheels; a CPU build of torch found there is taken. Otherwise pip takes the
#                    ordinary one, which brings CUDA's libraries.
#
# With cuda, it is what pip makes of sglang's own requirements. With cpu, it installs those that a CPU can use
# (requirements_sglang_cpu.txt), this project's torch, a package that stands in for SGLang's kernels
# (scripts/sglang_cpu), and turns off two of torchvision's registrations that fail beside a CPU build of torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly SGLANG_VERSION=0.5.23 TORCHVISION_VERSION=0.28.0
venv=${1:-.venv-sglang}

say() { printf 'setup_sglang: %s\n' "$*" >&2; }
die() { printf 'setup_sglang: error: %s\n' "$*" >&2; exit 2; }

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null; }

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    || die "$python is no Python 3.11 or newer; name one: PYTHON=/path/to/python3.12 scripts/setup_sglang.sh"
accelerator=${ACCELERATOR:-$(if has_gpu; then echo cuda; else echo cpu; fi)}
torch=$(sed -n 's/^torch==//p' requirements_common.txt)

install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

say "making $venv on $("$python" --version) for $accelerator"
"$python" -m venv --clear "$venv" \
    || die "'$python -m venv' failed; on Debian and Ubuntu install the package python3-venv and try again"
case "$accelerator" in
    cuda) install "sglang==$SGLANG_VERSION" ;;
    cpu)
        install "torch==$torch" -r requirements_sglang_cpu.txt
        install --no-deps "torchvision==$TORCHVISION_VERSION" "sglang==$SGLANG_VERSION"
        packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        cp -r scripts/sglang_cpu/sgl_kernel "$packages/"
        # torchvision's ordinary wheel has operators for CUDA, which a CPU build of torch does not load.
        sed -i 's/^@torch\.library\.register_fake("torchvision::/# &/' "$packages/torchvision/_meta_registrations.py"
        ;;
    *) die "ACCELERATOR=$accelerator: it is cuda or cpu" ;;
esac
say "ready: inference_model.backend=sglang_server inference_model.server_python=$venv/bin/python"
