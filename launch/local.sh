#!/usr/bin/env bash
# Any config on this machine: launch/local.sh CONFIG [section.key=value ...]
config=${1:?usage: launch/local.sh CONFIG [section.key=value ...]}
shift
set -euo pipefail
: "${PYTHON:=python}"

# Config, plan and this machine are checked before anything starts.
launch=$("$PYTHON" -m megarl.cluster.nodes prepare --scheduler local --config "$config" "$@")
[ -n "$launch" ] || exit 0  # the run has finished before
run_dir=$(dirname "$(dirname "$(dirname "$launch")")")

# The ranks see the file at their next step boundary, save and exit.
said=
stop() {
  # The agent, which a Ctrl-C reaches too, may have written the file already.
  [ -n "$said" ] || echo "megarl: finishing the step, saving; again to abort" >&2
  said=yes
  [ -e "$run_dir/stop" ] || echo "$1" >"$run_dir/stop"
}
# The agent counts INT and TERM, which a Ctrl-C sends to both: at the second one it ends everything at once.
agent=
trap 'stop SIGUSR1' USR1
trap 'stop SIGTERM; [ -z "$agent" ] || kill -TERM "$agent" 2>/dev/null || true' TERM
trap 'stop SIGINT; [ -z "$agent" ] || kill -INT "$agent" 2>/dev/null || true' INT

"$PYTHON" -m megarl.cluster.nodes.launcher "$launch" 0 &
agent=$!
# A trapped signal interrupts `wait`.
while kill -0 "$agent" 2>/dev/null; do wait "$agent" || true; done

status=$("$PYTHON" -m megarl.cluster.nodes status "$launch")
[ "$status" = finished ] || [ "$status" = preempted ]
