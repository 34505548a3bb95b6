#!/usr/bin/env bash
# serve_gpu.sh PAIR ARRAYS PROMPTS OUT: SGLang serves PAIR/target and PAIR/trained/draft on one GPU, and its accept
# length at k = 1, 3, 7 is compared with ARRAYS. Needs SGLang and draftdial on this machine's Python path.
# Attention is Triton's, which takes heads of any size; acceptance does not hang on it.
set -euo pipefail
pair=$1 arrays=$2 prompts=$3 out=$4
here=$(cd "$(dirname "$0")" && pwd)
url=http://127.0.0.1:30000
unset SGLANG_SIMULATE_ACC_LEN
python3 -m draftdial.controller.cli export-rule threshold --k 3 --batch 64 --out "$out/rule.safetensors"
python3 -m draftdial.controller.cli serve "$out/rule.safetensors" --log "$out/decisions.log" -- \
  --model-path "$pair/target" --skip-tokenizer-init --dtype bfloat16 \
  --speculative-algorithm EAGLE3 --speculative-draft-model-path "$pair/trained/draft" \
  --attention-backend triton --sampling-backend pytorch --disable-radix-cache --context-length 4096 \
  --mem-fraction-static 0.5 --max-running-requests 24 --cuda-graph-bs-decode 1 4 8 16 24 \
  --disable-prefill-cuda-graph --disable-flashinfer-autotune --host 127.0.0.1 --port 30000 \
  >"$out/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
up() { python3 -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' "$url/health" 2>/dev/null; }
for _ in $(seq 300); do
  up && break
  kill -0 $server 2>/dev/null || { tail -40 "$out/server.log"; exit 1; }
  sleep 1
done
echo "server up after $SECONDS s"
python3 "$here/compare_server.py" $url "$pair/target" "$arrays" "$prompts"/spec_bench_*.jsonl "$prompts"/eagle_eval_*.jsonl
