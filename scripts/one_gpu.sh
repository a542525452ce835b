#!/usr/bin/env bash
# Measures on one GPU what only a GPU can tell, in three parts of at most 5, 4 and 6 minutes.
#   scripts/one_gpu.sh FOLDER 1|2|3 [--dry-run]
# 1: kernels and NCCL. 2: times of kernels and layers, two ranks against stock. 3: FLUX at full width, Nsight Compute,
# torch.compile. Every figure is a line of FOLDER/facts.jsonl as soon as it is known; docs/maintainers.md explains them. A fact
# that fails or takes too long does not stop the others; the exit status is then 1. Nothing is downloaded or built.
# --dry-run: toy sizes on the CPU.
set -euo pipefail
[[ "${2:-}" == [123] ]] || { echo "usage: scripts/one_gpu.sh FOLDER 1|2|3 [--dry-run]" >&2; exit 2; }
folder=$(realpath -m "$1") module=benchmarks.one_gpu patience=1 failed=0
[ "${3:-}" != --dry-run ] || { module=tests.benchmarks.one_gpu.dry_run; patience=10; }
cd "$(dirname "$0")/.."
# Only the first visible GPU is used.
devices=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES="${devices%%,*}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" COCODIFF_CACHE=off PYTHONUNBUFFERED=1
python3 -c 'import torch, triton, diffusers, xfuser, yunchang, distvae' || {
    echo "one_gpu: bring wheels and set PYTHONPATH=SITE after" \
        "python3 -m pip install --no-index --no-deps --no-build-isolation --target SITE *.whl ." >&2
    exit 2
}
mkdir -p "$folder"

# fact SECONDS RANKS NAME: several ranks share the GPU and communicate by gloo.
fact() {
    local status=0 started=$SECONDS share=""
    [ "$2" = 1 ] || share=1
    COCODIFF_SHARE_DEVICE="$share" timeout -k 10 "$(($1 * patience))" python3 -m torch.distributed.run --standalone \
        --nproc-per-node "$2" -m "$module" "$folder" "$3" > "$folder/$3.log" 2>&1 || status=$?
    echo "{\"fact\": \"$3\", \"exit_status\": $status, \"seconds\": $((SECONDS - started))}" >> "$folder/facts.jsonl"
    echo "one_gpu: $3: exit status $status, $((SECONDS - started)) s"
    return "$status"
}

run() { fact "$@" || failed=1; }

# Runs one-rank facts at the same time: pair SECONDS NAME NAME
pair() {
    fact "$1" 1 "$2" &
    run "$1" 1 "$3"
    wait $! || failed=1
}

case "$2" in
    1)
        run 40 1 versions
        run 40 1 nccl
        pair 120 self_check_balanced self_check_fast
        pair 60 memcheck racecheck
        ;;
    2)
        run 60 1 kernel_times
        run 60 1 layers
        run 90 2 two_ranks
        ;;
    3)
        run 150 2 flux
        run 60 1 profile
        run 70 1 compiled
        run 70 2 compiled_two_ranks
        ;;
esac
exit "$failed"
