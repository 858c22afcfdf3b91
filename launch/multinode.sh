#!/usr/bin/env bash
# Any config on several machines without a scheduler: launch/multinode.sh HOST,HOST,... CONFIG [section.key=value ...]
# Run it on a machine that reaches all hosts by ssh without a password. The repository, the Python environment and the
# run directory must be at the same path on every host, on a shared file system. Name the trainer nodes first, then the
# rollout nodes.
# MEGARL_RSH replaces ssh: a command that takes a host and one shell command line, and passes its standard input on. The
# login shell on the hosts must be a POSIX shell (bash, dash, zsh).
set -euo pipefail
hosts=${1:?usage: launch/multinode.sh HOST,HOST,... CONFIG [section.key=value ...]}
config=${2:?usage: launch/multinode.sh HOST,HOST,... CONFIG [section.key=value ...]}
shift 2
: "${PYTHON:=python}" "${MEGARL_RSH:=ssh -o BatchMode=yes}"

# Config, plan and host list are checked before anything starts on any host.
launch=$("$PYTHON" -m megarl.cluster.nodes prepare --scheduler local --hosts "$hosts" --config "$config" "$@")
[ -n "$launch" ] || exit 0  # the run has finished before
run_dir=$(dirname "$(dirname "$(dirname "$launch")")")

# The ranks see the file at their next step boundary, save and exit. A second SIGINT or SIGTERM ends the job at once.
asked=0 said=
stop() {
  # The agent, which a Ctrl-C reaches too, may have written the file already.
  [ -n "$said" ] || echo "megarl: finishing the step, saving; again to abort" >&2
  said=yes
  [ -e "$run_dir/stop" ] || echo "$1" >"$run_dir/stop"
  [ "$1" = SIGUSR1 ] || asked=$((asked + 1))
  if [ "$asked" -eq 2 ]; then
    "$PYTHON" -m megarl.cluster.nodes fail "$launch" "$(hostname)" "received a second stop signal" || true
  fi
}
trap 'stop SIGUSR1' USR1
trap 'stop SIGTERM' TERM
trap 'stop SIGINT' INT

# A remote shell starts with an environment of its own: pass these variables of this one, by its standard input, because
# every user of a host can read the command lines of all processes, and RAY_AUTH_TOKEN or VLLM_API_KEY are secrets.
environment=$("$PYTHON" -m megarl.cluster.nodes environment "$launch")

# One agent per host starts the host's share and ends all of it (megarl/cluster/nodes/launcher.py). Agents report failures
# to each other through the run directory and notice when one of them is silent, so all of them end.
start() { # HOST INDEX
  local code=0 remote
  printf '%s\n' "$environment" | $MEGARL_RSH "$1" \
    "cd '$PWD' && eval \"\$(cat)\" && exec '$PYTHON' -m megarl.cluster.nodes.launcher '$launch' $2 </dev/null" &
  remote=$!
  trap 'kill "$remote" 2>/dev/null || true' TERM
  wait "$remote" || code=$?
  if [ "$code" -gt 1 ]; then
    "$PYTHON" -m megarl.cluster.nodes fail "$launch" "$1" "its agent ended with code $code (255: ssh cannot reach it)"
  fi
}
index=0
agents=()
for host in ${hosts//,/ }; do
  start "$host" "$index" &
  agents+=("$!")
  index=$((index + 1))
done

# The connection to a lost host may hang forever: this many seconds after the job has failed, or the first node's agent
# has ended, which is after the end of the run, all connections are ended.
failed_wait_s=90
ended() { [ -e "$(dirname "$launch")/failed.json" ] || ! kill -0 "${agents[0]}" 2>/dev/null; }
living() { for agent in "${agents[@]}"; do kill -0 "$agent" 2>/dev/null && return; done; return 1; }
while living; do
  sleep 1 &
  wait "$!" || true # a trapped signal interrupts `wait`
  if ended; then
    failed_wait_s=$((failed_wait_s - 1))
    [ "$failed_wait_s" -gt 0 ] || kill "${agents[@]}" 2>/dev/null || true
  fi
done

status=$("$PYTHON" -m megarl.cluster.nodes status "$launch")
[ "$status" = finished ] || [ "$status" = preempted ]
