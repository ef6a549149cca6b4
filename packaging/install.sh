#!/usr/bin/env bash
# Installs localrun for one user, with llama.cpp compiled for the accelerator that this machine has.
#
# Looks at the machine, says what it will do, and does it: a virtual environment of its own, a link to the command, the
# man page and the completions, all below one prefix. --dry-run stops after saying it. --uninstall takes away what an
# installation put there, and leaves models, caches and settings alone.
#
# Invariants: nothing is written outside of the prefix (but pip's own cache); an unusable accelerator is said, never
# chosen. Does not: install compilers or drivers, use root's rights, or know the address of any package index.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: packaging/install.sh [OPTION]...

  --backend NAME   auto (the default), cpu, cuda, metal, vulkan or rocm
  --prefix DIR     where the program goes; the default is ~/.local
  --package WHAT   what pip installs: a folder, a wheel or a name; the default is the checkout of this script
  --index WHERE    take llama-cpp-python ready-made from there instead of compiling it: the URL of a package index of
                   builds for the chosen backend, or a folder of wheels
  --dry-run        say what would be done, and do nothing
  --uninstall      remove what an installation with the same --prefix put there
  --help           show this

The environment variable PYTHON names the interpreter; CMAKE_ARGS is passed on in front of what this script adds.
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=${here%/*}
backend=auto
prefix=$HOME/.local
package=$checkout
index=
is_dry_run=
is_uninstall=
problems=()
notes=()

fail() { echo "install: $*" >&2; exit 1; }
wrong_use() { echo "install: $*; see --help" >&2; exit 2; }
has() { command -v "$1" >/dev/null 2>&1; }
problem() { problems[${#problems[@]}]=$1; }
note() { notes[${#notes[@]}]=$1; }

while [[ $# -gt 0 ]]; do
    case $1 in
    --backend | --prefix | --package | --index)
        [[ $# -ge 2 && -n $2 ]] || wrong_use "$1 needs a value"
        case $1 in
        --backend) backend=$2 ;;
        --prefix) prefix=$2 ;;
        --package) package=$2 ;;
        --index) index=$2 ;;
        esac
        shift 2
        ;;
    --dry-run) is_dry_run=1; shift ;;
    --uninstall) is_uninstall=1; shift ;;
    --help | -h) usage; exit 0 ;;
    *) wrong_use "$1 is no option" ;;
    esac
done
case $backend in
auto | cpu | cuda | metal | vulkan | rocm) ;;
*) wrong_use "--backend is '$backend'; use auto, cpu, cuda, metal, vulkan or rocm" ;;
esac
[[ $prefix == /* ]] || prefix=$PWD/$prefix

environment=$prefix/lib/localrun
command_link=$prefix/bin/localrun
man_page=$prefix/share/man/man1/localrun.1
completion_bash=$prefix/share/bash-completion/completions/localrun
completion_zsh=$prefix/share/zsh/site-functions/_localrun
completion_fish=$prefix/share/fish/vendor_completions.d/localrun.fish
files=("$command_link" "$man_page" "$completion_bash" "$completion_zsh" "$completion_fish")

uninstall() {
    # Only a folder that is an environment with localrun in it is removed as a whole.
    if [[ -e $environment && ! -x $environment/bin/localrun ]]; then
        fail "$environment is not an installation of localrun; nothing was removed"
    fi
    [[ -e $environment || -L $command_link ]] || fail "there is no installation below $prefix"
    if [[ -L $command_link && $(readlink "$command_link") != "$environment/bin/localrun" ]]; then
        fail "$command_link belongs to another installation; nothing was removed"
    fi
    local path
    for path in "${files[@]}" "$environment"; do
        if [[ -n $is_dry_run ]]; then echo "would remove $path"; else rm -rf "$path"; fi
    done
    [[ -n $is_dry_run ]] || echo "removed; models, caches and settings are where they were (localrun/docs/data-formats.md)"
}

if [[ -n $is_uninstall ]]; then
    uninstall
    exit 0
fi

system=$(uname -s)
machine=$(uname -m)

# --- What the machine has: each function sets `device` and says by its status whether there is one ---

find_metal() {
    device="an Apple GPU"
    [[ $system == Darwin && $machine == arm64 ]]
}

find_cuda() {
    has nvidia-smi || return 1
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort -u | paste -s -d , -) || return 1
    [[ -n $device ]]
}

find_rocm() {
    has rocminfo || return 1
    # Agents are CPUs too; a GPU's is named by its instruction set.
    device=$(rocminfo 2>/dev/null | sed -n 's/^ *Name: *\(gfx[0-9a-f]*\) *$/\1/p' | sort -u | paste -s -d ';' -) || return 1
    [[ -n $device ]]
}

find_vulkan() {
    has vulkaninfo || return 1
    # A Vulkan device may be a program that computes on the CPU, which llama.cpp itself does faster.
    device=$(vulkaninfo --summary 2>/dev/null | awk -F' *= *' '
        /deviceType/ { is_gpu = ($2 ~ /DISCRETE_GPU|INTEGRATED_GPU/) }
        /deviceName/ { if (is_gpu) print $2 }' | sort -u | paste -s -d , -) || return 1
    [[ -n $device ]]
}

find_cpu() { device="the processor"; }

# --- What compiling for it takes: each function sets `missing`, empty if all is there ---

cuda_compiler() {
    if has nvcc; then command -v nvcc; return; fi
    local path=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
    [[ -x $path ]] && echo "$path"
}

rocm_compiler() {
    if has hipcc; then command -v hipcc; return; fi
    local path=${ROCM_PATH:-/opt/rocm}/bin/hipcc
    [[ -x $path ]] && echo "$path"
}

missing_for() {
    missing=
    [[ -z $index ]] || return 0
    case $1 in
    cuda) [[ -n $(cuda_compiler || true) ]] || missing="the CUDA toolkit (nvcc)" ;;
    rocm) [[ -n $(rocm_compiler || true) ]] || missing="ROCm's compiler (hipcc)" ;;
    vulkan) has glslc || missing="Vulkan's shader compiler (glslc), headers and SPIRV-Headers" ;;
    metal) has xcrun || missing="the Xcode command line tools (xcode-select --install)" ;;
    esac
}

choose() {
    local candidate
    for candidate in metal cuda rocm vulkan; do
        "find_$candidate" || continue
        missing_for "$candidate"
        if [[ -z $missing ]]; then backend=$candidate; return; fi
        note "$device could be used with $candidate, but $missing is missing: install it, or pass --index"
    done
    backend=cpu
    find_cpu
}

if [[ $backend == auto ]]; then
    choose
else
    "find_$backend" || { device="no device that was found"; note "no device for $backend was found here"; }
    missing_for "$backend"
    [[ -z $missing ]] || problem "$missing is missing, which compiling for $backend needs; install it, or pass --index"
fi

# --- How llama.cpp is compiled ---

variables=()
cmake_args=${CMAKE_ARGS:-}
add_cmake() { cmake_args="${cmake_args:+$cmake_args }$*"; }

case $backend in
cpu)
    add_cmake -DGGML_NATIVE=on
    [[ $system != Darwin ]] || add_cmake -DGGML_METAL=off
    ;;
metal) add_cmake -DGGML_METAL=on ;;
vulkan) add_cmake -DGGML_NATIVE=on -DGGML_VULKAN=on ;;
cuda)
    add_cmake -DGGML_NATIVE=on -DGGML_CUDA=on
    # Without the list every architecture is compiled, which takes many times as long. "9.0" is 90.
    architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
        sed -n 's/^ *\([0-9][0-9]*\)\.\([0-9]\) *$/\1\2/p' | sort -u | paste -s -d ';' -) || architectures=
    [[ -z $architectures ]] || add_cmake "-DCMAKE_CUDA_ARCHITECTURES=$architectures"
    has nvcc || variables+=("CUDACXX=$(cuda_compiler || true)")
    ;;
rocm)
    add_cmake -DGGML_NATIVE=on -DGGML_HIP=on
    [[ $device != gfx* ]] || add_cmake "-DGPU_TARGETS=$device"
    if has hipconfig; then variables+=("HIPCXX=$(hipconfig -l)/clang" "HIP_PATH=$(hipconfig -R)"); fi
    ;;
esac
[[ -n $index ]] || variables+=("CMAKE_ARGS=$cmake_args")

# --- Python ---

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if has "$candidate" && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

if ! python=$(find_python); then
    python=python3
    problem "no Python 3.11 or newer was found; install one, or name it: PYTHON=... packaging/install.sh"
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    problem "$python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"
fi
if [[ -z $index ]] && ! { has c++ || has g++ || has clang++; }; then
    problem "no C++ compiler was found; on Debian and Ubuntu: apt install g++, on macOS: xcode-select --install"
fi
if [[ -e $command_link && ! -L $command_link ]]; then
    problem "$command_link is a file that this script did not make; remove it, or choose another --prefix"
fi
if [[ -e $environment && ! -x $environment/bin/python ]]; then
    problem "$environment is in the way and is no virtual environment; remove it, or choose another --prefix"
fi

# --- The plan, and doing it ---

pip=("$environment/bin/python" -m pip install --quiet)
[[ ! -f $here/constraints.txt ]] || pip+=(--constraint "$here/constraints.txt")
if [[ -z $index ]]; then
    # pip's cache does not tell a build for one accelerator from that for another.
    library=("${pip[@]}" --no-cache-dir --force-reinstall --no-deps --no-binary llama-cpp-python)
elif [[ -d $index ]]; then
    library=("${pip[@]}" --no-index --find-links "$index" --force-reinstall --no-deps --only-binary llama-cpp-python)
else
    library=("${pip[@]}" --no-cache-dir --index-url "$index" --force-reinstall --no-deps
        --only-binary llama-cpp-python)
fi
pinned=$(sed -n 's/^ *"\(llama-cpp-python==[0-9.]*\)".*/\1/p' "$checkout/pyproject.toml" 2>/dev/null || true)
library+=("${pinned:-llama-cpp-python}")
extra=
[[ $backend != cuda ]] || extra="[nvidia]"

quoted() {
    local word line=
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then line+=" $word"; else line+=" '$word'"; fi
    done
    echo " $line"
}

say_plan() {
    echo "system:   $system $machine"
    echo "backend:  $backend, for $device"
    if [[ -z $index ]]; then
        echo "compile:  llama.cpp, CMAKE_ARGS=\"$cmake_args\" (about five minutes on two cores, longer for GPUs)"
    else
        echo "compile:  nothing; llama-cpp-python comes from $index"
    fi
    echo "program:  $environment, linked as $command_link"
    local text
    for text in ${notes[@]+"${notes[@]}"}; do echo "note:     $text"; done
    for text in ${problems[@]+"${problems[@]}"}; do echo "problem:  $text"; done
    echo "commands:"
    quoted "$python" -m venv "$environment"
    quoted "${pip[@]}" --upgrade pip
    quoted ${variables[@]+"${variables[@]}"} "${library[@]}"
    quoted "${pip[@]}" "$package$extra"
    quoted ln -sfn "$environment/bin/localrun" "$command_link"
}

# A file with the output of a command, or nothing at all.
write_output() {
    local path=$1
    shift
    mkdir -p "$(dirname "$path")"
    "$@" >"$path.new" && mv "$path.new" "$path"
}

say_plan
if [[ ${#problems[@]} -gt 0 ]]; then fail "not installed; see the problems above"; fi
[[ -z $is_dry_run ]] || exit 0

if [[ $package == "$checkout" ]]; then
    # A copy without build/: modules that were removed since an earlier build would get into the program.
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    (cd "$checkout" && tar -c --exclude=./.git --exclude=./.venv --exclude=./build .) | tar -x -C "$source"
    package=$source
fi
"$python" -m venv "$environment"
"${pip[@]}" --upgrade pip
env ${variables[@]+"${variables[@]}"} "${library[@]}"
"${pip[@]}" "$package$extra"
mkdir -p "$(dirname "$command_link")"
ln -sfn "$environment/bin/localrun" "$command_link"
write_output "$completion_bash" "$command_link" completion bash
write_output "$completion_zsh" "$command_link" completion zsh
write_output "$completion_fish" "$command_link" completion fish
[[ ! -f $environment/share/man/man1/localrun.1 ]] || write_output "$man_page" cat "$environment/share/man/man1/localrun.1"

echo "installed: $("$command_link" --version)"
case :$PATH: in
*":$prefix/bin:"*) ;;
*) echo "note: $prefix/bin is not on PATH; the command is $command_link" ;;
esac
