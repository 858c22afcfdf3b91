#!/usr/bin/env bash
# Any config on this machine: launch/local.sh CONFIG [section.key=value ...]
config=${1:?usage: launch/local.sh CONFIG [section.key=value ...]}
shift
set -euo pipefail
: "${PYTHON:=python}"

# Config, plan and this machine are checked before anything starts.
launch=$("$PYTHON" -m megarl.cluster.nodes prepare --scheduler local --config "$config" "$@")
run_dir=$(dirname "$(dirname "$(dirname "$launch")")")

# The ranks see the file at their next step boundary, save and exit.
stop() {
  if [ ! -e "$run_dir/stop" ]; then
    echo "megarl: finishing the step, saving; again to abort" >&2
    echo "$1" >"$run_dir/stop"
  fi
}
# The agent counts INT and TERM, which a Ctrl-C sends to both: at the second one it ends everything at once.
agent=
trap 'stop SIGUSR1' USR1
trap 'stop SIGTERM; [ -z "$agent" ] || kill -TERM "$agent" 2>/dev/null || true' TERM
trap 'stop SIGINT; [ -z "$agent" ] || kill -INT "$agent" 2>/dev/null || true' INT

"$PYTHON" -m megarl.cluster.nodes.agent "$launch" 0 &
agent=$!
# A trapped signal interrupts `wait`.
while kill -0 "$agent" 2>/dev/null; do wait "$agent" || true; done

status=$("$PYTHON" -m megarl.cluster.nodes status "$launch")
[ "$status" = finished ] || [ "$status" = preempted ]
