#!/usr/bin/env bash
# Starts the ranks of one node in a job step with torchrun, and passes a request to save and exit on to the ranks.
set -euo pipefail

first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
restart=${SLURM_RESTART_COUNT:-0}

# torchrun would kill its ranks 30 s after a signal, even if they have not saved. Therefore torchrun ignores USR1 and
# TERM, and handles only SIGINT (older versions do not know the variable). On some clusters Slurm signals only this
# script, on others also the processes below the script.
(
    trap '' USR1 TERM
    export PET_SIGNALS_TO_HANDLE=SIGINT
    exec torchrun \
        --nnodes "$SLURM_NNODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts 0 \
        --rdzv-backend c10d --rdzv-endpoint "$first_host:${RDZV_PORT:-$((20000 + SLURM_JOB_ID % 10000))}" \
        --rdzv-id "$SLURM_JOB_ID.$restart.$SLURM_STEP_ID" --local-addr "$SLURMD_NODENAME" \
        --log-dir "$LOGS/restart-$restart/step-$SLURM_STEP_ID/$SLURMD_NODENAME" --tee 3 \
        "$@"
) &
torchrun=$!

# Slurm sends USR1 because of --signal, and TERM at a preemption or at the time limit. The ranks are torchrun's
# children; at SIGTERM, the ranks save after the iteration and exit (--exit-signal-handler).
trap 'pkill -TERM --parent "$torchrun" || true' USR1 TERM
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun" || true # a signal ends a wait
done
wait "$torchrun"
