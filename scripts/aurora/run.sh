#!/usr/bin/env bash
# Runs the measurements of the paper on the nodes of a PBS job: links, all-to-all, step time of stock xDiT and of every
# mode, and the quality of the modes. Each measurement is a cell: a folder with its record, log and exit status. Complete
# cells are not run again, and a failed cell does not stop the others. At the end it writes a table of step times and prints
# the cells that are not complete.
#   AURORA_OUT=cocodiff-aurora          output folder, on a file system that all nodes share
#   AURORA_NODES="1 2 4 8"              node counts (default: 1, 2, 4 and 8, as far as the job has them)
#   AURORA_MODELS="FLUX.1-dev:24 ..."   models of xDiT's registry with their numbers of heads, which limit Ulysses
#   AURORA_RESOLUTIONS="768 1536 2304"  AURORA_MODES="exact balanced fast paper"  AURORA_STEPS=50  AURORA_REPEATS=3
#   AURORA_SIZES="6MB 24MB 48MB"        message sizes of the all-to-all, per rank
#   AURORA_XDIT=""                      more arguments for xDiT, such as "--batch_size 4"
#   AURORA_QUALITY="FLUX.1-dev SD3.5 Qwen-Image"  AURORA_VIRTUAL=2x6x2  AURORA_SEEDS=4  AURORA_QUALITY_SIZE=768
#   AURORA_RANKS_PER_NODE=12            AURORA_CPU_BIND=list:...        AURORA_CELL_SECONDS=3600
set -euo pipefail

script_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
set +u # the module system reads unset variables
# shellcheck source=scripts/aurora/environment.sh
. "$script_dir/environment.sh"
set -u
trap 'exit 143' TERM INT # an interrupted cell must not count as failed when the job reaches its time limit

out="${AURORA_OUT:-cocodiff-aurora}"
per_node="${AURORA_RANKS_PER_NODE:-12}"
# Four cores per tile, on the socket of its GPU; the first cores of each socket are reserved for the system.
binding="${AURORA_CPU_BIND:-list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79}"
repeats="${AURORA_REPEATS:-3}"
steps="${AURORA_STEPS:-50}"
read -ra models <<< "${AURORA_MODELS:-FLUX.1-dev:24 Qwen-Image:24 SD3.5:38 FLUX.2-dev:48}"
read -ra resolutions <<< "${AURORA_RESOLUTIONS:-768 1536 2304}"
read -ra sizes <<< "${AURORA_SIZES:-6MB 24MB 48MB}"
read -ra modes <<< "${AURORA_MODES:-exact balanced fast paper}"
read -ra more <<< "${AURORA_XDIT:-}"
read -ra quality_models <<< "${AURORA_QUALITY-FLUX.1-dev SD3.5 Qwen-Image}"
cocodiff=(python -m xfuser_cocodiff.cli)
PYTHONPATH="$(dirname "$(dirname "$script_dir")")${PYTHONPATH:+:$PYTHONPATH}" # for benchmarks
export PYTHONPATH

fail() {
    echo "run.sh: $1" >&2
    exit 2
}

[[ "$repeats" =~ ^[1-9][0-9]*$ ]] && [ "$repeats" -ge 3 ] ||
    fail "AURORA_REPEATS: '$repeats' is not valid; valid are numbers from 3, as in the paper"
for mode in "${modes[@]}"; do
    [[ " exact balanced fast paper " == *" $mode "* ]] ||
        fail "AURORA_MODES: '$mode' is not valid; valid are exact, balanced, fast, paper"
done
for model in "${models[@]}"; do
    [[ "$model" =~ ^[^:/]+:[1-9][0-9]*$ ]] || fail "AURORA_MODELS: '$model' is not valid; valid are MODEL:HEADS"
done
mkdir -p "$out"
out="$(cd "$out" && pwd)"
awk '!seen[$0]++' "${PBS_NODEFILE:?run run.sh in a PBS job}" > "$out/hosts"
num_hosts="$(wc -l < "$out/hosts")"
if [ -n "${AURORA_NODES:-}" ]; then
    read -ra node_counts <<< "$AURORA_NODES"
else
    node_counts=()
    for count in 1 2 4 8; do [ "$count" -gt "$num_hosts" ] || node_counts+=("$count"); done
