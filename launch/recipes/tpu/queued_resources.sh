#!/usr/bin/env bash
# SFT or GRPO on TPU VMs by queued resources: one slice, or several, that train, and for GRPO single hosts that serve.
#
#   launch/recipes/tpu/queued_resources.sh up         request the machines; they come when there is room
#   launch/recipes/tpu/queued_resources.sh train      start or resume the run on all hosts, and wait for it
#   launch/recipes/tpu/queued_resources.sh down       give the machines back
#   PROGRAM=sft launch/recipes/tpu/queued_resources.sh up|train|down       the same for SFT
#
# Spot machines that were taken away are SUSPENDED: `down`, `up`, `train` again, and the run resumes from its bucket.
# What does that by itself is xpk.sh beside this file, or SkyPilot.
set -euo pipefail

# What may be edited.
PROGRAM=${PROGRAM:-grpo} # or sft
BUCKET=${BUCKET:-gs://YOUR-BUCKET/$PROGRAM}
if [ "$PROGRAM" = sft ]; then
  CONFIG=${CONFIG:-sft:auto} # and the mesh: all chips of all slices
  WEIGHTS=${WEIGHTS:-Qwen/Qwen3-4B}
  DATA=${DATA:-gs://YOUR-BUCKET/train.jsonl}
  HELD_OUT=${HELD_OUT:-5%}
  SERVERS=0
fi
# Sizes are the planner's: 26.9 of 31.2 GiB on a v6e chip. Of several slices data is as many (-1).
#   astra plan --config=grpo:14b --config.grpo.remat=heads --topology=v6e:4x4 --mesh=context=16 --tokens=74752
CONFIG=${CONFIG:-grpo:14b}
MESH=${MESH:-data=-1,context=16}
REMAT=${REMAT:-heads}
WEIGHTS=${WEIGHTS:-gs://YOUR-BUCKET/models/Qwen3-14B} # as astra convert --to_orbax writes it, or a name on the Hub
ENVIRONMENTS=${ENVIRONMENTS:-gs://YOUR-BUCKET/environments/train}
SLICE=${SLICE:-v6e-16}
SLICES=${SLICES:-1}
RUNTIME=${RUNTIME:-v2-alpha-tpuv6e}
SERVER_SLICE=${SERVER_SLICE:-v6e-8}
SERVERS=${SERVERS:-2}
NAME=${NAME:-$PROGRAM}
PROJECT=${PROJECT:-YOUR-PROJECT}
ZONE=${ZONE:-us-east5-b}
REGISTRY=${REGISTRY:-us-docker.pkg.dev/YOUR-PROJECT/astra}
KEYS=${KEYS:-astra-api astra-sync astra-sandbox astra-metrics} # in Secret Manager

here=("--project=$PROJECT" "--zone=$ZONE")
tpus() { gcloud compute tpus "$@" "${here[@]}"; }

create() { # create NAME SLICE COUNT
  local nodes=("--node-id=$1")
  [ "$3" = 1 ] || nodes=("--node-count=$3" "--node-prefix=$1")
  tpus queued-resources create "$1" "${nodes[@]}" --accelerator-type="$2" --runtime-version="$RUNTIME" --spot
}

# What a host does first: log into the registry, and fetch the keys into memory alone.
prepare="sudo gcloud auth configure-docker ${REGISTRY%%/*} --quiet
mkdir -p /dev/shm/keys && chmod 700 /dev/shm/keys
for key in $KEYS; do gcloud secrets versions access latest --secret=\$key >/dev/shm/keys/\${key#astra-}; done"
docker="sudo docker run --rm --privileged --net=host -v /dev/shm/keys:/secrets:ro"

nodes_of() { # nodes_of NAME COUNT
  if [ "$2" = 1 ]; then echo "$1"; else for ((i = 0; i < $2; i++)); do echo "$1-$i"; done; fi
}
address() { tpus tpu-vm describe "$1" --format='value(networkEndpoints[0].ipAddress)'; }
on() { # on NODE HOSTS COMMAND
  tpus tpu-vm ssh "$1" --worker="$2" --command="$3"
}

case "${1:-}" in
up)
  create "$NAME" "$SLICE" "$SLICES"
  [ "$SERVERS" = 0 ] || create "$NAME-servers" "$SERVER_SLICE" "$SERVERS"
  ;;
down)
  tpus queued-resources delete "$NAME" --force --quiet
  [ "$SERVERS" = 0 ] || tpus queued-resources delete "$NAME-servers" --force --quiet
  ;;
train)
  urls=() sandboxes=()
  for node in $(nodes_of "$NAME-servers" "$SERVERS"); do
    at=$(address "$node")
    urls+=("http://$at:8000")
    sandboxes+=("http://$at:8700")
    on "$node" all "$prepare
sudo docker rm -f served server sandbox >/dev/null 2>&1; sudo rm -rf /tmp/served
$docker --name=served -v /tmp/served:/out -e JAX_PLATFORMS=cpu $REGISTRY/trainer:cpu python -m launch.grpo \
  --config=$CONFIG --workdir=$BUCKET/run --weights=$WEIGHTS --environments=$ENVIRONMENTS --write_serving_folder=/out/policy
$docker -d --name=server -v /tmp/served:/served:ro -e ASTRA_SYNC_ROOT=$BUCKET/policy -e ASTRA_SYNC_KEY_FILE=/secrets/sync \
  -e VLLM_PLUGINS=astra_sync -e VLLM_API_KEY=\$(cat /dev/shm/keys/api) $REGISTRY/vllm:tpu vllm serve /served/policy \
  --host=0.0.0.0 --port=8000 --load-format=dummy --tensor-parallel-size=8 --max-model-len=74752 \
  --worker-extension-cls=astra_vllm.tpu.PolicyWorker --enable-scale-out --logprobs-mode=processed_logprobs
sudo docker run -d --name=sandbox --net=host --user=\$(id -u) --read-only --cap-drop=ALL \
  --security-opt=no-new-privileges -v /dev/shm/keys/sandbox:/secrets/sandbox:ro $REGISTRY/sandbox:latest python -m launch.sandbox_server --host=0.0.0.0 --port=8700 \
  --key_file=/secrets/sandbox"
  done
  flags="--config=$CONFIG --workdir=$BUCKET/run --weights=$WEIGHTS --multihost \
  --metrics_host=0.0.0.0 --metrics_port=9100 --metrics_key_file=/secrets/metrics"
  if [ "$PROGRAM" = sft ]; then
    flags+=" --data=$DATA --held_out=$HELD_OUT"
  else
    flags+=" --environments=$ENVIRONMENTS --mesh=$MESH --config.grpo.remat=$REMAT \
  --publish_dir=$BUCKET/policy --rollout_url=$(IFS=,; echo "${urls[*]}") --rollout_key_file=/secrets/api \
  --rollout_sync_key_file=/secrets/sync --rollout_min_servers=1 \
  --sandbox_url=$(IFS=,; echo "${sandboxes[*]}") --sandbox_key_file=/secrets/sandbox"
  fi
  ended=0
  hosts=()
  for node in $(nodes_of "$NAME" "$SLICES"); do
    # On every host the same; the slices' hosts find each other.
    on "$node" all "$prepare
sudo docker rm -f trainer >/dev/null 2>&1
$docker --name=trainer $REGISTRY/trainer:tpu launch/recipes/until_done.sh python -m launch.$PROGRAM $flags" &
    hosts+=($!)
  done
  for one in "${hosts[@]}"; do wait "$one" || ended=$?; done
  exit "$ended"
  ;;
*)
  sed -n '2,10p' "${BASH_SOURCE[0]}" >&2
  exit 2
  ;;
esac
