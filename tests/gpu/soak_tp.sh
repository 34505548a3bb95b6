#!/usr/bin/env bash
# soak_tp.sh POLICY OUT: a Llama-3.1-8B shape on two GPUs (--tp 2, NCCL, CUDA graphs, overlap scheduling), steered by
# POLICY in off mode kv-only. Soaks until 50,000 rounds or as long as TOTAL_S (850) allows, with faults injected on one
# rank and on both, then measures throughput steered and at k = 3. Needs SGLang and draftdial on this machine's Python
# path, and tests/engine beside this folder. Weights are random and acceptance is simulated, so outputs have nothing to be
# compared with: that is done on the CPU (make soak-tp). Leaves in OUT: soak_tp.json, whole at any time; the decision log;
# each rank's own record of its rounds; /server_info; the server's log. Exit status 1 if ranks disagreed or hung or a
# change went wrong.
set -euo pipefail
policy=$1 out=$2
mkdir -p "$out"
total_s=${TOTAL_S:-850}
GRAPHS=${GRAPHS:-1 2 4 8 16 32 64 96 128}
PREFILL_GRAPHS=${PREFILL_GRAPHS:-64 128 192 256 320 512}
. "$(dirname "$0")/servers.sh"
# The host's GPUs are shared: NVLink multicast stays off, so neither do all-reduces other than NCCL's run below.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export SGLANG_SIMULATE_ACC_LEN=2.5

# The tests' plugin without what stands in for a GPU beside it, and without what is slow at large batches.
plugins=$(mktemp -d)
cp -r "$here/../engine/cpu_sglang/src/engine_probe" "$plugins/"
mkdir "$plugins/engine_probe-0.dist-info"
printf 'Metadata-Version: 2.1\nName: engine-probe\nVersion: 0\n' >"$plugins/engine_probe-0.dist-info/METADATA"
printf '[sglang.srt.plugins]\nengine_faults = engine_probe.plugin:register_faults\n' \
  >"$plugins/engine_probe-0.dist-info/entry_points.txt"
export PYTHONPATH=$plugins${PYTHONPATH:+:$PYTHONPATH} ENGINE_PROBE=$out

url=http://127.0.0.1:30000
# serve LOG ARGUMENTS...: until the server answers
serve() {
  local log=$1
  shift
  start 0,1 "$log" "$policy" --off-mode kv-only --log "$out/decisions.log" -- "${target[@]}" "${draft[@]}" --tp 2 \
    --disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion --mem-fraction-static 0.7 \
    --max-running-requests 136 --max-total-tokens 300000 --log-level warning --port 30000 "$@"
  server=$!
  await $url $server "$log" $((SECONDS + 180))
}
trap 'kill -9 $server 2>/dev/null || true' EXIT # asked to end, a server that hangs would wait for its requests
serve "$out/server.log" || {
  kill -9 $server 2>/dev/null || true
  echo "once more, without graphs of prefills"
  serve "$out/server-2.log" --disable-prefill-cuda-graph
} || exit 1
get $url/server_info >"$out/server_info.json" || true

status=0
left_s=$((total_s - SECONDS - 15))
timeout -k 5 $((left_s + 5)) python3 "$here/soak_tp.py" $url "$policy" --log "$out/decisions.log" --probe "$out" \
  --out "$out/soak_tp.json" --total-s $left_s --rounds "${SOAK_ROUNDS:-50000}" --levels \
  1 4 2 8 1 32 2 16 1 4 3 64 1 8 2 16 1 4 2 128 1 8 3 4 || status=$?
grep -nE "Traceback|Error|assert" "$out"/server*.log | grep -v " draftdial: " | cut -c1-300 | head -20 || true
echo "status $status, $SECONDS s in all"
exit $status
