#!/usr/bin/env bash
# soak_tp.sh POLICY OUT: a Llama-3.1-8B shape on two GPUs (--tp 2, NCCL, CUDA graphs, overlap scheduling), steered
# by POLICY. Soaks until 50,000 rounds or as long as TOTAL_S (540) allows, then measures throughput steered and at
# k = 3. Needs SGLang and draftdial on this machine's Python path. Weights are random and acceptance is simulated,
# so outputs have nothing to be compared with: that is done on the CPU (make soak-tp). Leaves in OUT: soak_tp.json,
# the decision log, /server_info, the server's log. Exit status 1 if ranks disagreed or hung or a change went wrong.
set -euo pipefail
policy=$1 out=$2
total_s=${TOTAL_S:-540}
measure_s=${MEASURE_S:-4} # a window; four at each of four loads
here=$(cd "$(dirname "$0")" && pwd)
dial="python3 -m draftdial.controller.cli"
url=http://127.0.0.1:30000
work=$(mktemp -d)
python3 "$here/llama_shapes.py" "$work"
# The host's GPUs are shared: NVLink multicast stays off, so neither do all-reduces other than NCCL's run below.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export SGLANG_SIMULATE_ACC_LEN=${ACC_LEN:-2.5}

$dial serve "$policy" --log "$out/decisions.log" -- \
  --model-path "$work/target" --load-format dummy --skip-tokenizer-init --dtype bfloat16 --random-seed 1 \
  --speculative-algorithm EAGLE3 --speculative-draft-model-path "$work/draft" --tp 2 \
  --disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion \
  --attention-backend fa3 --sampling-backend pytorch --disable-radix-cache --context-length 8192 \
  --mem-fraction-static 0.7 --max-running-requests 136 --cuda-graph-bs-decode 1 2 4 8 16 32 64 96 128 \
  --disable-prefill-cuda-graph --disable-flashinfer-autotune --host 127.0.0.1 --port 30000 \
  >"$out/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
get() { python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())' "$1"; }
until get "$url/health" >/dev/null 2>&1; do
  kill -0 $server 2>/dev/null || { tail -60 "$out/server.log"; exit 1; }
  ((SECONDS < total_s - 200)) || { echo "not up after $SECONDS s"; tail -60 "$out/server.log"; exit 1; }
  sleep 1
done
echo "server up after $SECONDS s"

status=0
soak_s=${SOAK_S:-$((total_s - SECONDS - 16 * (measure_s + 2) - 45))} # 45: what drains, and a hang's end
python3 "$here/soak_tp.py" $url "$policy" --out "$out/soak_tp.json" --soak-s "$soak_s" --measure-s "$measure_s" \
  --rounds "${SOAK_ROUNDS:-50000}" --hang-s 40 || status=$?
timeout 20 $dial status $url || true
get $url/server_info >"$out/server_info.json" || true
grep -nE "Traceback|Error|assert" "$out/server.log" | head -20 || true
echo "$SECONDS s in all"
exit $status
