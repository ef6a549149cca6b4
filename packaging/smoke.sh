#!/usr/bin/env bash
# Installs localrun as a user would, outside of the checkout, and checks that it works and that nothing stays behind.
#
# Builds the wheel, installs it into an empty environment, starts a daemon by asking the built-in model something, lists,
# shows, stops, uninstalls. Everything lives in one temporary folder. Needs python3 (3.11+) with venv, and curl.
set -euo pipefail

checkout=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
port=$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
export LOCALRUN_HOME="$work/home" LOCALRUN_PORT="$port"
trap 'pkill -f "$work/venv/" 2>/dev/null || true; rm -rf "$work"' EXIT

fail() { echo "smoke: $*" >&2; exit 1; }

echo "smoke: building and installing"
"$python" -m venv "$work/venv"
# A copy without build/: leftovers of another build would get into the wheel.
mkdir "$work/source"
(cd "$checkout" && tar -c --exclude=.git --exclude=.venv --exclude=build .) | tar -x -C "$work/source"
"$work/venv/bin/pip" install --quiet "$work/source"
cd "$work"
localrun="$work/venv/bin/localrun"

echo "smoke: first answer"
answer=$("$localrun" run tiny "What is 3 + 4?" --option temperature=0 </dev/null)
[[ $answer == *7* ]] || fail "the built-in model said: $answer"

echo "smoke: list, show, ps, API"
"$localrun" list | grep -q tiny || fail "list does not show tiny"
"$localrun" show tiny | grep -q 4096 || fail "show does not name the context"
"$localrun" ps --json | grep -q '"pid"' || fail "ps does not name the engine's pid"
curl -sf "http://127.0.0.1:$port/v1/models" | grep -q tiny || fail "/v1/models does not list tiny"
curl -sf "http://127.0.0.1:$port/metrics" | grep -q localrun_ || fail "/metrics has no localrun_ lines"

echo "smoke: stop, uninstall"
"$localrun" stop --daemon
for _ in $(seq 50); do pgrep -f "$work/venv/" >/dev/null || break; sleep 0.1; done
pgrep -af "$work/venv/" && fail "a process stayed behind"
outside=$(find "$work" -mindepth 1 -maxdepth 1 ! -name venv ! -name source ! -name home)
[[ -z $outside ]] || fail "files outside of LOCALRUN_HOME: $outside"
"$work/venv/bin/pip" uninstall --quiet --yes localrun
leftover=$(find "$work/venv" -path '*site-packages/localrun*' ! -name '*.pyc' ! -name __pycache__ -type f)
[[ -z $leftover ]] || fail "the uninstall left: $leftover"
echo "smoke: passed"