fi
for count in "${node_counts[@]}"; do
    [[ "$count" =~ ^[1-9][0-9]*$ ]] && [ "$count" -le "$num_hosts" ] ||
        fail "AURORA_NODES: '$count' is not valid; valid are 1 to $num_hosts, the nodes of this job"
done
export MASTER_ADDR="${MASTER_ADDR:-$(head -n 1 "$out/hosts")}"

# Sets `ranks` and `start`, the mpiexec command for a number of nodes: one rank per tile, bound to cores near it.
start_on() {
    ranks=$(($1 * per_node))
    mkdir -p "$out/nodes-$1"
    head -n "$1" "$out/hosts" > "$out/nodes-$1/hosts"
    start=(
        env "WORLD_SIZE=$ranks" "LOCAL_WORLD_SIZE=$per_node"
        mpiexec -n "$ranks" --ppn "$per_node" --hostfile "$out/nodes-$1/hosts" --cpu-bind "$binding" "$script_dir/rank.sh"
    )
}

# Sets `degree` to the Ulysses degree of a model: the greatest common divisor of its heads and the ranks. The ring degree is
# the quotient of ranks and Ulysses degree, as in the paper.
degree_for() {
    local rest="$ranks" next
    degree="$1"
    while [ "$rest" -gt 0 ]; do
        next=$((degree % rest))
        degree="$rest" rest="$next"
    done
}

# Calls a function for every cell, as `$1 NAME COMMAND...`.
campaign() {
    local nodes model size name
    for nodes in "${node_counts[@]}"; do
        start_on "$nodes"
        "$1" "nodes-$nodes/probe" "${start[@]}" "${cocodiff[@]}" probe --json result.json
        "$1" "nodes-$nodes/a2a" "${start[@]}" python -m benchmarks.a2a --json result.json \
            --sizes "${sizes[@]}" --repeats "$repeats"
        for model in "${models[@]}"; do
            degree_for "${model#*:}"
            for size in "${resolutions[@]}"; do
                compare_modes "$1" "nodes-$nodes/${model%:*}-$size" --model "${model%:*}" --height "$size" --width "$size" \
                    --ulysses_degree "$degree" --ring_degree $((ranks / degree))
            done
        done
    done
    for name in "${quality_models[@]}"; do
        "$1" "quality/$name" "${cocodiff[@]}" quality --model "$name" --cocodiff_virtual "${AURORA_VIRTUAL:-2x6x2}" \
            --steps "$steps" --seeds "${AURORA_SEEDS:-4}" --resolution "${AURORA_QUALITY_SIZE:-768}" \
            --json result.json --sheet images.png
    done
}

# Calls a function for the cell of one setting, as `compare_modes FUNCTION NAME XDIT_ARGUMENTS...`.
compare_modes() {
    local do_with="$1" name="$2" launcher
    shift 2
    launcher="$(printf '%q ' "${start[@]}")"
    "$do_with" "$name" "${cocodiff[@]}" compare --out . --json result.json --repeats "$repeats" \
        --modes "$(IFS=,; echo "${modes[*]}")" --launcher "$launcher" -- "$@" --num_inference_steps "$steps" --seed 1 \
        --prompt "a slice of a mouse brain" "${more[@]}"
}

# Adds a cell to the list of cells, unless another job with the same output folder has added it.
list_cell() {
    grep -qxF "$1" "$out/cells" 2> /dev/null || echo "$1" >> "$out/cells"
}

# Runs a cell in its folder, unless it is complete. The status is written last, so an interrupted cell has none.
run_cell() {
    local name="$1" folder="$out/$1" status=0
    shift
    if [ "$(cat "$folder/status" 2> /dev/null)" = 0 ]; then
        echo "$name: complete"
        return
    fi
    mkdir -p "$folder"
    rm -f "$folder/status" "$folder/result.json"
    echo "$name: started"
    # A new port each time: that of a killed cell may still be in use.
    (
        cd "$folder" || exit
        export MASTER_PORT="$((20000 + RANDOM % 10000))"
        exec timeout --kill-after=60 "${AURORA_CELL_SECONDS:-3600}" "$@"
    ) > "$folder/log" 2>&1 || status="$?"
    echo "$status" > "$folder/status"
    [ "$status" = 0 ] || echo "$name: failed with exit status $status, see $folder/log"
}

campaign list_cell
campaign run_cell
exec python3 "$script_dir/tables.py" "$out"
