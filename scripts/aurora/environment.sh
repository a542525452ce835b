# shellcheck shell=bash
# Sourced by run.sh: what a job on Aurora runs under. Each line says why; docs/aurora.md has the sources.
#   AURORA_MODULE=frameworks/2025.3.1   module that brings PyTorch, oneCCL and the drivers' libraries
#   AURORA_VENV=~/cocodiff              virtual environment on top of it, with xfuser and this package
#   AURORA_CCL_OP_SYNC=0                in place of the module's value, to see what overlap would bring

module load "${AURORA_MODULE:-frameworks/2025.3.1}"
if [ -n "${AURORA_VENV:-}" ]; then
    # shellcheck source=/dev/null
    . "$AURORA_VENV/bin/activate"
fi

# Tiles are devices, twelve a node: a rank drives one, and ranks 2k and 2k+1 share a GPU, which is the axis `tile`.
export ZE_FLAT_DEVICE_HIERARCHY=FLAT
# All tiles stay visible, and a rank takes its own by PALS_LOCAL_RANKID: oneCCL finds its way over Xe Link only between
# devices that it sees. So gpu_tile_compact.sh, which hides the others, has no place here.
unset ZE_AFFINITY_MASK

# oneCCL asks PALS, through PMIx, who the ranks are, and starts and sends over MPI, which knows Slingshot.
export CCL_PROCESS_LAUNCHER=pmix
export CCL_ATL_TRANSPORT=mpi
export CCL_KVS_MODE=mpi
# The default way to notice freed memory misses that of the GPU driver, and then registers stale pages with the network.
export FI_MR_CACHE_MONITOR=userfaultfd
# The module sets 1: every collective runs to its end before anything else. The plugin then counts on no overlap.
if [ -n "${AURORA_CCL_OP_SYNC:-}" ]; then
    export CCL_OP_SYNC="$AURORA_CCL_OP_SYNC"
fi

# Compute nodes have no way to the hub: weights lie in HF_HOME beforehand.
export HF_HUB_OFFLINE=1
