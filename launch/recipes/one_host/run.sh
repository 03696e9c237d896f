#!/usr/bin/env bash
# One host with 8 GPUs: a trainer on the first four, vLLM servers on the others, a sandbox service on its processors.
#
#   launch/recipes/one_host/run.sh FOLDER [more flags of launch.grpo]
#
# The same command goes on where it was stopped. Under systemd (`Restart=on-failure`, `RestartPreventExitStatus=2`,
# `StartLimitBurst=5`) it is started again after a fault, and not after a refusal.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
# shellcheck source-path=SCRIPTDIR source=../parts.sh
source "$here/../parts.sh"

# What may be edited. Sizes are the planner's: 105.1 of 133.4 GiB on an H200,
#   astra plan --config=grpo:14b --config.grpo.remat=heads --topology=h200:4 --mesh=context=4 --tokens=74752
CONFIG=${CONFIG:-grpo:14b}
WEIGHTS=${WEIGHTS:-Qwen/Qwen3-14B}
ENVIRONMENTS=${ENVIRONMENTS:-$root/runs/environments/train}
MESH=${MESH:-context=4}
REMAT=${REMAT:-heads}
TRAINER_GPUS=${TRAINER_GPUS:-0,1,2,3}
SERVER_GPUS=${SERVER_GPUS:-4,5 6,7} # a server for each word, over that many GPUs
METRICS_PORT=${METRICS_PORT:-9100} # on this machine alone
PYTHON=${PYTHON:-$(python_of "$root")} # with the extra `cuda`
VLLM=${VLLM:-$root/.venv-vllm/bin/vllm}  # with astra_jax/rollout/vllm/plugin beside it

[ $# -ge 1 ] || { sed -n '2,8p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[ -x "$VLLM" ] || { echo "no vLLM at $VLLM; docs/vllm.md says how to install it, or set VLLM" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
LOGS=$folder/logs
mkdir -p "$LOGS" "$folder/keys" "$folder/policy"
for key in api sync sandbox metrics; do make_key "$folder/keys/$key"; done
cd "$root"
job=(--config="$CONFIG" --weights="$WEIGHTS" --environments="$ENVIRONMENTS" --workdir="$folder/run" "$@")

rm -rf "$folder/served.new"
length=$(JAX_PLATFORMS=cpu "$PYTHON" -m launch.grpo "${job[@]}" --write_serving_folder="$folder/served.new" |
  sed -n 's/.*--max-model-len=\([0-9]*\).*/\1/p')
rm -rf "$folder/served"
mv "$folder/served.new" "$folder/served"

trap stop_all EXIT
VLLM_API_KEY=$(cat "$folder/keys/api")
export VLLM_API_KEY # not on a command line, which others on this machine can read
read -r -a servers <<<"$SERVER_GPUS"
read -r -a ports <<<"$(free_ports $((${#servers[@]} + 1)))"
port_sandbox=${ports[-1]}
start sandbox "$PYTHON" -m launch.sandbox_server --port="$port_sandbox" --key_file="$folder/keys/sandbox"
urls=()
for i in "${!servers[@]}"; do
  gpus=${servers[$i]}
  commas=${gpus//[^,]/}
  start "server-$i" env CUDA_VISIBLE_DEVICES="$gpus" ASTRA_SYNC_ROOT="$folder/policy" \
    ASTRA_SYNC_KEY_FILE="$folder/keys/sync" VLLM_PLUGINS=astra,astra_sync \
    "$VLLM" serve "$folder/served" --host=127.0.0.1 --port="${ports[$i]}" --load-format=dummy \
    --tensor-parallel-size="$((${#commas} + 1))" --max-model-len="$length" \
    --weight-transfer-config='{"backend": "astra"}' --enable-scale-out --logprobs-mode=processed_logprobs
  urls+=("http://127.0.0.1:${ports[$i]}")
done
await sandbox "http://127.0.0.1:$port_sandbox/health" 60
for i in "${!servers[@]}"; do await "server-$i" "${urls[$i]}/health" 1200; done

# The memory that the planner counts with. Compiler options are the program's own, by the kind of chip.
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 CUDA_VISIBLE_DEVICES=$TRAINER_GPUS
run_to_end "$PYTHON" -m launch.grpo "${job[@]}" --mesh="$MESH" --config.grpo.remat="$REMAT" \
  --publish_dir="$folder/policy" --rollout_url="$(IFS=,; echo "${urls[*]}")" --rollout_key_file="$folder/keys/api" \
  --rollout_sync_key_file="$folder/keys/sync" --rollout_min_servers=1 \
  --sandbox_url="http://127.0.0.1:$port_sandbox" --sandbox_key_file="$folder/keys/sandbox" \
  --metrics_port="$METRICS_PORT" --metrics_key_file="$folder/keys/metrics"
