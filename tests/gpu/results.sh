#!/usr/bin/env bash
# results.sh INPUT OUT SEED...: a cost profile, a policy trained on it, and policies, fixed k and servers under many
# loads. A server with speculation (off mode kv-only) that can replay recorded acceptance is on GPU 0, one without
# speculation on GPU 1; they are profiled at the same time, and under load one at a time. INPUT holds
#   start.safetensors                                       any policy of this server's tiers
#   acceptance/{chat,code,finance,maths,poor,reasoning}.jsonl                  (draftdial export-acceptance)
#   lengths.csv, swing.csv                                                     (tests/gpu/short_requests.py)
# TRAIN_SITE: a folder of packages that training needs beyond those on the Python path.
# Leaves in OUT: h200-llama3-8b.json (the profile) and its measurements, policy.safetensors, off-500.json, off-2000.json,
# host.jsonl (how slow the host was, and when), and SEED/PART/bench.json. Each seed is one repeat over all parts, what
# matters most first, so that whatever is there when time runs out is whole. Exit status 3 if the host is too slow.
set -uo pipefail
input=$1 out=$2
shift 2
. "$(dirname "$0")/servers.sh"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
url=http://127.0.0.1:30000 plain_url=http://127.0.0.1:30100
profile=$out/h200-llama3-8b.json policy=$out/policy.safetensors
# Idle servers must not take the host's time from the other one, nor logging from the scheduler.
common=(--mem-fraction-static 0.85 --max-total-tokens "${POOL_TOKENS:-600000}" --sleep-on-idle --log-level warning)
replay=()
for domain in chat code finance maths poor reasoning; do
  replay+=(--replay-acceptance "$input/acceptance/$domain.jsonl")
done
DRAFTDIAL_BENCHMARK=1 start 0 "$out/spec.log" "$input/start.safetensors" --off-mode kv-only "${replay[@]}" -- \
  "${target[@]}" "${draft[@]}" --port 30000 "${common[@]}"
spec=$!
start 1 "$out/plain.log" "$input/start.safetensors" --warn -- "${target[@]}" --port 30100 "${common[@]}"
plain=$!
await $plain_url $plain "$out/plain.log" || exit 1
await $url $spec "$out/spec.log" || exit 1

host() { python3 "$here/host_check.py" $url --out "$out/host.jsonl"; }
host || host || [ "${SLOW_HOST:-stop}" = go ] || exit 3
python3 "$here/gpu_speed.py" >"$out/gpu_speed.json"

python3 "$here/profile_both.py" $url --no-spec $plain_url --out "$profile" --batches "${graphs// /,}" \
  --rounds "${ROUNDS:-20}" --held-out "${HELD_OUT:-5}" >"$out/profile.txt" 2>&1
echo "profile: status $?, at $SECONDS s"
host

train() {
  PYTHONPATH=${PYTHONPATH:-}:${TRAIN_SITE:-} OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 \
    $dial train --json profile="$profile" engine=kv-only >"$out/train.json" 2>"$out/train.log"
}
train &
training=$!
off_modes() { python3 "$here/off_modes.py" $url $plain_url --batches "$1" --context "$2" --out "$out/off-$2.json"; }
off_modes 1,8,32,64,128,256 500
off_modes 1,8,32,64,128,256 2000
echo "off modes at $SECONDS s"
if wait $training; then
  cp "$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["policy"])' "$out/train.json")" "$policy"
else
  tail -5 "$out/train.log"
  echo "not trained: the policy is $input/start.safetensors"
  cp "$input/start.safetensors" "$policy"
fi
rule() { $dial export-rule "$@" --profile "$profile" --off-mode kv-only; }
rule sglang-adaptive --out "$out/sglang-adaptive.safetensors"
rule threshold --k 3 --batch 192 --out "$out/threshold.safetensors"
$dial deploy "$policy" $url || exit 1
echo "deployed at $SECONDS s"

# bench PART ARGUMENTS...
bench() {
  local part=$1 begun=$SECONDS
  shift
  host
  mkdir -p "$out/$seed"
  $dial bench $url --deployed "$policy" --repeats 1 --seed "$seed" --lengths "trace:$input/lengths.csv" \
    --out "$out/$seed/$part" "$@" >"$out/$seed/$part.txt" 2>&1
  echo "$seed/$part: status $?, $((SECONDS - begun)) s, at $SECONDS s"
}

adaptive=policy:$out/sglang-adaptive.safetensors
few="steer off fixed-1 fixed-2 $adaptive"
good=chat,code,reasoning mixed=finance,maths,chat,code,reasoning
high=(--closed 256,192,128,64 --per-slot 2 --requests 10)
low=(--closed 1,2,4,8,16,32 --per-slot 3 --requests 10)
swing=$(($(wc -l <"$input/swing.csv") - 1))
for seed in "$@"; do
  bench good-high --domains $good "${high[@]}" --arms $few fixed-3 fixed-5 --no-spec $plain_url
  bench mixed-high --domains $mixed --domain-span 40:160 "${high[@]}" --arms $few fixed-3 fixed-5
  bench poor-high --domains poor "${high[@]}" --arms $few --no-spec $plain_url
  bench good-low --domains $good "${low[@]}" --arms $few fixed-3 fixed-5 fixed-7 --no-spec $plain_url
  bench mixed-low --domains $mixed --domain-span 6:20 "${low[@]}" --arms $few fixed-3 fixed-5 fixed-7
  bench swing --domains $mixed,poor --domain-span 40:120 --trace "$input/swing.csv" --requests "$swing" \
    --arms $few fixed-3 "policy:$out/threshold.safetensors" --no-spec $plain_url
  bench poor-low --domains poor "${low[@]}" --arms $few fixed-3 --no-spec $plain_url
done
timeout 20 $dial status $url
get $url/server_info >"$out/server_info.json"
grep -nE "Traceback|Error|assert" "$out/spec.log" "$out/plain.log" | cut -c1-300 | head -20
echo "$SECONDS s in all"
