# Sourced by the scripts beside it: servers of a Llama-3.1-8B shape with random weights, each on one GPU and a port of
# its own. Needs SGLang and draftdial on this machine's Python path.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dial="python3 -m draftdial.controller.cli"
shapes=$(mktemp -d)
python3 "$here/llama_shapes.py" "$shapes"
graphs=${GRAPHS:-1 2 4 8 16 24 32 48 64 96 128 192 256}
# SGLang captures prefills too, unless told otherwise; fewer sizes than its own make a shorter start. PREFILL_GRAPHS=none: off.
prefill_graphs=(--cuda-graph-bs-prefill ${PREFILL_GRAPHS:-64 128 192 256 384 512 768 1024 1536 2048})
[ "${PREFILL_GRAPHS:-}" != none ] || prefill_graphs=(--disable-prefill-cuda-graph)
target=(--model-path "$shapes/target" --load-format dummy --skip-tokenizer-init --dtype bfloat16
  --attention-backend fa3 --sampling-backend pytorch --disable-radix-cache --context-length 10240
  --max-running-requests 258 --cuda-graph-bs-decode $graphs "${prefill_graphs[@]}"
  --disable-flashinfer-autotune --stream-interval 8 --host 127.0.0.1)
draft=(--speculative-algorithm EAGLE3 --speculative-draft-model-path "$shapes/draft")

get() { python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())' "$1"; }

# start GPU LOG SERVE_ARGUMENTS...: in the background; its process is $!
start() {
  local gpu=$1 log=$2
  shift 2
  CUDA_VISIBLE_DEVICES=$gpu $dial serve "$@" >"$log" 2>&1 &
}

# await URL PROCESS LOG [UNTIL]: until the server answers; 1, and the end of its log, if it ended first or UNTIL (600)
# seconds of the script have passed. What the server has by then is left out of garbage collections from then on: a full
# one takes about 0.2 s.
await() {
  until get "$1/health" >/dev/null 2>&1; do
    kill -0 "$2" 2>/dev/null && ((SECONDS < ${4:-600})) || { tail -40 "$3"; return 1; }
    sleep 1
  done
  get "$1/freeze_gc" >/dev/null || true
  echo "$1 is up after $SECONDS s"
}
