#!/usr/bin/env bash
# Installs localrun as a user would, outside of the checkout, and checks that it works and that nothing stays behind.
#
# Builds the source package and from it the wheel, installs that into an empty environment, starts a daemon by asking the
# built-in model something, pulls from a hub on loopback, lists, measures for five seconds, stops and uninstalls, with an
# empty home folder. Then no process may be left, and no file outside of the folders that localrun names. Everything
# lives in one temporary folder. Needs python3 (3.11+) with venv, and curl; compiles llama.cpp if no wheel of it was kept
# or is named by LOCALRUN_WHEELS.
set -euo pipefail

checkout=$(cd "$(dirname "$0")/.." && pwd)
# Found now: where it leads may depend on the home folder, which changes below.
python=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')
PIP_CACHE_DIR=$("$python" -m pip cache dir)
export PIP_CACHE_DIR PIP_DISABLE_PIP_VERSION_CHECK=1
work=$(mktemp -d)
port=$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')

processes() { pgrep -f "$work/venv/" || true; }
end_hub() { exec 3>&-; }
clean_up() {
    end_hub
    local id
    for id in $(processes); do kill -9 "$id" 2>/dev/null || true; done
    rm -rf "$work"
}
trap clean_up EXIT
exec 3>/dev/null

fail() { echo "smoke: $*" >&2; exit 1; }
# The whole output is read first: a reader that stops early makes the writer fail.
expect() {
    local wanted=$1 output
    shift
    output=$("$@") || fail "$* ended with status $?"
    [[ $output == *"$wanted"* ]] || fail "$* does not say $wanted but: $output"
}
step() { echo "smoke: $* (${SECONDS} s)"; }

step "building"
# A copy without build/: leftovers of another build would get into the wheel.
mkdir "$work/source" "$work/home" "$work/tmp"
(cd "$checkout" && tar -c --exclude=./.git --exclude=./.venv --exclude=./build .) | tar -x -C "$work/source"
"$python" -m venv "$work/builder"
"$work/builder/bin/pip" install --quiet build
"$work/builder/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 ||
    { tail -20 "$work/build.log" >&2; fail "the packages do not build"; }
wheel=$(echo "$work"/dist/*.whl)
contents=$("$python" -m zipfile -l "$wheel")
for path in localrun/models/builtin/tiny.gguf localrun/models/builtin/LICENSE localrun/models/catalog.toml \
    localrun/docs/settings.md localrun/tui/theme.tcss share/man/man1/localrun.1; do
    [[ $contents == *"$path"* ]] || fail "the wheel does not contain $path"
done
for path in /corpus/ /train.py /held_out.py tests/; do
    [[ $contents != *"$path"* ]] || fail "the wheel contains $path"
done

step "installing"
"$python" -m venv "$work/venv"
(cd "$work/source" && "$python" -m localrun.native_build install --python "$work/venv/bin/python")
"$work/venv/bin/pip" install --quiet --constraint "$work/source/packaging/constraints.txt" "$wheel"

cd "$work/tmp"
for name in $(env | sed -n 's/^\(\(LOCALRUN\|HF\|XDG\)_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
export HOME="$work/home" TMPDIR="$work/tmp" LOCALRUN_PORT="$port" PYTHONDONTWRITEBYTECODE=1
localrun="$work/venv/bin/localrun"

mkfifo "$work/hub.stdin"
"$work/venv/bin/python" "$work/source/packaging/loopback_hub.py" "$work/source" "$work/endpoint" <"$work/hub.stdin" &
exec 3>"$work/hub.stdin"
for _ in $(seq 100); do [[ -s $work/endpoint ]] && break; sleep 0.1; done
HF_ENDPOINT=$(cat "$work/endpoint")
export HF_ENDPOINT

step "first answer"
answer=$("$localrun" run tiny "What is 3 + 4?" --option temperature=0 </dev/null)
[[ $answer == *7* ]] || fail "the built-in model said: $answer"

step "pull"
"$localrun" pull someone/tiny-GGUF:F16 2>"$work/pull.log" || { cat "$work/pull.log" >&2; fail "the pull failed"; }
expect someone/tiny-GGUF "$localrun" list
answer=$("$localrun" run someone/tiny-GGUF:F16 "What is 2 + 2?" --option temperature=0 </dev/null)
[[ $answer == *4* ]] || fail "the pulled model said: $answer"

step "list, show, ps, API"
expect tiny "$localrun" list
expect 4096 "$localrun" show tiny
expect '"pid"' "$localrun" ps --json
expect _LOCALRUN_COMPLETE "$localrun" completion bash
expect tiny curl -sf "http://127.0.0.1:$port/v1/models"
expect localrun_ curl -sf "http://127.0.0.1:$port/metrics"

step "bench"
# Against this daemon by its address: the command would start one of its own otherwise.
"$localrun" bench chat --seconds 5 --rate 1 --url "http://127.0.0.1:$port" --model tiny >"$work/bench.log" 2>&1 ||
    { cat "$work/bench.log" >&2; fail "the bench failed"; }
grep -q ttft "$work/bench.log" || { cat "$work/bench.log" >&2; fail "the bench shows no time to first token"; }

step "stop, uninstall"
"$localrun" stop --daemon
end_hub
for _ in $(seq 100); do [[ -n $(processes) ]] || break; sleep 0.1; done
[[ -z $(processes) ]] || { pgrep -af "$work/venv/" >&2; fail "a process stayed behind"; }
"$work/venv/bin/python" - "$work/home" "$work/tmp" <<'PYTHON' || fail "files where nobody would look for them"
import sys
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from localrun import config

documented = [*map(Path, (getattr(config.folders(), name) for name in config.Folders.__struct_fields__)), Path(HF_HOME)]
stray = [path for folder in sys.argv[1:] for path in Path(folder).rglob("*")
         if not path.is_dir() and not any(path.is_relative_to(known) for known in documented)]
print(*stray, sep="\n", end="\n" if stray else "", file=sys.stderr)
sys.exit(bool(stray))
PYTHON
"$work/venv/bin/pip" uninstall --quiet --yes localrun
leftover=$(find "$work/venv" \( -path '*site-packages/localrun*' -o -name 'localrun*' \) ! -name '*.pyc' -type f)
[[ -z $leftover ]] || fail "the uninstall left: $leftover"
step "passed"
