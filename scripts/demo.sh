#!/usr/bin/env bash
# The plugin at work: stock xDiT against CoCoDiff, FLUX.1-dev on 4 ranks, first on links that are all alike, then with slow
# links between two nodes that this machine emulates. Ends with a table, and a report with the same table and pictures; those
# of the first half lie beside.
# Arguments replace those of xdit, for example: scripts/demo.sh --model Qwen-Image --ulysses_degree 2 --prompt "a cat"
set -euo pipefail
. "$(dirname "$0")/environment.sh"

models=() plan=()
if [ $# -eq 0 ]; then
    models=(FLUX.1-dev)
    set -- --model FLUX.1-dev --height 128 --width 128 --num_inference_steps 16 \
        --prompt "a photo of a cat" "a photo of an astronaut" "a photo of a cup of coffee" "cell bodies" \
        --batch_size 4 --max_sequence_length 32 --seed 1 --warmup_calls 0 --ulysses_degree 4 --cocodiff_topology 2x2
    # Fixed, so that no run starts with a probe of slow links.
    plan=(--cocodiff_a2a 'flat*')
fi
modes=(--modes "exact,balanced,fast")
[[ " $* " != *--cocodiff[-_]mode[=\ ]* ]] || modes=()

# Emulated links join processes and no devices; and the CPU holds any number of ranks.
use_cpu
cocodiff models --out .models "${models[@]}"
unset HF_HUB_CACHE HUGGINGFACE_HUB_CACHE
# Profiles and schedules of earlier runs are left aside, so that every demo is a first run.
export HF_HOME="$PWD/.models" HF_HUB_OFFLINE=1 COCODIFF_CACHE=off
out=cocodiff-report
rm -f "$out/report.html"
status=0

echo "Part 1 of 2: links that are all alike, stock xDiT against the plugin; about a minute on two cores"
# Started as part 2 starts them: xDiT's own command would import all of xDiT once more.
cocodiff compare --out "$out/equal-links" --repeats 3 \
    --launcher "python -m torch.distributed.run --standalone --nproc_per_node={ranks} --no-python" -- "$@" || status=$?

if [ "$status" -gt 1 ]; then
    exit "$status"
elif why="$(python -m xfuser_cocodiff.lab.emulation.cluster --preset flat --topology flat=2 -- true 2>&1)"; then
    echo "Part 2 of 2: slow links between two nodes, stock xDiT against three modes; about three minutes"
    # 25 Mbit/s between nodes.
    cocodiff compare --out "$out" \
        --emulate ethernet --scale 10 "${modes[@]}" --repeats 3 -- "$@" "${plan[@]}" || status=$?
else
    echo "There is no part 2 here: slow links between nodes cannot be emulated. $why"
fi
[ -f "$out/report.html" ] || cp "$out/equal-links/report.html" "$out/report.html"
echo "The report is at $PWD/$out/report.html"
exit "$status"
