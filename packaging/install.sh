#!/usr/bin/env bash
# Installs localrun for one user, with llama.cpp compiled for the accelerator that this machine has.
#
# Looks at the machine, says what it will do, and does it: a virtual environment of its own, a link to the command, the
# man page and the completions, all below one prefix. --dry-run stops after saying it. --uninstall takes away what an
# installation put there, and leaves models, caches and settings alone. How llama.cpp is built is not said here but in
# localrun/native_build.
#
# Invariants: nothing is written outside of the prefix but pip's cache and the compiled wheel's; an unusable accelerator
# is said, never chosen. Does not: install compilers or drivers, use root's rights, or know the address of any package index.
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

The environment variable PYTHON names the interpreter; what CMAKE_ARGS says wins
over what this script chooses. LOCALRUN_WHEELS is the default of --index.
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=${here%/*}
backend=auto
prefix=$HOME/.local
package=$checkout
index=${LOCALRUN_WHEELS:-}
is_dry_run=
is_uninstall=
problems=()

fail() { echo "install: $*" >&2; exit 1; }
wrong_use() { echo "install: $*; see --help" >&2; exit 2; }
has() { command -v "$1" >/dev/null 2>&1; }
problem() { problems[${#problems[@]}]=$1; }

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
[[ ! -d $index ]] || index=$(cd "$index" && pwd)

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
    [[ -n $is_dry_run ]] || echo "removed; models, caches and settings are where they were (localrun/docs/files.md)"
}

if [[ -n $is_uninstall ]]; then
    uninstall
    exit 0
fi

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
if [[ $package == */* && $package != *://* && ! -e $package ]]; then
    problem "--package: there is no $package; name a folder, a wheel or a package"
fi
if [[ -e $command_link && ! -L $command_link ]]; then
    problem "$command_link is a file that this script did not make; remove it, or choose another --prefix"
fi
if [[ -e $environment && ! -x $environment/bin/python ]]; then
    problem "$environment is in the way and is no virtual environment; remove it, or choose another --prefix"
fi

# --- The plan, and doing it ---

native=("$python" -B -m localrun.native_build)
library=(install --python "$environment/bin/python" --backend "$backend")
[[ -z $index ]] || library+=(--wheels "$index")
pip=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
[[ ! -f $here/constraints.txt ]] || pip+=(--constraint "$here/constraints.txt")

# What the machine has, what of it can be used, and how llama.cpp is built for it. Without Python nobody can say.
chosen=
is_refused=
if [[ ${#problems[@]} -eq 0 ]]; then
    # Its problems are lines like ours.
    chosen=$(cd "$checkout" && "${native[@]}" plan --backend "$backend" --wheels "$index") || is_refused=1
fi
extra=
[[ $chosen != *"backend:  cuda"* ]] || extra="[nvidia]"

quoted() {
    local word line=
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then line+=" $word"; else line+=" '$word'"; fi
    done
    echo " $line"
}

say_plan() {
    local text
    [[ -z $chosen ]] || printf '%s\n' "$chosen"
    echo "program:  $environment, linked as $command_link"
    for text in ${problems[@]+"${problems[@]}"}; do echo "problem:  $text"; done
    echo "commands:"
    quoted "$python" -m venv "$environment"
    quoted "${native[@]}" "${library[@]}"
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
if [[ -n $is_refused || ${#problems[@]} -gt 0 ]]; then fail "not installed; see the problems above"; fi
[[ -z $is_dry_run ]] || exit 0

if [[ $package == "$checkout" ]]; then
    # A copy without build/: modules that were removed since an earlier build would get into the program.
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    (cd "$checkout" && tar -c --exclude=./.git --exclude=./.venv --exclude=./build .) | tar -x -C "$source"
    package=$source
fi
"$python" -m venv "$environment"
(cd "$checkout" && "${native[@]}" "${library[@]}")
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
