# The environment of the ranks, and the command that starts a job step. Scripts source this file; see docs/slurm.md.

# One hardware queue for each stream: computation, two channels to each neighbour, the collectives. With 1, the usual
# value for tensor parallelism, messages between stages would wait behind computation.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
# A call that waits for the whole device also waits for receives that are posted ahead. A receive may depend on a later
# operation of this rank, so that such a call may deadlock. To avoid such calls, load all kernels at the start, and let
# the allocator map memory instead of freeing memory.
export CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-EAGER}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Print only warnings about the network.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Some variables depend on the cluster and are not set here: NCCL_SOCKET_IFNAME, the interface by which hosts reach each
# other (GLOO_SOCKET_IFNAME for gloo), and NCCL_IB_HCA, the adapters to use.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

export RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
WORLD_SIZE=$((SLURM_NNODES * RANKS_PER_NODE))
export LOGS=${LOGS:-logs/${SLURM_JOB_NAME}_$SLURM_JOB_ID}
mkdir -p "$LOGS"

# The whole step ends when one node fails, because the other nodes would wait for this node.
STEP=(srun --nodes "$SLURM_NNODES" --ntasks-per-node 1 --kill-on-bad-exit=1 examples/slurm/node.sh)
