#!/usr/bin/env bash
# Makes the predicted tables of README.md and docs/ from recorded steps, on the CPU, in ten minutes on two cores.
#   scripts/figures.sh FOLDER     a folder for the records; those that it has are not made again
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: scripts/figures.sh FOLDER" >&2; exit 2; }
folder=$(realpath -m "$1")
. "$(dirname "$0")/environment.sh"
use_cpu
mkdir -p "$folder"

predict() {
    local file="$folder/cluster-$1.json"
    shift
    [ -e "$file" ] || python -m benchmarks.cluster --json "$file" "$@"
}

on_machines() {
    local model=(--model "$1" --resolution "$2")
    predict "$1-nodes" --machine ethernet-25 ethernet-100 --nodes 2 "${model[@]}"
    predict "$1-boxes" --machine pcie dgx-h100 --nodes 1 2 "${model[@]}"
    predict "$1-aurora" --machine aurora --nodes 1 2 --model "$1" --resolution "$3"
    predict "$1-arc" --machine arc-b60 --nodes 1 "${model[@]}"
}

# An image and a video model on each machine.
machines() {
    on_machines flux1 1024 1536  # the rows of 1024 px are not divisible by 12 ranks
    on_machines wan 720 720
}

# The paper's models, of which SD3.5 has no flat Ulysses, so that its baseline is best stock; and the paper's peak.
paper() {
    local parts=(exact balanced paper tapa v-first v-major)
    local aurora=(--machine aurora --nodes 1 2 --modes "${parts[@]}") models=(--model flux1 qwen-image flux2)
    predict paper "${aurora[@]}" "${models[@]}" --resolution 768 1536 2304
    predict batch "${aurora[@]}" "${models[@]}" --resolution 1536 --batch 8
    predict sd35 "${aurora[@]}" best_stock --model sd35 --resolution 768 1536 2304
    predict peak --machine aurora --nodes 4 --model sd35 --resolution 2304 --modes default "${parts[@]}"
}

# Other systems, for docs/other_methods.md.
rivals() {
    predict rivals --machine ethernet-100 --nodes 2 --model flux1 --resolution 1024 --modes best_stock fp8 fp4 compact
}

machines &
first=$!
{ paper; rivals; } &
wait "$first"
wait "$!"
python -m benchmarks.cluster.tables "$folder"
