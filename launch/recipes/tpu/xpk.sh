#!/usr/bin/env bash
# SFT or GRPO on a GKE cluster that XPK has made: one workload of one slice or several. XPK makes a JobSet of it, which
# Kueue admits; it is started again after a preemption (75, 137, 143) and a fault (1, 69), RESTARTS times in all, not
# after a refusal (2). GRPO's servers, sandboxes and keys are those of ../kubernetes/tpu, applied before.
#
# XPK mounts no Kubernetes secrets. Keys lie in a bucket that the workload alone may read, once for a cluster:
#   xpk storage attach keys --cluster=CLUSTER --type=gcsfuse --bucket=YOUR-KEYS --mount-point=/secrets --readonly=true
#
#   launch/recipes/tpu/xpk.sh                   # GRPO
#   PROGRAM=sft launch/recipes/tpu/xpk.sh
set -euo pipefail

# What may be edited.
PROGRAM=${PROGRAM:-grpo} # or sft
BUCKET=${BUCKET:-gs://YOUR-BUCKET/$PROGRAM}
if [ "$PROGRAM" = sft ]; then
  CONFIG=${CONFIG:-sft:auto} # and the mesh: all chips of all slices
  WEIGHTS=${WEIGHTS:-Qwen/Qwen3-4B}
  DATA=${DATA:-gs://YOUR-BUCKET/train.jsonl}
  HELD_OUT=${HELD_OUT:-5%}
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
CLUSTER=${CLUSTER:-YOUR-CLUSTER}
PROJECT=${PROJECT:-YOUR-PROJECT}
ZONE=${ZONE:-us-east5-b}
REGISTRY=${REGISTRY:-us-docker.pkg.dev/YOUR-PROJECT/astra}
RESTARTS=${RESTARTS:-20}

command="exec launch/recipes/until_done.sh python -m launch.$PROGRAM --config=$CONFIG --workdir=$BUCKET/run \
  --weights=$WEIGHTS --multihost --metrics_host=0.0.0.0 --metrics_port=9100 --metrics_key_file=/secrets/metrics"
if [ "$PROGRAM" = sft ]; then
  command+=" --data=$DATA --held_out=$HELD_OUT"
else
  command+=" --environments=$ENVIRONMENTS --mesh=$MESH --config.grpo.remat=$REMAT \
  --publish_dir=$BUCKET/policy --rollout_url=dns+http://servers:8000 --rollout_key_file=/secrets/api \
  --rollout_sync_key_file=/secrets/sync --rollout_min_servers=1 \
  --sandbox_url=http://sandbox-0.sandbox:8700,http://sandbox-1.sandbox:8700 --sandbox_key_file=/secrets/sandbox \
  --sandbox_tier=B"
fi

xpk workload create --workload="$PROGRAM" --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" \
  --tpu-type="$SLICE" --num-slices="$SLICES" --docker-image="$REGISTRY/trainer:tpu" --storage=keys \
  --max-restarts="$RESTARTS" --restart-on-exit-codes=1,69,75 --command="$command"
