#!/usr/bin/env bash
# Any config on this machine: launch/local.sh CONFIG [section.key=value ...]
config=${1:?usage: launch/local.sh CONFIG [section.key=value ...]}
shift
set -euo pipefail
: "${PYTHON:=python}"

# Config, plan and this machine are checked before anything starts.
launch=$("$PYTHON" -m megarl.cluster.nodes prepare --scheduler local --config "$config" "$@")
run_dir=$(dirname "$(dirname "$(dirname "$launch")")")

# The ranks see the file at their next step boundary, save and exit. A second Ctrl-C ends everything at once.
stop() { [ -e "$run_dir/stop" ] || echo "$1" >"$run_dir/stop"; }
trap 'stop SIGUSR1' USR1
trap 'stop SIGTERM' TERM
trap 'stop SIGINT' INT

"$PYTHON" -m megarl.cluster.nodes.agent "$launch" 0 &
agent=$!
# A trapped signal interrupts `wait`.
while kill -0 "$agent" 2>/dev/null; do wait "$agent" || true; done

status=$("$PYTHON" -m megarl.cluster.nodes status "$launch")
[ "$status" != failed ]
