#!/usr/bin/env bash
# Runs the paper's measurements on the nodes of a PBS job: the links, the all-to-all alone, stock xDiT against every mode,
# and what modes cost in quality. Each is a cell: a folder with its record, its log and its exit status. A cell that has
# finished is not run again, one that fails does not stop the rest; at the end come a table of steps, and what failed.
#   AURORA_OUT=cocodiff-aurora          folder on a file system that all nodes see
#   AURORA_NODES="1 2 4 8"              node counts (default: those of 1, 2, 4 and 8 that the job has)
#   AURORA_MODELS="FLUX.1-dev:24 ..."   models of xDiT's registry with their attention heads, which bound Ulysses
#   AURORA_RESOLUTIONS="768 1536 2304"  AURORA_MODES="exact balanced fast paper"  AURORA_STEPS=50  AURORA_REPEATS=3
#   AURORA_SIZES=6MB,24MB,48MB          messages of the all-to-all, per rank
#   AURORA_XDIT=""                      more arguments for xDiT, such as "--batch_size 4"
#   AURORA_QUALITY="FLUX.1-dev SD3.5 Qwen-Image"  AURORA_VIRTUAL=2x6x2  AURORA_SEEDS=4  AURORA_QUALITY_SIZE=768
#   AURORA_RANKS_PER_NODE=12            AURORA_CPU_BIND=list:...        AURORA_CELL_SECONDS=3600
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
set +u # the module system reads variables that nobody set
# shellcheck source=scripts/aurora/environment.sh
. "$here/environment.sh"
set -u
trap 'exit 143' TERM INT # a job at the end of its time must not take the cell that is cut off for one that failed

out="${AURORA_OUT:-cocodiff-aurora}"
per_node="${AURORA_RANKS_PER_NODE:-12}"
# Four cores for each tile, on the socket of its GPU; the first of each socket are the system's.
binding="${AURORA_CPU_BIND:-list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79}"
repeats="${AURORA_REPEATS:-3}"
steps="${AURORA_STEPS:-50}"
read -ra models <<< "${AURORA_MODELS:-FLUX.1-dev:24 Qwen-Image:24 SD3.5:38 FLUX.2-dev:48}"
read -ra resolutions <<< "${AURORA_RESOLUTIONS:-768 1536 2304}"
read -ra modes <<< "${AURORA_MODES:-exact balanced fast paper}"
read -ra more <<< "${AURORA_XDIT:-}"
read -ra judged <<< "${AURORA_QUALITY-FLUX.1-dev SD3.5 Qwen-Image}"
cocodiff=(python -m xfuser_cocodiff.cli)

fail() {
    echo "run.sh: $1" >&2
    exit 2
}

[[ "$repeats" =~ ^[1-9][0-9]*$ ]] && [ "$repeats" -ge 3 ] ||
    fail "AURORA_REPEATS: '$repeats' is not valid; valid are numbers from 3, as the paper has it"
for mode in "${modes[@]}"; do
    [[ " exact balanced fast paper " == *" $mode "* ]] ||
        fail "AURORA_MODES: '$mode' is not valid; valid are exact, balanced, fast, paper"
done
for model in "${models[@]}"; do
    [[ "$model" =~ ^[^:/]+:[1-9][0-9]*$ ]] || fail "AURORA_MODELS: '$model' is not valid; valid are MODEL:HEADS"
done
mkdir -p "$out"
out="$(cd "$out" && pwd)"
awk '!seen[$0]++' "${PBS_NODEFILE:?run.sh runs in a PBS job}" > "$out/hosts"
here_are="$(wc -l < "$out/hosts")"
if [ -n "${AURORA_NODES:-}" ]; then
    read -ra node_counts <<< "$AURORA_NODES"
else
    node_counts=()
    for count in 1 2 4 8; do [ "$count" -gt "$here_are" ] || node_counts+=("$count"); done
fi
for count in "${node_counts[@]}"; do
    [[ "$count" =~ ^[1-9][0-9]*$ ]] && [ "$count" -le "$here_are" ] ||
        fail "AURORA_NODES: '$count' is not valid; valid are 1 to $here_are, the nodes of this job"
done
export MASTER_ADDR="${MASTER_ADDR:-$(head -n 1 "$out/hosts")}"

