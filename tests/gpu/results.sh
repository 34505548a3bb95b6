#!/usr/bin/env bash
# results.sh INPUT OUT PART...: what each PART measures, in this order. A server with speculation (off mode kv-only) that can
# replay recorded acceptance is on GPU 0, one without speculation on GPU 1 (PLAIN_GPU; 0 with POOL_TOKENS=300000 puts both on
# one GPU); under load one at a time. First, k = 0 must answer what the other server answers. A PART is one of
#   profile                    a cost profile of both servers at once, and a policy trained on it
#   off-modes                  what a round takes in each off mode
#   host                       how long the host is busy in a round: the policy of every load after it is repriced by this
#                              (`draftdial reprice`)
#   {good,mixed,poor}-{low,mid}[:C,C...][@REPEATS]  the policy, every fixed k and both servers, run by run on the same requests
#   {good,mixed,poor}-high[:C,C...][@REPEATS]       the same in turns under one load
#   adaptive[:C,C...][@REPEATS]                     turns of the policy and of SGLang's rule at its defaults, acceptance good
#   swing                                           an open loop, run by run
# Without the part `profile`, the profile is the shipped one and the policy INPUT's. INPUT holds
#   start.safetensors                                       a policy of this server's tiers
#   acceptance/{chat,code,finance,maths,poor,reasoning}.jsonl                  (draftdial export-acceptance)
#   even.csv, long.csv, swing.csv                                              (tests/gpu/short_requests.py)
# REPEATS (9) of every load, turns of TURN_S seconds (0.75), with seeds from SEED (100) on; ARMS: other than all that may
# win, policy:FILE among them, POOR_ARMS: the same for acceptance poor alone; NO_SPEC=no: `low` and `mid` without the other
# server. TRAIN_SITE: packages that training needs beyond those on the Python path.
# Leaves in OUT: h200-llama3-8b.json (the profile) and its measurements, policy.safetensors (trained on it),
# PART.safetensors (that policy repriced, which steered in PART), off-500.json, off-2000.json, host.jsonl (how slow the host
# was, when), and PART/bench.json, which is whole at any time. Exit status 3 if the host is too slow (SLOW_HOST=go: never
# mind), 4 if answers differ.
set -uo pipefail
[ $# -gt 2 ] || { echo "usage: results.sh INPUT OUT PART..."; exit 2; }
input=$1 out=$2
shift 2
for part in "$@"; do
  [[ $part =~ ^(profile|off-modes|host|((good|mixed|poor)-(low|mid|high)|adaptive)(:[0-9,]+)?(@[0-9]+)?|swing)$ ]] || { echo "no such part: $part"; exit 2; }
done
mkdir -p "$out" || exit 2
. "$(dirname "$0")/servers.sh"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
url=http://127.0.0.1:30000 plain_url=http://127.0.0.1:30100
profile=h200-llama3-8b trained=$input/start.safetensors policy=$trained training="" is_ready="" host_bench=""
# Idle servers must not take the host's time from the other one, nor logging from the scheduler.
common=(--mem-fraction-static 0.85 --max-total-tokens "${POOL_TOKENS:-640000}" --sleep-on-idle --log-level warning)
replay=()
for domain in chat code finance maths poor reasoning; do
  replay+=(--replay-acceptance "$input/acceptance/$domain.jsonl")
done
DRAFTDIAL_BENCHMARK=1 start 0 "$out/spec.log" "$input/start.safetensors" --off-mode kv-only "${replay[@]}" -- \
  "${target[@]}" "${draft[@]}" --port 30000 "${common[@]}"
spec=$!
start "${PLAIN_GPU:-1}" "$out/plain.log" "$input/start.safetensors" --warn -- "${target[@]}" --port 30100 "${common[@]}"
plain=$!
await $plain_url $plain "$out/plain.log" || exit 1
await $url $spec "$out/spec.log" || exit 1

host() { python3 "$here/host_check.py" $url --out "$out/host.jsonl"; }
host || host || [ "${SLOW_HOST:-stop}" = go ] || exit 3
python3 "$here/gpu_speed.py" >"$out/gpu_speed.json"
$dial set $url --force-k 0
python3 "$here/same_answers.py" $url $plain_url | tee "$out/same_answers.txt" ||
  { echo "k = 0 does not answer what the other server does"; exit 4; }
$dial set $url --force-k none

measure_profile() {
  local status
  $dial set $url --mode off # what the policy would do between two prefills is not to be measured
  python3 "$here/profile_both.py" $url --no-spec $plain_url --out "$out/h200-llama3-8b.json" --batches "${graphs// /,}" \
    --rounds "${ROUNDS:-20}" --held-out "${HELD_OUT:-5}" >"$out/profile.txt" 2>&1
  status=$?
  $dial set $url --mode steer
  [ $status = 0 ] || return $status
  profile=$out/h200-llama3-8b.json
  train &
  training=$!
}
train() {
  PYTHONPATH=${PYTHONPATH:-}:${TRAIN_SITE:-} OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 \
    $dial train --json profile="$profile" engine=kv-only >"$out/train.json" 2>"$out/train.log"
}
off_modes() { python3 "$here/off_modes.py" $url $plain_url --batches "$1" --context "$2" --out "$out/off-$2.json"; }
rule() { $dial export-rule "$@" --profile "$profile" --off-mode kv-only; }
ready_policies() {
  if [ -n "$training" ]; then
    if wait $training; then
      trained=$out/policy.safetensors
      cp "$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["policy"])' "$out/train.json")" "$trained"
    else
      tail -5 "$out/train.log"
      echo "not trained: the policy is $trained"
    fi
  fi
  rule sglang-adaptive --out "$out/sglang-adaptive.safetensors"
  rule threshold --k 3 --batch 192 --out "$out/threshold.safetensors"
  is_ready=yes
}
deploy() {
  policy=$trained
  if [ -n "$host_bench" ]; then
    $dial reprice "$trained" "$host_bench" --out "$out/$1.safetensors" && policy=$out/$1.safetensors
  fi
  $dial deploy "$policy" $url || exit 1
}

every_k="fixed-1 fixed-2 fixed-3 fixed-5 fixed-7"
arms=${ARMS:-steer off $every_k}
adaptive=policy:$out/sglang-adaptive.safetensors
good="--domains chat,code,reasoning" mixed="--domains finance,maths,chat,code,reasoning"
swing=$(($(wc -l <"$input/swing.csv") - 1))
load() {
  local closed load=${1%@*} repeats=${REPEATS:-9} span how plain="--no-spec $plain_url"
  [ "$load" = "$1" ] || repeats=${1#*@}
  repeats="--repeats $repeats"
  case $load in
    *:*) closed="--closed ${load#*:}" ;;
    *-low) closed="--closed 1,2,4,8" ;;
    *-mid) closed="--closed 16,32" ;;
    host) closed="--closed 8" ;;
    adaptive) closed="--closed 64,128" ;;
    *) closed="--closed 16,32,64,128,192,256" ;;
  esac
  # Few requests at a time differ more than the host does from second to second, many differ less.
  case $1 in
    *-low* | *-mid*)
      how="$closed $repeats --per-slot 2 --requests 2 --lengths trace:$input/even.csv --drop 0.2"
      span="--domain-span 1:4"
      [[ $1 == *-low* ]] || span="--domain-span 20:80"
      [ "${NO_SPEC:-yes}" = yes ] || plain=""
      ;;
    *)
      how="$closed $repeats --per-slot 3 --requests 10 --lengths trace:$input/long.csv"
      [[ $1 == adaptive* ]] || how="$how --switchback ${TURN_S:-0.75} --drop 0.03"
      span="--domain-span 20:80"
      ;;
  esac
  case $1 in
    good-*) how="$how $good --arms $arms $plain" ;;
    mixed-*) how="$how $mixed $span --arms $arms $plain" ;;
    poor-*) how="$how --domains poor --arms ${POOR_ARMS:-$arms} $plain" ;;
    host) how="$closed --repeats 3 --switchback ${TURN_S:-0.75} --lengths trace:$input/long.csv $mixed $span --arms steer off $every_k" ;;
    adaptive*) how="$how --switchback ${ADAPTIVE_TURN_S:-2} $good --deployed $policy --arms steer $adaptive" ;;
    swing)
      how="--trace $input/swing.csv --requests $swing $mixed,poor --domain-span 40:120 $repeats --deployed $policy"
      how="$how --arms $arms policy:$out/threshold.safetensors $adaptive $plain"
      ;;
  esac
  [[ $how != *policy:* || $how == *--deployed* ]] || how="$how --deployed $policy" # to put it back
  $dial bench $url $how --baseline steer --seed "${SEED:-100}" --out "$out/$1" >"$out/$1.txt" 2>&1
}

for part in "$@"; do
  begun=$SECONDS
  host
  case $part in
    profile) measure_profile ;;
    off-modes) off_modes 1,8,32,64,128,256 500 && off_modes 1,8,32,64,128,256 2000 ;;
    *)
      [ -n "$is_ready" ] || ready_policies
      deploy "$part"
      load "$part"
      ;;
  esac
  echo "$part: status $?, $((SECONDS - begun)) s, at $SECONDS s"
  [ $part != host ] || host_bench=$out/host/bench.json
done
timeout 20 $dial status $url
get $url/server_info >"$out/server_info.json"
grep -nE "Traceback|Error|assert" "$out/spec.log" "$out/plain.log" | cut -c1-300 | head -20
echo "$SECONDS s in all"
