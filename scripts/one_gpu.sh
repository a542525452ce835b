#!/usr/bin/env bash
# Finds out on one GPU what only a GPU can tell, in three stages of at most nine minutes each.
#   scripts/one_gpu.sh FOLDER A|B|C [--dry-run]
# A: device and kernels. B: ranks that share the GPU, against stock. C: host time and compiled graphs. Every fact adds a
# line to FOLDER/facts.jsonl, and a stage ends with FOLDER/stage-A.tar.gz. A fact that fails does not stop the others; the
# exit status is then 1. A second call runs only what is not known yet. docs/one_gpu_facts.md says what each fact decides.
# What is installed is used; only if something is missing, a virtual environment is made, which needs a package index.
#   COCODIFF_NCCL=FILE    source archive of NCCL 2.30 or later, which stage A builds, or a libnccl.so.2
set -uo pipefail
[ $# -ge 2 ] || { echo "usage: scripts/one_gpu.sh FOLDER A|B|C [--dry-run]" >&2; exit 2; }
out=$(realpath -m "$1")
shift
[ -z "${COCODIFF_NCCL:-}" ] || COCODIFF_NCCL=$(realpath -m "$COCODIFF_NCCL")
PATH="${VIRTUAL_ENV:+$VIRTUAL_ENV/bin:}$PATH"
root="$(cd "$(dirname "$0")/.." && pwd)"
if PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" python -c 'import torch, xfuser, diffusers, rich' 2> /dev/null; then
    cd "$root" || exit
else
    . "$root/scripts/environment.sh"
fi
# Only the first GPU is visible: all ranks share it.
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" ZE_AFFINITY_MASK="${ZE_AFFINITY_MASK:-0}"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES%%,*}" ZE_AFFINITY_MASK="${ZE_AFFINITY_MASK%%,*}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COCODIFF_CACHE=off COCODIFF_NCCL="${COCODIFF_NCCL:-}"
exec python -m xfuser_cocodiff.lab.one_gpu "$out" "$@"
