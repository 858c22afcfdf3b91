# The body of every batch script, which sources it after `config=FILE`: the arguments are overrides of that config, or
# --force. A job cannot query what it has asked for, so its own #SBATCH line says when SLURM signals it; MEGARL_SIGNAL_S
# is for a --signal on sbatch's command line. `requeue=no` keeps a job that was stopped by its time limit from coming back.
signal_s=${MEGARL_SIGNAL_S:-$(sed -n 's/^#SBATCH --signal=B:USR1@//p' "$0" | tail -n 1)}
requeue=${MEGARL_REQUEUE:-${requeue:-yes}}
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
: "${PYTHON:=python}"

# Config, plan and allocation are checked before anything starts on any node.
launch=$("$PYTHON" -m megarl.cluster.nodes prepare --scheduler slurm --signal-s "$signal_s" --config "$config" "$@")
[ -n "$launch" ] || exit 0  # the run has finished before
run_dir=$(dirname "$(dirname "$(dirname "$launch")")")

# SLURM signals this script alone. The ranks see the file at their next step boundary, save and exit.
stop() { [ -e "$run_dir/stop" ] || echo "$1" >"$run_dir/stop"; }
trap 'stop "the time limit is near (SIGUSR1)"' USR1
trap 'stop SIGTERM' TERM

# One agent per node starts the node's share and ends all of it (megarl/cluster/nodes/launcher.py).
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 \
  "$PYTHON" -m megarl.cluster.nodes.launcher "$launch" &
agents=$!
# A trapped signal interrupts `wait`.
while kill -0 "$agents" 2>/dev/null; do wait "$agents" || true; done

status=$("$PYTHON" -m megarl.cluster.nodes status "$launch")
if { [ "$status" = preempted ] || [ "$status" = unsaved ]; } && [ "$requeue" = yes ]; then
  echo "megarl: queued again as job $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID"
fi
[ "$status" = finished ] || [ "$status" = preempted ]
