# shellcheck shell=bash
# Sourced by run.sh: the environment of a job on Aurora. docs/maintainers.md has sources.
#   AURORA_MODULE=frameworks/2025.3.1   module with PyTorch, oneCCL and the driver libraries
#   AURORA_VENV=~/cocodiff              virtual environment on top of it, with xfuser and this package
#   AURORA_CCL_OP_SYNC=0                overrides the module's value, to measure overlap

module load "${AURORA_MODULE:-frameworks/2025.3.1}"
if [ -n "${AURORA_VENV:-}" ]; then
    # shellcheck source=/dev/null
    . "$AURORA_VENV/bin/activate"
fi

# Each tile is a device, twelve per node: one per rank. Ranks 2k and 2k+1 share a GPU, which is the axis `tile`.
export ZE_FLAT_DEVICE_HIERARCHY=FLAT
# All tiles stay visible, and a rank selects its own by PALS_LOCAL_RANKID: oneCCL uses Xe Link only between visible
# devices. This is why gpu_tile_compact.sh, which hides the other tiles, is not used.
unset ZE_AFFINITY_MASK

# oneCCL gets the ranks from PALS through PMIx, and communicates by MPI, which supports Slingshot.
export CCL_PROCESS_LAUNCHER=pmix
export CCL_ATL_TRANSPORT=mpi
export CCL_KVS_MODE=mpi
# The default monitor does not notice memory that the GPU driver frees, and stale pages would be registered with the network.
export FI_MR_CACHE_MONITOR=userfaultfd
# The module sets 1: every collective blocks until it is complete, and the plugin does not plan for overlap.
if [ -n "${AURORA_CCL_OP_SYNC:-}" ]; then
    export CCL_OP_SYNC="$AURORA_CCL_OP_SYNC"
fi

# Compute nodes cannot reach the hub: download the weights to HF_HOME before.
export HF_HUB_OFFLINE=1
