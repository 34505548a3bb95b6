#!/usr/bin/env bash
# gpu_run.sh GGUF PROMPTS OUT: makes the pair and its acceptance arrays on one GPU within LIMIT_S (570) seconds.
# PROMPTS is a folder of train_*.jsonl (trained on), spec_bench_*.jsonl and eagle_eval_*.jsonl (recorded on).
# Works in WORK (/tmp/real_pair), which a second call finds again: finished parts are not repeated, and training
# resumes from its checkpoint. Needs torch, safetensors, tokenizers, jinja2 and gguf on python3's path.
set -euo pipefail
gguf=$1 prompts=$2 out=$3
here=$(cd "$(dirname "$0")" && pwd)
work=${WORK:-/tmp/real_pair} limit=${LIMIT_S:-570}
record=70   # seconds kept for recording
export PYTHONPATH=$here/../../.typing${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$work" "$out"
say() { echo "== $SECONDS s: $*"; }

if [ ! -e "$work/target/tokenizer_config.json" ]; then
  say convert
  python3 "$here/convert.py" "$gguf" "$work/target"
fi
if [ ! -e "$work/answers.npz" ]; then
  say answers
  # Samples that were not finished in time are missed, not fatal.
  timeout 230 python3 "$here/answers.py" "$work/target" "$work/unfinished.npz" "$prompts"/train_*.jsonl \
    --seconds "${ANSWER_S:-140}" --samples "${SAMPLES:-2}" --invented "${INVENTED:-30000}" \
    || [ -e "$work/unfinished.npz" ]
  mv "$work/unfinished.npz" "$work/answers.npz"
fi
say train
left=$((limit - record - SECONDS))
# A sixth goes to looks at held-out answers and the start; a run that is cut leaves the draft of its last look.
timeout "$left" python3 "$here/train_draft.py" "$work/target" "$work/answers.npz" "$work/trained" \
  --seconds "${TRAIN_S:-$((left * 5 / 6))}" || [ -e "$work/trained/draft/config.json" ]
cp "$work/trained/curve.csv" "$out/"
cp -r "$work/trained/draft" "$out/"
say record
cat "$prompts"/spec_bench_*.jsonl "$prompts"/eagle_eval_*.jsonl >"$work/eval.jsonl"
for temperature in 0 0.8; do
  python3 -m draftdial.controller.cli record-acceptance --teacher-forced "$work/target" "$work/trained/draft" \
    "$work/eval.jsonl" --temperature $temperature --out "$out/acceptance_t$temperature.jsonl.gz"
done
say done
