# What the ranks find in their environment, and how one job step starts them. Sourced; docs/slurm.md says more.

# One hardware queue for each stream: computation, two channels to each neighbour, the collectives. With 1, as is
# customary for tensor parallelism, messages between stages would wait behind computation.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
# What waits for the whole device waits for receives that are posted ahead, too, which may need this very rank: load all
# kernels at the start, and let the allocator map memory where it would otherwise free some.
export CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-EAGER}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Say what is wrong with the network, and nothing else.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Not set here, for they depend on the cluster: NCCL_SOCKET_IFNAME, the interface by which hosts reach each other
# (GLOO_SOCKET_IFNAME for gloo), and NCCL_IB_HCA, the adapters to use.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

export RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
WORLD_SIZE=$((SLURM_NNODES * RANKS_PER_NODE))
export LOGS=${LOGS:-logs/${SLURM_JOB_NAME}_$SLURM_JOB_ID}
mkdir -p "$LOGS"

# The whole step ends when a node's part of it fails: the others would wait for it.
STEP=(srun --nodes "$SLURM_NNODES" --ntasks-per-node 1 --kill-on-bad-exit=1 examples/slurm/node.sh)