# Sets `ranks` and `start`, the mpiexec line for so many nodes: a rank for each tile, bound to cores beside it.
start_on() {
    ranks=$(($1 * per_node))
    mkdir -p "$out/nodes-$1"
    head -n "$1" "$out/hosts" > "$out/nodes-$1/hosts"
    start=(
        env "WORLD_SIZE=$ranks" "LOCAL_WORLD_SIZE=$per_node"
        mpiexec -n "$ranks" --ppn "$per_node" --hostfile "$out/nodes-$1/hosts" --cpu-bind "$binding" "$here/rank.sh"
    )
}

# Sets `degree` to the Ulysses degree of a model of so many heads: what both the heads and the ranks divide by. What heads
# leave of the ranks becomes Ring, as in the paper.
degree_for() {
    local rest="$ranks" next
    degree="$1"
    while [ "$rest" -gt 0 ]; do
        next=$((degree % rest))
        degree="$rest" rest="$next"
    done
}

# Sets `stock`, the option that takes stock's side from a mode of the same cell that has run; stock is slow, and the same.
stock_beside() {
    local report
    stock=()
    for report in "$out/$(dirname "$1")"/*/report.json; do
        [ ! -f "$report" ] || [ "$report" = "$out/$1/report.json" ] || stock=(--stock "$(dirname "$report")")
    done
}

# Hands every cell to a function, as `$1 NAME COMMAND...`.
campaign() {
    local nodes model size name
    for nodes in "${node_counts[@]}"; do
        start_on "$nodes"
        "$1" "nodes-$nodes/probe" "${start[@]}" "${cocodiff[@]}" probe --json result.json
        "$1" "nodes-$nodes/a2a" "${start[@]}" "${cocodiff[@]}" bench a2a --json result.json \
            --sizes "${AURORA_SIZES:-6MB,24MB,48MB}" --repeats "$repeats"
        for model in "${models[@]}"; do
            degree_for "${model#*:}"
            for size in "${resolutions[@]}"; do
                compare_modes "$1" "nodes-$nodes/${model%:*}-$size" --model "${model%:*}" --height "$size" --width "$size" \
                    --ulysses_degree "$degree" --ring_degree $((ranks / degree))
            done
        done
    done
    for name in "${judged[@]}"; do
        "$1" "quality/$name" "${cocodiff[@]}" quality --model "$name" --virtual "${AURORA_VIRTUAL:-2x6x2}" \
            --steps "$steps" --seeds "${AURORA_SEEDS:-4}" --size "${AURORA_QUALITY_SIZE:-768}" \
            --json result.json --sheet pictures.png
    done
}

# The cells of one setting, one for each mode, as `compare_modes FUNCTION NAME XDIT_ARGUMENTS...`.
compare_modes() {
    local do_with="$1" name="$2" mode launcher
    shift 2
    launcher="$(printf '%q ' "${start[@]}")"
    for mode in "${modes[@]}"; do
        stock_beside "$name/$mode"
        "$do_with" "$name/$mode" "${cocodiff[@]}" compare --out . --json result.json --repeats "$repeats" \
            --launcher "$launcher" "${stock[@]}" -- "$@" --num_inference_steps "$steps" --seed 1 \
            --prompt "a slice of a mouse brain" --cocodiff_mode "$mode" "${more[@]}"
    done
}

# Jobs of other node counts may share the folder: cells that they noted stay.
note_cell() {
    grep -qxF "$1" "$out/cells" 2> /dev/null || echo "$1" >> "$out/cells"
}

# Runs a cell in its folder, unless it has finished before. Its status is written last, so that one that is cut off with
# its job has none.
run_cell() {
    local name="$1" folder="$out/$1" status=0
    shift
    if [ "$(cat "$folder/status" 2> /dev/null)" = 0 ]; then
        echo "$name: finished before"
        return
    fi
    mkdir -p "$folder"
    rm -f "$folder/status" "$folder/result.json"
    echo "$name: started"
    # Another port each time: that of a cell that was killed may not be free yet.
    (
        cd "$folder" || exit
        export MASTER_PORT="$((20000 + RANDOM % 10000))"
        exec timeout --kill-after=60 "${AURORA_CELL_SECONDS:-3600}" "$@"
    ) > "$folder/log" 2>&1 || status="$?"
    echo "$status" > "$folder/status"
    [ "$status" = 0 ] || echo "$name: failed with exit status $status, see $folder/log"
}

campaign note_cell
campaign run_cell
exec python3 "$here/tables.py" "$out"
