#!/usr/bin/env bash
# Compares stock xDiT with CoCoDiff: FLUX.1-dev on 4 ranks, first on equal links, then with slow links between two emulated
# nodes. Prints a table for each part, and writes reports with pictures: that of part 2 to cocodiff-report, that of part 1 to
# cocodiff-report/equal-links.
# Arguments replace those of xdit, for example: scripts/demo.sh --model Qwen-Image --ulysses_degree 2 --prompt "a cat"
set -euo pipefail
. "$(dirname "$0")/environment.sh"

models=()
if [ $# -eq 0 ]; then
    models=(FLUX.1-dev)
    set -- --model FLUX.1-dev --height 128 --width 128 --num_inference_steps 16 \
        --prompt "a photo of a cat" "a photo of an astronaut" "a photo of a cup of coffee" "cell bodies" \
        --batch_size 4 --max_sequence_length 32 --seed 1 --warmup_calls 0 --ulysses_degree 4 --cocodiff_topology 2x2
fi
modes=(--modes "exact,balanced,fast")
[[ " $* " != *--cocodiff[-_]mode[=\ ]* ]] || modes=()

# Emulated links connect processes, not devices, and the CPU can run any number of ranks.
use_cpu
cocodiff models --out .models "${models[@]}"
unset HF_HUB_CACHE HUGGINGFACE_HUB_CACHE
# Cached profiles and schedules of earlier runs are not used, so that every demo measures a first run.
export HF_HOME="$PWD/.models" HF_HUB_OFFLINE=1 COCODIFF_CACHE=off
out=cocodiff-report
rm -f "$out/report.html"
status=0

echo "Part 1 of 2: equal links, stock xDiT and the plugin; about one minute on two cores"
# The launcher of part 2 is used here too: the xdit command would import all of xDiT once more.
cocodiff compare --out "$out/equal-links" --repeats 3 \
    --launcher "python -m torch.distributed.run --standalone --nproc_per_node={ranks} --no-python" -- "$@" || status=$?

if [ "$status" -gt 1 ]; then
    exit "$status"
elif why="$(python -m xfuser_cocodiff.lab.emulation.cluster --preset flat --topology flat=2 -- true 2>&1)"; then
    echo "Part 2 of 2: slow links between two nodes, stock xDiT and three modes; about three minutes"
    # 25 Mbit/s between nodes.
    cocodiff compare --out "$out" \
        --emulate ethernet --scale 10 "${modes[@]}" --repeats 3 -- "$@" || status=$?
else
    echo "Part 2 is skipped: this machine cannot emulate slow links between nodes. $why"
fi
[ -f "$out/report.html" ] || cp "$out/equal-links/report.html" "$out/report.html"
echo "The demo's model is small: its dB do not carry over to real ones; errors and bits are those of its own values."
echo "Report: $PWD/$out/report.html"
exit "$status"
