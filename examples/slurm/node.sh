#!/usr/bin/env bash
# One node's part of a job step: starts its ranks with torchrun, and passes on the request to save and exit.
set -euo pipefail

first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
restart=${SLURM_RESTART_COUNT:-0}

# torchrun would kill its ranks 30 s after a signal, saved or not, so it is deaf to both (SIGINT is all it has to
# handle; older ones do not know the variable). Whether Slurm signals this script alone or all processes below it
# differs from cluster to cluster.
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

# USR1 comes from --signal, TERM from a preemption or the time limit itself. The ranks are torchrun's children; at
# SIGTERM they save after the iteration and exit (--exit-signal-handler).
trap 'pkill -TERM --parent "$torchrun" || true' USR1 TERM
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun" || true # a signal ends a wait
done
wait "$torchrun"
