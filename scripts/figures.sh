#!/usr/bin/env bash
# Makes the predicted tables of README.md and docs/ from recorded steps, on the CPU, in about two hours on two cores.
#   scripts/figures.sh FOLDER     a folder for the records; cells that it has are not predicted again
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: scripts/figures.sh FOLDER" >&2; exit 2; }
folder=$(realpath -m "$1")
. "$(dirname "$0")/environment.sh"
use_cpu
mkdir -p "$folder"

predict() {
    local name="$1"
    shift
    python -m benchmarks.cluster --json "$folder/cluster-$name.json" "$@"
}

parts=(default exact@v_first=off@head_groups=1 paper@v_first=off@head_groups=1)
models=(sd35 flux1 qwen-image flux2)
predict ethernet --machine ethernet-25 ethernet-100 --model qwen-image flux1 --resolution 1024
predict boxes --machine pcie --nodes 1 2 --model flux1 --resolution 1024 2048 --modes "${parts[@]}"
predict h100 --machine dgx-h100 --nodes 1 2 --model flux1 --resolution 1024
predict arc --machine arc-b60 --nodes 1 --model flux1 --resolution 1024
predict aurora --machine aurora --nodes 1 2 --model "${models[@]}" --resolution 768 1536 2304 --modes "${parts[@]}"
predict batch --machine aurora --nodes 1 2 --model "${models[@]}" --resolution 1536 --batch 8 --modes "${parts[@]}"
predict peak --machine aurora --nodes 4 --model sd35 --resolution 2304 --modes "${parts[@]}"
python -m benchmarks.cluster.tables "$folder"
