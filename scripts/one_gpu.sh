#!/usr/bin/env bash
# Measures on one GPU what only a GPU can tell, in two commands: the first takes less than 8 minutes, the second 6.
#   scripts/one_gpu.sh FOLDER 1|2 [--dry-run]
# 1: kernels, NCCL, host time, two ranks against stock. 2: FLUX at full width, Nsight Compute, torch.compile. Every figure is
# a line of FOLDER/facts.jsonl as soon as it is known; docs/one_gpu.md explains them. A fact that fails or takes too long
# does not stop the others; the exit status is then 1. Nothing is downloaded or built: what is missing is named.
# --dry-run: toy sizes on the CPU and the mock device of the tests.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: scripts/one_gpu.sh FOLDER 1|2 [--dry-run]" >&2; exit 2; }
folder=$(realpath -m "$1")
module=benchmarks.one_gpu
[ "${3:-}" != --dry-run ] || module=tests.benchmarks.one_gpu.dry_run
cd "$(dirname "$0")/.."
# Only the first visible GPU is used.
devices=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES="${devices%%,*}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" COCODIFF_CACHE=off
exec python3 -m "$module" "$folder" "$2"
