# A rollout server on TPUs: vLLM with tpu-inference, and our plugin; from a checkout:
#   docker build -f launch/recipes/containers/vllm-tpu.Dockerfile -t REGISTRY/vllm:tpu .
FROM python:3.12.12-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
COPY launch/recipes/containers/requirements/vllm-tpu.txt /opt/requirements.txt
RUN pip install --no-deps -r /opt/requirements.txt && pip check
COPY astra_jax/rollout/vllm/plugin /opt/plugin
RUN pip install --no-deps /opt/plugin
ENV VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=astra_sync
EXPOSE 8000
CMD ["vllm", "serve", "--help"]
